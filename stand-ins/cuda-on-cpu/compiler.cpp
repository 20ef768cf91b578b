// Stands in for NVRTC: makes a shared object of a kernel's CUDA C++, with the host's compiler.
//
// What stands for PTX is the shared object's path, which the stand-in for the driver loads.

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <fstream>
#include <regex>
#include <spawn.h>
#include <sstream>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

extern char **environ;

namespace {

enum Result { Success = 0, ProgramCreationFailure = 2, InvalidInput = 3, InvalidOption = 5, Compilation = 6 };

struct Program {
    std::string source, log, object;
};

// The folder of this library: what kernels are compiled against lies in it, and so do compiled kernels.
std::string home() {
    Dl_info info;
    if (!dladdr(reinterpret_cast<void *>(&home), &info)) return ".";
    const std::string path = info.dli_fname;
    return path.substr(0, path.rfind('/'));
}

// FNV-1a.
std::string hash(const std::string &text) {
    unsigned long long sum = 0xcbf29ce484222325;
    for (unsigned char byte : text) sum = (sum ^ byte) * 0x100000001b3;
    char digits[17];
    snprintf(digits, sizeof digits, "%016llx", sum);
    return digits;
}

std::string read(const std::string &path) {
    std::ostringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
}

bool starts(const std::string &text, const char *with) { return text.rfind(with, 0) == 0; }

// `max.NaN.f32` as a name.
std::string name_of(std::string instruction) {
    for (char &c : instruction)
        if (!isalnum(static_cast<unsigned char>(c))) c = '_';
    return "ptx_" + instruction;
}

// `asm("max.NaN.f32 %0, %1, %2;" : "=f"(to) : "f"(a), "f"(b));` becomes `ptx_max_NaN_f32(to, a, b);`, if there is one
// instruction that takes its operands in their order.
std::string calls_for_assembly(const std::string &line) {
    static const std::regex assembly(
        R"re(asm(?: volatile)?\("([\w.:]+) ((?:\[?%\d\]?(?:, )?)+);" : "=\w"\((\w+)\) : ((?:"\w"\(\w+\)(?:, )?)+) ?\);)re");
    static const std::regex constraint(R"re("\w"\((\w+)\))re");
    std::smatch found;
    if (!std::regex_search(line, found, assembly)) return line;
    std::string operands = found[2];
    operands.erase(std::remove_if(operands.begin(), operands.end(), [](char c) { return !isdigit(c); }),
                   operands.end());
    if (operands != std::string("0123456789").substr(0, operands.size())) return line;
    const std::string call = name_of(found[1]) + "(" + found[3].str() + ", " +
                             std::regex_replace(found[4].str(), constraint, "$1") + ");";
    return found.prefix().str() + call + found.suffix().str();
}

// What the host's compiler takes, in as many lines as the source has. Empty if there is no kernel in it.
std::string rewritten(const std::string &source) {
    static const std::regex header(R"(#include <(mma|cuda_fp16|cuda_bf16)\.h>)");
    static const std::regex shared(R"(extern __shared__ __align__\(\d+\) char (\w+)\[\];)");
    static const std::regex kernel(R"(__global__ void (?:__launch_bounds__\((\d+)\))?\s*(\w+)\()");
    const bool waits = source.find("__sync") != std::string::npos || source.find("wmma") != std::string::npos;
    std::ostringstream to;
    std::istringstream from(source);
    std::string exports;
    to << "#include \"device.h\"\n#line 1 \"kernel.cu\"\n";
    for (std::string line; std::getline(from, line);) {
        std::smatch found;
        if (std::regex_match(line, header)) line.clear();
        if (line.find("__shared__") != std::string::npos)
            line = std::regex_replace(line, shared, "char *const $1 = place->shared;");
        if (line.find("asm") != std::string::npos) line = calls_for_assembly(line);
        if (line.find("__global__") != std::string::npos && std::regex_search(line, found, kernel)) {
            const std::string bound = found[1].matched ? found[1].str() : "1024";
            exports += "EXPORT_KERNEL(" + found[2].str() + ", " + bound + ", " + (waits ? "true" : "false") + ")\n";
        }
        to << line << '\n';
    }
    return exports.empty() ? exports : to.str() + exports;
}

// Runs a command with its output in a file; whether it succeeded.
bool run(const std::vector<std::string> &command, const std::string &output) {
    std::vector<char *> words;
    for (const std::string &word : command) words.push_back(const_cast<char *>(word.c_str()));
    words.push_back(nullptr);
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, 1, output.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
    posix_spawn_file_actions_adddup2(&files, 1, 2);
    pid_t child;
    int status = -1;
    const int error = posix_spawnp(&child, words[0], &files, nullptr, words.data(), environ);
    posix_spawn_file_actions_destroy(&files);
    return !error && waitpid(child, &status, 0) == child && status == 0;
}

// Makes `base`.so of `base`.cpp. Whoever else makes the same one at the same time does no harm.
bool build(const std::string &base, const std::string &source, const std::string &architecture, std::string &log) {
    static std::atomic<unsigned> number;
    const std::string own = base + "." + std::to_string(getpid()) + "." + std::to_string(number++);
    std::ofstream(own + ".cpp") << source;
    const bool built = run({"c++", "-std=c++17", "-O2", "-w", "-march=native", "-ffp-contract=fast",
                            "-fno-strict-aliasing", "-fno-exceptions", "-shared", "-fPIC", "-Wl,-z,defs",
                            "-D__CUDA_ARCH__=" + architecture, "-I" + home(), "-o", own + ".so", own + ".cpp"},
                           own + ".log");
    log = read(own + ".log");
    if (log.empty() && !built) log = "`c++` could not be run, or `" + home() + "` not be written";
    unlink((own + ".log").c_str());
    const bool kept = built && !rename((own + ".cpp").c_str(), (base + ".cpp").c_str()) &&
                      !rename((own + ".so").c_str(), (base + ".so").c_str());
    if (!kept) unlink((own + ".cpp").c_str());
    return kept;
}

} // namespace

extern "C" {

Result nvrtcVersion(int *major, int *minor) {
    *major = 13;
    *minor = 0;
    return Success;
}

const char *nvrtcGetErrorString(Result result) {
    switch (result) {
    case Success: return "NVRTC_SUCCESS";
    case ProgramCreationFailure: return "NVRTC_ERROR_PROGRAM_CREATION_FAILURE";
    case InvalidInput: return "NVRTC_ERROR_INVALID_INPUT";
    case InvalidOption: return "NVRTC_ERROR_INVALID_OPTION";
    case Compilation: return "NVRTC_ERROR_COMPILATION";
    }
    return "NVRTC_ERROR unknown";
}

Result nvrtcCreateProgram(Program **program, const char *source, const char *, int headers, const char *const *,
                          const char *const *) {
    if (headers) return ProgramCreationFailure;
    *program = new Program{source, "", ""};
    return Success;
}

Result nvrtcDestroyProgram(Program **program) {
    delete *program;
    *program = nullptr;
    return Success;
}

Result nvrtcCompileProgram(Program *program, int count, const char *const *options) {
    std::string architecture = "750";
    for (const std::string& option : std::vector<std::string>(options, options + count)) {
        if (starts(option, "--gpu-architecture=sm_"))
            architecture = std::to_string(atoi(option.c_str() + strlen("--gpu-architecture=sm_")) * 10);
        else if (!starts(option, "--include-path=") && option != "-lineinfo") {
            program->log = "unknown option `" + option + "`";
            return InvalidOption;
        }
    }
    const std::string source = rewritten(program->source);
    if (source.empty()) {
        program->log = "no kernel in the source";
        return Compilation;
    }
    const std::string base = home() + "/" + hash(architecture + source);
    if (access((base + ".so").c_str(), R_OK) && !build(base, source, architecture, program->log)) return Compilation;
    program->object = base + ".so";
    return Success;
}

Result nvrtcGetProgramLogSize(Program *program, size_t *size) {
    *size = program->log.size() + 1;
    return Success;
}

Result nvrtcGetProgramLog(Program *program, char *log) {
    strcpy(log, program->log.c_str());
    return Success;
}

Result nvrtcGetPTXSize(Program *program, size_t *size) {
    *size = program->object.size() + 1;
    return program->object.empty() ? InvalidInput : Success;
}

Result nvrtcGetPTX(Program *program, char *ptx) {
    strcpy(ptx, program->object.c_str());
    return Success;
}

} // extern "C"
