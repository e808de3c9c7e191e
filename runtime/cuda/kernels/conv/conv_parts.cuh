// fp32 products on tensor cores, which multiply tf32: part of conv_sm90.cu.
//
// An fp32 value is the sum of its first part (rounded to 11 bits) and a rest, so a product of two values is a sum of four products. The
// product of the two rests is omitted: it is below 2^-22 of the whole (3xTF32: Ootomo and Yokota 2022, and CUTLASS). Truncated first parts
// would make all results too small, an error that adds up from layer to layer. Tensor cores truncate in their additions. So products with a
// rest have accumulators of their own, and the accumulators of STEPS_TOGETHER K steps are added to the total by fp32 additions.
// An infinity becomes NaN: its rest is NaN. So does a number that rounds to infinity (above 3.4e38).
#pragma once

#if PARTS
static_assert(DIRECT && !STREAM && !BATCHED && !PROLOGUE && !ROW_NORM && !WEIGHTS_STATIONARY && !ALTERNATE && MIN_CTAS == 1 && OPERAND_ITEM == 4, "one tile a block");
constexpr int STEPS_TOGETHER = 64 / BK > 0 ? 64 / BK : 1;

// Splits the operands of each stage: first parts in place, rests after all first parts. Run by four warps.
DEVICE void part_stages(u32 ring, u32 full, u32 changed, int count, int lane) {
    constexpr int ROUND = 128 * 16, ROUNDS = (LOADED_BYTES + ROUND - 1) / ROUND, TOGETHER = 4;
    const u32 own = threadIdx.x % 128 * 16;
    int stage = 0, parity = 0;
    #pragma unroll 1
    for (int k = 0; k < count; k++) {
        barrier_wait(full + 8 * stage, parity);
        const u32 at = ring + stage * STAGE_BYTES + own;
        #pragma unroll
        for (int first = 0; first < ROUNDS; first += TOGETHER) {
            uint4 v[TOGETHER];
            auto is_one = [&](int i) { return first + i < ROUNDS && (LOADED_BYTES % ROUND == 0 || first + i + 1 < ROUNDS || own < LOADED_BYTES % ROUND); };
            #pragma unroll
            for (int i = 0; i < TOGETHER; i++)
                if (is_one(i)) v[i] = shared_load16(at + (first + i) * ROUND);
            #pragma unroll
            for (int i = 0; i < TOGETHER; i++) {
                if (!is_one(i)) continue;
                uint4 rest;
                rest.x = divide(v[i].x), rest.y = divide(v[i].y), rest.z = divide(v[i].z), rest.w = divide(v[i].w);
                shared_store16(at + (first + i) * ROUND, v[i]);
                shared_store16(at + LOADED_BYTES + (first + i) * ROUND, rest);
            }
        }
        async_proxy_fence();
        __syncwarp();
        if (lane == 0) barrier_arrive(changed + 8 * stage);
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
}

struct WholeSums {
    Acc sums[MT][BN / 2] = {};
    __device__ __forceinline__ void add(const Acc (&acc)[SETS][MT][BN / 2]) {
        #pragma unroll
        for (int i = 0; i < MT * BN / 2; i++) sums[i / (BN / 2)][i % (BN / 2)] += acc[0][i / (BN / 2)][i % (BN / 2)] + acc[1][i / (BN / 2)][i % (BN / 2)];
    }
};
#else
constexpr int STEPS_TOGETHER = 1;
#endif
