// Meetings of blocks: of all those of a cooperative launch, and of some that do not wait. Behind ptx.cuh or in general.cuh.
#pragma once
#include "counts.cuh"

// What any block wrote before, each may read behind it. rounds: how often they have met, and how many have arrived since; zeros before
// the first launch. The last block to arrive begins the next round.
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

// Whether this block is the last of `count` blocks to come here: it may read what the others wrote before. Nobody waits.
// arrived: zero before the first launch; the last block leaves it so.
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
