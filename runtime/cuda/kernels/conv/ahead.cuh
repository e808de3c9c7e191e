// Prefetch of later launches' weights into L2, while a launch leaves memory idle. Nothing depends on the prefetch, and no kernel writes
// weights: there is nothing to wait for.
#pragma once
#include "ptx.cuh"

struct Ahead {
    const u8* from;
    u32 bytes;                                     // a multiple of 16; 0: none
};
constexpr u32 AHEAD_PIECE = 2048;                  // bytes of one request

DEVICE void fetch_into_level2(const u8* from, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(reinterpret_cast<u64>(from)), "r"(bytes) : "memory");
#endif
}

// Every block requests its share of each range, by the lanes of one warp.
template <int COUNT> DEVICE void fetch_ahead(const Ahead (&ahead)[COUNT], int lane) {
    #pragma unroll 1
    for (int i = 0; i < COUNT; i++) {
        const u32 bytes = ahead[i].bytes;
        if (bytes == 0) return;
        const u32 pieces = (bytes + AHEAD_PIECE - 1) / AHEAD_PIECE, share = (pieces + gridDim.x - 1) / gridDim.x * AHEAD_PIECE;
        const u32 begin = min(share * blockIdx.x, bytes), end = min(begin + share, bytes);
        #pragma unroll 1
        for (u32 at = begin + lane * AHEAD_PIECE; at < end; at += 32 * AHEAD_PIECE)
            fetch_into_level2(ahead[i].from + at, min(end - at, AHEAD_PIECE));
    }
}
