// A meeting of all blocks of a cooperative launch.
#pragma once
#include "ptx.cuh"

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
