// What the driver and a compiled kernel know of each other.
#pragma once
#include <stddef.h>

struct Dim {
    unsigned x, y, z;
};

// What a thread of a block is doing.
enum class Thread { Runs, WaitsForWarp, WaitsForBlock, Ended };

// Where the thread that runs now is. One kernel runs at a time, so there is one of these.
struct Place {
    Dim thread, block, threads, blocks;
    // The thread's number in its block.
    unsigned number;
    // The block's dynamic shared memory.
    char *shared;
    // Runs the other threads until all that are waited for are there too.
    void (*wait)(Thread how);
    // Whether the last thread runs first.
    bool backwards;
};

// What a compiled kernel exports, under the name `kernel_of_` and its own.
struct Kernel {
    // The most threads of a block (`__launch_bounds__`).
    unsigned bound;
    // Whether its threads wait for each other anywhere.
    bool waits;
    // Runs one thread. Each argument is where a value lies.
    void (*run)(void **arguments);
    // The bytes of each of them, up to a zero.
    const size_t *sizes;
    // Where it looks for its place.
    Place **place;
};
