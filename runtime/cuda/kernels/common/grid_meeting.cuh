// Barriers of blocks: of all blocks of a cooperative launch, and arrivals without a wait. Included after ptx.cuh or in general.cuh.
#pragma once
#include "counts.cuh"

// A grid barrier: afterward each block may read all earlier writes of any block. rounds: completed barriers, and blocks that have arrived
// since; zeros before the first launch. The last block to arrive begins the next round.
DEVICE void meet(u32* rounds) {
    __syncthreads();
    if (threadIdx.x == 0) {
        const u32 round = load_acquire(rounds);
        __threadfence();
        if (atomicAdd(rounds + 1, 1u) == gridDim.x - 1) {
            rounds[1] = 0;
            add_release(rounds, 1);
        }
        while (load_acquire(rounds) == round) {}
        __threadfence();
    }
    __syncthreads();
}

// Whether this block is the last of `count` blocks to arrive: it may then read all earlier writes of the others. Nobody waits.
// arrived: zero before the first launch; the last block resets it to zero.
DEVICE bool arrives_last(u32* arrived, u32 count) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(arrived, 1u) == count - 1;
        if (last) *arrived = 0;
        __threadfence();
    }
    __syncthreads();
    return last;
}
