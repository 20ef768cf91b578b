// Stands in for CUDA's driver: cards whose memory is the host's and whose kernels run on the thread of a call.
//
// What a stream is asked for is done at once, as late as the calls allow, or in a drawn order (`CUDA_ON_CPU_LATE`). The
// entry points are those that Hydra and CubeCL call; cudarc looks each up when it is first called, and panics with the
// name of one that is not here.

#include "launch.h"
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <dlfcn.h>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>
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
    unsigned long long launches = 0;
    // Whether it fails whatever it is asked for from here on, as a card does after a failure in a kernel.
    bool lost = false;
};

const int capability = setting("CUDA_ON_CPU_CAPABILITY", 80);
const size_t memory = setting("CUDA_ON_CPU_MEMORY", 16ull << 30);
// Whether blocks and threads run from the last to the first, to show what depends on their order.
const bool backwards = setting("CUDA_ON_CPU_BACKWARDS", 0);
// When streams do what they are asked for: at once, or only when a call waits for it, or as drawn from this seed.
const unsigned long long late = setting("CUDA_ON_CPU_LATE", 0);
// After how many kernels the first card is lost; 0 for never.
const unsigned long long dies = setting("CUDA_ON_CPU_DIES", 0);
// Never destroyed: threads may free memory while the process ends.
std::vector<Card> &cards = *new std::vector<Card>(setting("CUDA_ON_CPU_CARDS", 1));
thread_local Card *current;

// Whoever looks at cards, memory or streams has this.
std::recursive_mutex driving;
using Lock = std::lock_guard<std::recursive_mutex>;

// Streams. Whoever waits for a stream does what it was asked for.

struct Stream;

// How much a stream was asked for when somebody looked.
struct Mark {
    Stream *stream = nullptr;
    unsigned long long number = 0;
};

struct Work {
    // Nothing is to be done but to wait, if there is a stream to wait for.
    Mark after;
    std::function<Result()> act;
};

struct Stream {
    const Card *card = nullptr;
    std::deque<Work> asked;
    unsigned long long done = 0;

    Mark end() { return {this, done + asked.size()}; }
    bool ready() const {
        return !asked.empty() && (!asked.front().after.stream || over(asked.front().after));
    }
    static bool over(const Mark &mark) { return mark.stream->done >= mark.number; }
};

struct Event {
    Mark mark;
};

// Never destroyed, as an event may have a mark in one that its owner has destroyed.
std::vector<Stream *> &streams = *new std::vector<Stream *>;

Result do_next(Stream &stream) {
    const Work work = std::move(stream.asked.front());
    stream.asked.pop_front();
    stream.done++;
    return work.act ? work.act() : Success;
}

// Does everything up to the mark, and what that waits for; the first failure.
Result reach(const Mark &mark) {
    Result first = Success;
    while (mark.stream && !Stream::over(mark)) {
        const Result before = reach(mark.stream->asked.front().after);
        const Result result = do_next(*mark.stream);
        if (!first) first = before ? before : result;
    }
    return first;
}

unsigned drawn(unsigned below) {
    static unsigned long long state = late * 0x9e3779b97f4a7c15;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return unsigned(state >> 33) % below;
}

// Lets some streams get on with some of their work, sometimes.
Result get_on() {
    if (late < 2 || drawn(4)) return Success;
    for (unsigned steps = drawn(64); steps--;) {
        Stream &stream = *streams[drawn(unsigned(streams.size()))];
        if (!stream.ready()) continue;
        if (const Result result = do_next(stream)) return result;
    }
    return Success;
}

Result ask(Stream *stream, Work work) {
    if (!stream) return refuse(NotSupported, "the default stream");
    const Lock lock(driving);
    if (stream->card->lost) return LaunchFailed;
    stream->asked.push_back(std::move(work));
    return late ? get_on() : reach(stream->end());
}

Result ask(Stream *stream, std::function<Result()> act) { return ask(stream, Work{{}, std::move(act)}); }

Result wait_for(Stream *stream) {
    if (!stream) return refuse(NotSupported, "the default stream");
    const Lock lock(driving);
    return stream->card->lost ? LaunchFailed : reach(stream->end());
}

void wait_for_all() {
    for (Stream *stream : streams) reach(stream->end());
}

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

// Memory. Whoever reads what nobody wrote, or what was freed, reads NaN.

void forget(void *memory, size_t bytes) { memset(memory, 0xff, bytes); }

// Memory that was freed, and where the streams were then that may still be asked to touch it.
struct Freed {
    void *memory;
    std::vector<Mark> before;
};

std::vector<Freed> &freed = *new std::vector<Freed>;

// Gives back what no stream has work for any more.
void sweep() {
    const auto over = [](const Mark &mark) { return Stream::over(mark); };
    const auto first = std::stable_partition(freed.begin(), freed.end(), [&](const Freed &one) {
        return !std::all_of(one.before.begin(), one.before.end(), over);
    });
    for (auto one = first; one != freed.end(); one++) free(one->memory);
    freed.erase(first, freed.end());
}

void free_later(void *memory, size_t bytes) {
    forget(memory, bytes);
    freed.push_back({memory, {}});
    for (Stream *stream : streams) freed.back().before.push_back(stream->end());
    sweep();
}

Result allocate(uintptr_t *address, size_t bytes) {
    if (!current) return InvalidContext;
    if (!bytes) return InvalidValue;
    const Lock lock(driving);
    if (current->lost) return LaunchFailed;
    // What a stream has still to free counts until it has.
    if (bytes > memory - current->used) wait_for_all();
    void *block;
    if (bytes > memory - current->used || posix_memalign(&block, 4096, bytes)) return OutOfMemory;
    forget(block, bytes);
    *address = reinterpret_cast<uintptr_t>(block);
    current->used += bytes;
    current->allocations[*address] = bytes;
    return Success;
}

Result release(uintptr_t address) {
    const Lock lock(driving);
    for (Card &card : cards) {
        const auto found = card.allocations.find(address);
        if (found == card.allocations.end()) continue;
        free_later(reinterpret_cast<void *>(address), found->second);
        card.used -= found->second;
        card.allocations.erase(found);
        return Success;
    }
    return refuse(InvalidValue, "nothing is allocated at %#zx, which is to be freed", size_t(address));
}

// Whether these bytes are of one allocation, of whichever card.
bool allocated(uintptr_t address, size_t bytes) {
    const Lock lock(driving);
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

// Where each page-locked allocation begins, and its bytes.
std::map<uintptr_t, size_t> &locked = *new std::map<uintptr_t, size_t>;

Result page_locked(void **address, size_t bytes) {
    if (posix_memalign(address, 4096, bytes)) return OutOfMemory;
    forget(*address, bytes);
    const Lock lock(driving);
    locked[reinterpret_cast<uintptr_t>(*address)] = bytes;
    return Success;
}

// Memory of the caller's.
Result lock_given(void *address, size_t bytes) {
    const Lock lock(driving);
    const uintptr_t at = reinterpret_cast<uintptr_t>(address);
    const auto after = locked.lower_bound(at + bytes);
    if (after != locked.begin() && std::prev(after)->first + std::prev(after)->second > at)
        return refuse(InvalidValue, "memory at %p is page-locked already", address);
    locked[at] = bytes;
    return Success;
}

// Frees the driver's memory later. What is the caller's is lost at once to copies that it did not wait for.
Result unlock(void *address, bool given) {
    const Lock lock(driving);
    const auto found = locked.find(reinterpret_cast<uintptr_t>(address));
    if (found == locked.end())
        return refuse(InvalidValue, "nothing is page-locked at %p, which is to be given back", address);
    if (given) {
        forget(address, found->second);
        wait_for_all();
    } else {
        free_later(address, found->second);
    }
    locked.erase(found);
    return Success;
}

bool is_locked(const void *address) {
    const Lock lock(driving);
    const uintptr_t at = reinterpret_cast<uintptr_t>(address);
    const auto after = locked.upper_bound(at);
    return after != locked.begin() && at - std::prev(after)->first < std::prev(after)->second;
}

// Copies. One end of a copy of rows, as CUDA_MEMCPY2D has two.

struct Rows {
    size_t x, y;
    int kind;
    char *host;
    uintptr_t device;
    void *array;
    size_t pitch;

    bool on_card() const { return kind == 2; }
    char *first() const { return (on_card() ? reinterpret_cast<char *>(device) : host) + y * pitch + x; }
};

struct Copy {
    Rows from, to;
    size_t width, height;

    size_t extent(const Rows &rows) const { return height ? (height - 1) * rows.pitch + width : 0; }
};

Rows on_card(uintptr_t address, size_t pitch) { return {0, 0, 2, nullptr, address, nullptr, pitch}; }

Rows on_host(const void *address, size_t pitch) {
    return {0, 0, 1, const_cast<char *>(static_cast<const char *>(address)), 0, nullptr, pitch};
}

Result check(const Copy &copy) {
    for (const Rows *rows : {&copy.from, &copy.to}) {
        if (rows->kind != 1 && !rows->on_card()) return refuse(NotSupported, "rows in memory of kind %d", rows->kind);
        const uintptr_t first = reinterpret_cast<uintptr_t>(rows->first());
        if (rows->on_card() && !allocated(first, copy.extent(*rows))) return outside(first, copy.extent(*rows));
    }
    return Success;
}

Result do_copy(const Copy &copy) {
    // Memory may have been freed since.
    if (const Result result = check(copy)) return result;
    for (size_t row = 0; row < copy.height; row++)
        memmove(copy.to.first() + row * copy.to.pitch, copy.from.first() + row * copy.from.pitch, copy.width);
    return Success;
}

// Ordinary memory of the host is read before the call returns, and written before it returns.
Result enqueue(Copy copy, Stream *stream) {
    if (const Result result = check(copy)) return result;
    if (late && !copy.from.on_card() && !is_locked(copy.from.first())) {
        const char *const first = copy.from.first();
        const std::vector<char> kept(first, first + copy.extent(copy.from));
        return ask(stream, [copy, kept]() mutable {
            copy.from = on_host(kept.data(), copy.from.pitch);
            return do_copy(copy);
        });
    }
    const Result result = ask(stream, [copy] { return do_copy(copy); });
    return result || copy.to.on_card() || is_locked(copy.to.first()) ? result : wait_for(stream);
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

// Arguments are as far apart as any of them may want to be aligned.
struct alignas(128) Slot {
    char bytes[128];
};

size_t slots(size_t bytes) { return (bytes + sizeof(Slot) - 1) / sizeof(Slot); }

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

Result launch(const Function &function, Dim blocks, Dim threads, unsigned shared, void **with, Stream *stream) {
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
    // The values of the arguments are those of the call.
    std::vector<Slot> values;
    for (const size_t *size = function.kernel->sizes; *size; size++) {
        values.resize(values.size() + slots(*size));
        memcpy(&values.back() + 1 - slots(*size), *with++, *size);
    }
    Kernel *const launched = function.kernel;
    return ask(stream, [=]() mutable {
        std::vector<void *> pointers;
        Slot *value = values.data();
        for (const size_t *size = launched->sizes; *size; value += slots(*size++)) pointers.push_back(value);
        place = {{}, {}, threads, blocks, 0, all_shared, leave, backwards};
        kernel = launched;
        arguments = pointers.data();
        *kernel->place = &place;
        return run_grid(unsigned(in_all), shared);
    });
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

Result cuStreamCreate(Stream **stream, unsigned) {
    if (!current) return InvalidContext;
    const Lock lock(driving);
    streams.push_back(*stream = new Stream);
    (*stream)->card = current;
    return Success;
}

Result cuStreamCreateWithPriority(Stream **stream, unsigned flags, int) { return cuStreamCreate(stream, flags); }

// Goes on with what it was asked for.
Result cuStreamDestroy_v2(Stream *) { return Success; }

Result cuStreamSynchronize(Stream *stream) { return wait_for(stream); }

Result cuStreamWaitEvent(Stream *stream, const Event *event, unsigned) { return ask(stream, Work{event->mark, {}}); }

Result cuEventCreate(Event **event, unsigned) {
    if (!current) return InvalidContext;
    *event = new Event;
    return Success;
}

Result cuEventDestroy_v2(Event *event) {
    delete event;
    return Success;
}

Result cuEventRecord(Event *event, Stream *stream) {
    if (!stream) return refuse(NotSupported, "the default stream");
    const Lock lock(driving);
    event->mark = stream->end();
    return get_on();
}

Result cuEventSynchronize(const Event *event) {
    const Lock lock(driving);
    return event->mark.stream && event->mark.stream->card->lost ? LaunchFailed : reach(event->mark);
}

// Memory.

Result cuMemGetInfo_v2(size_t *unused, size_t *total) {
    if (!current) return InvalidContext;
    const Lock lock(driving);
    *unused = memory - current->used;
    *total = memory;
    return Success;
}

Result cuMemAlloc_v2(uintptr_t *address, size_t bytes) { return allocate(address, bytes); }

// What another stream has written there before this one gets to the allocation is lost.
Result cuMemAllocAsync(uintptr_t *address, size_t bytes, Stream *stream) {
    if (const Result result = allocate(address, bytes)) return result;
    const uintptr_t at = *address;
    return ask(stream, [at, bytes] {
        if (allocated(at, bytes)) forget(reinterpret_cast<void *>(at), bytes);
        return Success;
    });
}

Result cuMemFree_v2(uintptr_t address) { return address ? release(address) : Success; }

Result cuMemFreeAsync(uintptr_t address, Stream *stream) {
    return ask(stream, [address] { return release(address); });
}

Result cuMemAllocHost_v2(void **address, size_t bytes) { return page_locked(address, bytes); }

Result cuMemHostAlloc(void **address, size_t bytes, unsigned) { return page_locked(address, bytes); }

Result cuMemFreeHost(void *address) { return unlock(address, false); }

Result cuMemHostRegister_v2(void *address, size_t bytes, unsigned) { return lock_given(address, bytes); }

Result cuMemHostUnregister(void *address) { return unlock(address, true); }

Result cuMemcpyHtoDAsync_v2(uintptr_t to, const void *from, size_t bytes, Stream *stream) {
    return enqueue({on_host(from, bytes), on_card(to, bytes), bytes, 1}, stream);
}

Result cuMemcpyDtoHAsync_v2(void *to, uintptr_t from, size_t bytes, Stream *stream) {
    return enqueue({on_card(from, bytes), on_host(to, bytes), bytes, 1}, stream);
}

Result cuMemcpyDtoDAsync_v2(uintptr_t to, uintptr_t from, size_t bytes, Stream *stream) {
    return enqueue({on_card(from, bytes), on_card(to, bytes), bytes, 1}, stream);
}

Result cuMemcpy2DAsync_v2(const Copy *copy, Stream *stream) { return enqueue(*copy, stream); }

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
                      unsigned threads_y, unsigned threads_z, unsigned shared, Stream *stream, void **arguments,
                      void **extra) {
    if (!current) return InvalidContext;
    if (extra) return refuse(NotSupported, "arguments of a kernel in one buffer");
    const Lock lock(driving);
    if (dies && current == &cards[0] && ++current->launches > dies) current->lost = true;
    if (current->lost) return LaunchFailed;
    return launch(*function, {blocks_x, blocks_y, blocks_z}, {threads_x, threads_y, threads_z}, shared, arguments,
                  stream);
}

} // extern "C"
