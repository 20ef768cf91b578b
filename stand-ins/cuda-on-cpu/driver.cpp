// Stands in for CUDA's driver: cards whose memory is the host's and whose kernels run on the calling thread.
//
// Everything is done when a call returns, so that streams and events are only names. The entry points are those that
// Hydra and CubeCL call; cudarc looks each up when it is first called, and panics with the name of one that is not here.

#include "launch.h"
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <map>
#include <mutex>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

#ifndef __x86_64__
#error "switching between threads of a block is written for x86-64"
#endif

namespace {

enum Result {
    Success = 0,
    InvalidValue = 1,
    OutOfMemory = 2,
    NoDevice = 100,
    InvalidDevice = 101,
    InvalidImage = 200,
    InvalidContext = 201,
    NotFound = 500,
    LaunchFailed = 719,
    NotSupported = 801,
};

// Says why on standard error.
template <class... A> Result refuse(Result result, const char *why, A... parts) {
    fprintf(stderr, "cuda-on-cpu: ");
    fprintf(stderr, why, parts...);
    fputc('\n', stderr);
    return result;
}

unsigned long long setting(const char *name, unsigned long long otherwise) {
    const char *text = getenv(name);
    if (!text || !*text) return otherwise;
    char *end;
    const unsigned long long value = strtoull(text, &end, 10);
    if (!*end) return value;
    refuse(InvalidValue, "%s is a number, not `%s`", name, text);
    _exit(2);
}

// Cards. A card's address is its context.

struct Card {
    size_t used = 0;
    // Where each allocation begins, and its bytes.
    std::map<uintptr_t, size_t> allocations;
};

const int capability = setting("CUDA_ON_CPU_CAPABILITY", 80);
const size_t memory = setting("CUDA_ON_CPU_MEMORY", 16ull << 30);
// Whether blocks and threads run from the last to the first, to show what depends on their order.
const bool backwards = setting("CUDA_ON_CPU_BACKWARDS", 0);
// Never destroyed: threads may free memory while the process ends.
std::vector<Card> &cards = *new std::vector<Card>(setting("CUDA_ON_CPU_CARDS", 1));
std::mutex allocating;
thread_local Card *current;

// What a block may have of shared memory, if it asks for it.
int shared_limit() {
    switch (capability) {
    case 70: return 96 << 10;
    case 75: return 64 << 10;
    case 80: case 87: return 163 << 10;
    case 86: case 89: case 120: case 121: return 99 << 10;
    default: return 227 << 10;
    }
}

Result allocate(uintptr_t *address, size_t bytes) {
    if (!current) return InvalidContext;
    if (!bytes) return InvalidValue;
    std::lock_guard<std::mutex> lock(allocating);
    void *block;
    if (bytes > memory - current->used || posix_memalign(&block, 4096, bytes)) return OutOfMemory;
    // Whoever reads what nobody wrote reads NaN.
    memset(block, 0xff, bytes);
    *address = reinterpret_cast<uintptr_t>(block);
    current->used += bytes;
    current->allocations[*address] = bytes;
    return Success;
}

Result release(uintptr_t address) {
    std::lock_guard<std::mutex> lock(allocating);
    for (Card &card : cards) {
        const auto found = card.allocations.find(address);
        if (found == card.allocations.end()) continue;
        // Whoever reads it from now on reads NaN, too.
        memset(reinterpret_cast<void *>(address), 0xff, found->second);
        card.used -= found->second;
        card.allocations.erase(found);
        free(reinterpret_cast<void *>(address));
        return Success;
    }
    return refuse(InvalidValue, "nothing is allocated at %#zx, which is to be freed", size_t(address));
}

// Whether these bytes are of one allocation, of whichever card.
bool allocated(uintptr_t address, size_t bytes) {
    std::lock_guard<std::mutex> lock(allocating);
    for (const Card &card : cards) {
        auto after = card.allocations.upper_bound(address);
        if (after == card.allocations.begin()) continue;
        const auto &block = *--after;
        if (address - block.first <= block.second && bytes <= block.second - (address - block.first)) return true;
    }
    return false;
}

Result outside(uintptr_t address, size_t bytes) {
    return refuse(InvalidValue, "a copy touches %zu bytes at %#zx, which are of no allocation", bytes, size_t(address));
}

Result page_locked(void **address, size_t bytes) {
    if (posix_memalign(address, 4096, bytes)) return OutOfMemory;
    memset(*address, 0xff, bytes);
    return Success;
}

// Kernels. Each thread of a block is a fiber with a stack of its own; the scheduler runs one until it waits.

struct Module {
    void *object;
};

struct Function {
    Kernel *kernel;
    // What launches may ask of shared memory.
    unsigned shared;
};

struct Fiber {
    void *stack;
    Thread state;
};

const unsigned most_threads = 1024, warp = 32;
const size_t stack_bytes = 256 << 10, guard_bytes = 4 << 10;

std::mutex running;
Place place;
Kernel *kernel;
void **arguments;
Fiber fibers[most_threads];
void *scheduler;

// Keeps what a called function has to keep, and goes on with another stack.
extern "C" void cuda_on_cpu_switch(void **from, void *to);
asm(".text\n"
    ".globl cuda_on_cpu_switch\n"
    ".hidden cuda_on_cpu_switch\n"
    "cuda_on_cpu_switch:\n"
    "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
    "movq %rsp, (%rdi)\n"
    "movq %rsi, %rsp\n"
    "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n"
    "ret\n");

// Where fibers' stacks begin, each above bytes that may not be touched.
char *stacks() {
    static char *const all = [] {
        const size_t each = stack_bytes + guard_bytes;
        void *const mapped = mmap(nullptr, each * most_threads, PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (mapped == MAP_FAILED) abort();
        char *const first = static_cast<char *>(mapped);
        for (unsigned t = 0; t < most_threads; t++) mprotect(first + t * each, guard_bytes, PROT_NONE);
        return first;
    }();
    return all;
}

void enter(unsigned thread) {
    place.number = thread;
    place.thread = {thread % place.threads.x, thread / place.threads.x % place.threads.y,
                    thread / (place.threads.x * place.threads.y)};
}

void leave(Thread how) {
    Fiber &fiber = fibers[place.number];
    fiber.state = how;
    cuda_on_cpu_switch(&fiber.stack, scheduler);
}

void run_fiber() {
    kernel->run(arguments);
    leave(Thread::Ended);
    abort();
}

void start_fiber(unsigned thread) {
    char *const top = stacks() + (thread + 1) * (stack_bytes + guard_bytes);
    // As if `run_fiber` had been called with the stack aligned, and had been switched away from at once.
    void **stack = reinterpret_cast<void **>(top - 64);
    *--stack = nullptr;
    *--stack = reinterpret_cast<void *>(run_fiber);
    for (int i = 0; i < 6; i++) *--stack = nullptr;
    fibers[thread] = {stack, Thread::Runs};
}

unsigned count(Thread state, unsigned from, unsigned to) {
    unsigned n = 0;
    for (unsigned t = from; t < to; t++) n += fibers[t].state == state;
    return n;
}

// Lets threads go on that wait like this, if all others of theirs have ended.
bool let_go(Thread waits, unsigned from, unsigned to) {
    const unsigned waiting = count(waits, from, to);
    if (!waiting || waiting + count(Thread::Ended, from, to) < to - from) return false;
    for (unsigned t = from; t < to; t++)
        if (fibers[t].state == waits) fibers[t].state = Thread::Runs;
    return true;
}

unsigned in_order(unsigned i, unsigned of) { return backwards ? of - 1 - i : i; }

Result run_block(unsigned threads) {
    for (unsigned t = 0; t < threads; t++) start_fiber(t);
    for (;;) {
        for (unsigned i = 0; i < threads; i++) {
            const unsigned t = in_order(i, threads);
            if (fibers[t].state != Thread::Runs) continue;
            enter(t);
            cuda_on_cpu_switch(&scheduler, fibers[t].stack);
        }
        const unsigned ended = count(Thread::Ended, 0, threads);
        if (ended == threads) return Success;
        bool on = let_go(Thread::WaitsForBlock, 0, threads);
        for (unsigned t = 0; t < threads; t += warp)
            on |= let_go(Thread::WaitsForWarp, t, t + warp < threads ? t + warp : threads);
        if (!on)
            return refuse(LaunchFailed, "deadlock in a block of %u threads: %u ended, %u wait for the block", threads,
                          ended, count(Thread::WaitsForBlock, 0, threads));
    }
}

Result run_grid(unsigned threads, unsigned shared) {
    for (unsigned z = 0; z < place.blocks.z; z++)
        for (unsigned y = 0; y < place.blocks.y; y++)
            for (unsigned x = 0; x < place.blocks.x; x++) {
                place.block = {in_order(x, place.blocks.x), in_order(y, place.blocks.y), in_order(z, place.blocks.z)};
                memset(place.shared, 0xff, shared);
                if (kernel->waits) {
                    if (const Result result = run_block(threads)) return result;
                } else
                    for (unsigned t = 0; t < threads; t++) {
                        enter(in_order(t, threads));
                        kernel->run(arguments);
                    }
            }
    return Success;
}

Result launch(const Function &function, Dim blocks, Dim threads, unsigned shared, void **with) {
    static char *const all_shared = static_cast<char *>(aligned_alloc(4096, 256 << 10));
    const unsigned long long in_all = 1ull * threads.x * threads.y * threads.z;
    if (!in_all || in_all > function.kernel->bound || threads.x > most_threads || threads.y > most_threads ||
        threads.z > 64)
        return refuse(InvalidValue, "a block of %u x %u x %u threads, of which there may be %u", threads.x, threads.y,
                      threads.z, function.kernel->bound);
    if (!blocks.x || !blocks.y || !blocks.z || blocks.x > 0x7fffffff || blocks.y > 0xffff || blocks.z > 0xffff)
        return refuse(InvalidValue, "a grid of %u x %u x %u blocks", blocks.x, blocks.y, blocks.z);
    if (shared > function.shared)
        return refuse(InvalidValue, "%u bytes of shared memory, of which there may be %u", shared, function.shared);
    std::lock_guard<std::mutex> lock(running);
    place = {{}, {}, threads, blocks, 0, all_shared, leave, backwards};
    kernel = function.kernel;
    arguments = with;
    *kernel->place = &place;
    return run_grid(unsigned(in_all), shared);
}

const char *error_name(int error) {
    switch (error) {
    case Success: return "CUDA_SUCCESS";
    case InvalidValue: return "CUDA_ERROR_INVALID_VALUE";
    case OutOfMemory: return "CUDA_ERROR_OUT_OF_MEMORY";
    case NoDevice: return "CUDA_ERROR_NO_DEVICE";
    case InvalidDevice: return "CUDA_ERROR_INVALID_DEVICE";
    case InvalidImage: return "CUDA_ERROR_INVALID_IMAGE";
    case InvalidContext: return "CUDA_ERROR_INVALID_CONTEXT";
    case NotFound: return "CUDA_ERROR_NOT_FOUND";
    case LaunchFailed: return "CUDA_ERROR_LAUNCH_FAILED";
    case NotSupported: return "CUDA_ERROR_NOT_SUPPORTED";
    }
    return nullptr;
}

} // namespace

extern "C" {

// The driver and its cards.

Result cuInit(unsigned) { return cards.empty() ? NoDevice : Success; }

Result cuDriverGetVersion(int *version) {
    *version = 13000;
    return Success;
}

Result cuGetErrorName(int error, const char **name) {
    *name = error_name(error);
    return *name ? Success : InvalidValue;
}

Result cuGetErrorString(int error, const char **text) { return cuGetErrorName(error, text); }

Result cuDeviceGetCount(int *number) {
    *number = int(cards.size());
    return Success;
}

Result cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return ordinal >= 0 && size_t(ordinal) < cards.size() ? Success : InvalidDevice;
}

Result cuDeviceGetName(char *name, int bytes, int) {
    snprintf(name, bytes, "CPU in place of a card (sm_%d)", capability);
    return Success;
}

Result cuDeviceGetPCIBusId(char *id, int bytes, int device) {
    snprintf(id, bytes, "0000:%02x:00.0", device + 1);
    return Success;
}

Result cuDeviceTotalMem_v2(size_t *bytes, int) {
    *bytes = memory;
    return Success;
}

Result cuDeviceGetAttribute(int *value, int attribute, int) {
    switch (attribute) {
    case 1: case 2: case 3: *value = most_threads; return Success; // of a block, and of its sides x and y
    case 4: *value = 64; return Success;                           // its side z
    case 5: *value = 0x7fffffff; return Success;                   // the grid's side x
    case 6: case 7: *value = 0xffff; return Success;               // its sides y and z
    case 10: *value = warp; return Success;
    case 16: *value = capability >= 90 ? 132 : 108; return Success; // multiprocessors: those of an A100, an H100
    case 75: *value = capability / 10; return Success;
    case 76: *value = capability % 10; return Success;
    case 97: *value = shared_limit(); return Success;
    case 115: *value = 1; return Success; // allocations in the order of a stream
    }
    return refuse(NotSupported, "attribute %d of a device is not known", attribute);
}

Result cuDeviceCanAccessPeer(int *can, int, int) {
    *can = 0;
    return Success;
}

// Contexts.

Result cuDevicePrimaryCtxRetain(Card **context, int device) {
    if (device < 0 || size_t(device) >= cards.size()) return InvalidDevice;
    *context = &cards[device];
    return Success;
}

Result cuDevicePrimaryCtxRelease_v2(int) { return Success; }

Result cuCtxGetCurrent(Card **context) {
    *context = current;
    return Success;
}

Result cuCtxSetCurrent(Card *context) {
    current = context;
    return Success;
}

Result cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    *least = *greatest = 0;
    return Success;
}

// Streams and events.

Result cuStreamCreate(void **stream, unsigned) {
    if (!current) return InvalidContext;
    *stream = malloc(1);
    return Success;
}

Result cuStreamCreateWithPriority(void **stream, unsigned flags, int) { return cuStreamCreate(stream, flags); }

Result cuStreamDestroy_v2(void *stream) {
    free(stream);
    return Success;
}

Result cuStreamSynchronize(void *) { return Success; }

Result cuStreamWaitEvent(void *, void *, unsigned) { return Success; }

Result cuEventCreate(void **event, unsigned flags) { return cuStreamCreate(event, flags); }

Result cuEventDestroy_v2(void *event) { return cuStreamDestroy_v2(event); }

Result cuEventRecord(void *, void *) { return Success; }

Result cuEventSynchronize(void *) { return Success; }

// Memory.

Result cuMemGetInfo_v2(size_t *unused, size_t *total) {
    if (!current) return InvalidContext;
    std::lock_guard<std::mutex> lock(allocating);
    *unused = memory - current->used;
    *total = memory;
    return Success;
}

Result cuMemAlloc_v2(uintptr_t *address, size_t bytes) { return allocate(address, bytes); }

Result cuMemAllocAsync(uintptr_t *address, size_t bytes, void *) { return allocate(address, bytes); }

Result cuMemFree_v2(uintptr_t address) { return address ? release(address) : Success; }

Result cuMemFreeAsync(uintptr_t address, void *) { return release(address); }

Result cuMemAllocHost_v2(void **address, size_t bytes) { return page_locked(address, bytes); }

Result cuMemHostAlloc(void **address, size_t bytes, unsigned) { return page_locked(address, bytes); }

Result cuMemFreeHost(void *address) {
    free(address);
    return Success;
}

Result cuMemcpyHtoDAsync_v2(uintptr_t to, const void *from, size_t bytes, void *) {
    if (!allocated(to, bytes)) return outside(to, bytes);
    memcpy(reinterpret_cast<void *>(to), from, bytes);
    return Success;
}

Result cuMemcpyDtoHAsync_v2(void *to, uintptr_t from, size_t bytes, void *) {
    if (!allocated(from, bytes)) return outside(from, bytes);
    memcpy(to, reinterpret_cast<void *>(from), bytes);
    return Success;
}

Result cuMemcpyDtoDAsync_v2(uintptr_t to, uintptr_t from, size_t bytes, void *) {
    if (!allocated(to, bytes)) return outside(to, bytes);
    if (!allocated(from, bytes)) return outside(from, bytes);
    memmove(reinterpret_cast<void *>(to), reinterpret_cast<void *>(from), bytes);
    return Success;
}

// One end of a copy of rows, as CUDA_MEMCPY2D has two.
struct Rows {
    size_t x, y;
    int kind;
    char *host;
    uintptr_t device;
    void *array;
    size_t pitch;
};

struct Copy {
    Rows from, to;
    size_t width, height;
};

Result first_row(const Rows &rows, const Copy &copy, char *&first) {
    const bool device = rows.kind == 2;
    if (rows.kind != 1 && !device) return refuse(NotSupported, "rows in memory of kind %d", rows.kind);
    first = (device ? reinterpret_cast<char *>(rows.device) : rows.host) + rows.y * rows.pitch + rows.x;
    const uintptr_t address = reinterpret_cast<uintptr_t>(first);
    const size_t bytes = copy.height ? (copy.height - 1) * rows.pitch + copy.width : 0;
    return device && !allocated(address, bytes) ? outside(address, bytes) : Success;
}

Result cuMemcpy2DAsync_v2(const Copy *copy, void *) {
    char *from, *to;
    if (const Result result = first_row(copy->from, *copy, from)) return result;
    if (const Result result = first_row(copy->to, *copy, to)) return result;
    for (size_t row = 0; row < copy->height; row++)
        memcpy(to + row * copy->to.pitch, from + row * copy->from.pitch, copy->width);
    return Success;
}

// Kernels.

Result cuModuleLoadData(Module **module, const void *image) {
    if (!current) return InvalidContext;
    void *const object = dlopen(static_cast<const char *>(image), RTLD_NOW | RTLD_LOCAL);
    if (!object) return refuse(InvalidImage, "%s", dlerror());
    *module = new Module{object};
    return Success;
}

Result cuModuleUnload(Module *module) {
    dlclose(module->object);
    delete module;
    return Success;
}

Result cuModuleGetFunction(Function **function, Module *module, const char *name) {
    void *const found = dlsym(module->object, (std::string("kernel_of_") + name).c_str());
    if (!found) return NotFound;
    *function = new Function{static_cast<Kernel *>(found), 48 << 10};
    return Success;
}

Result cuFuncSetAttribute(Function *function, int attribute, int value) {
    if (attribute != 8) return refuse(NotSupported, "attribute %d of a function is not known", attribute);
    if (value < 0 || value > shared_limit())
        return refuse(InvalidValue, "%d bytes of shared memory, of which a card has %d", value, shared_limit());
    if (unsigned(value) > function->shared) function->shared = value;
    return Success;
}

Result cuLaunchKernel(Function *function, unsigned blocks_x, unsigned blocks_y, unsigned blocks_z, unsigned threads_x,
                      unsigned threads_y, unsigned threads_z, unsigned shared, void *, void **arguments, void **extra) {
    if (!current) return InvalidContext;
    if (extra) return refuse(NotSupported, "arguments of a kernel in one buffer");
    return launch(*function, {blocks_x, blocks_y, blocks_z}, {threads_x, threads_y, threads_z}, shared, arguments);
}

} // extern "C"
