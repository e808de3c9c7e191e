// conv_sm90.cu: the sizes of a tile and of a block, the products of one K step, and the initial accumulators.
#pragma once
constexpr int TURNS = ALTERNATE ? 2 : 1;
constexpr int TILE_GROUPS = WGM * WGN;             // warpgroups that share a tile
constexpr int GROUPS = TILE_GROUPS * TURNS;
constexpr int SHARERS = SHARE_CHANNELS * SHARE_PIXELS;
constexpr int CONSUMERS = GROUPS * 128;
// With more than 128 accumulators a thread takes registers from the loading warps. They then form a whole warpgroup; two of them idle.
constexpr bool WIDE = MT * BN > 256;
constexpr int THREADS = CONSUMERS + (WIDE ? 128 : 64) + (PROLOGUE ? 128 : ROW_NORM ? (FACTOR_WARPS - 1) * 32 : 0);
constexpr int TILE_CHANNELS = WGM * MT * 64;
constexpr int TILE_PIXELS = WGN * BN;
constexpr int SPAN = BK * OPERAND_ITEM;
constexpr u32 WEIGHT_BYTES = TILE_CHANNELS * SPAN;
constexpr u32 PIXEL_BYTES = BN * SPAN;
constexpr u32 STAGE_BYTES = WGN * PIXEL_BYTES + (WEIGHTS_STATIONARY ? 0 : WEIGHT_BYTES);
constexpr u32 OUT_BYTES = BN * OUT_ROW;           // one 64-channel subtile of one warpgroup
constexpr u32 BARRIER_BYTES = 1024;
// Each sharer loads this part of a tile's operands for all sharers that need it.
constexpr int PIXEL_PART = BN / SHARE_CHANNELS, WEIGHT_PART = TILE_CHANNELS / SHARE_PIXELS;
constexpr int PEERS = SHARE_CHANNELS + SHARE_PIXELS - 1;   // blocks that load operands of this block, itself included
// Four-byte results with too many accumulators for the addresses to fit registers as well: the addresses are computed after the last
// product, and results are transposed in the ring.
constexpr bool LATE = DIRECT && (OPERAND_ITEM == 4 || OPERAND_ITEM * OUT_ITEM == 8) && MT * BN > 128, FINISHES_IN_RING = LATE && SPLIT == 1;
using Direct = DirectStore<MT, BN, SPLIT, LATE>;
#ifdef SHARED_BYTES                                // if the weights stay, their size is not known here
constexpr u32 RING_BYTES = (STAGES * STAGE_BYTES + 1023) / 1024 * 1024;
constexpr u32 RESULT_BYTES = DIRECT ? TILE_GROUPS * Direct::BYTES : OUT_BUFFERS * TURNS * TILE_GROUPS * MT * OUT_BYTES;
constexpr u32 FACTOR_BYTES = ROW_NORM ? (DIRECT ? 1 : OUT_BUFFERS * TURNS) * TILE_PIXELS * 8 : 0;
constexpr u32 BESIDE_RING = FINISHES_IN_RING ? (RESULT_BYTES > RING_BYTES ? RESULT_BYTES - RING_BYTES : 0) : RESULT_BYTES;
static_assert(SHARED_BYTES >= BARRIER_BYTES + RING_BYTES + BESIDE_RING + FACTOR_BYTES, "the launch reserves what the block uses");
#endif
// Lanes of a warp that release a stage (RELEASERS) and that report row factors as written (TELLERS); threads of a warpgroup that release
// the factors (READERS). One is enough, after the accesses of the others, but racecheck tracks only a thread's own arrivals.
#ifdef RACECHECK
constexpr int RELEASERS = SHARERS == 1 ? 32 : 1, TELLERS = 32, READERS = ROW_NORM ? 128 : 1;
#else
constexpr int RELEASERS = 1, TELLERS = 1, READERS = 1;
#endif

constexpr bool RESIDUAL_LOADED = HAS_RESIDUAL && !DIRECT;      // by TMA

#include "conv_loads.cuh"
#include "conv_stream.cuh"

DEVICE void load_constants(const Params& p, int first, int lane, Channel (&constants)[MT][2]) {
    #pragma unroll
    for (int m = 0; m < MT; m++) load_channel_pair(p, first + m * 64, lane, constants[m]);
}

#if IMAGE_SCALED
// Those of the image of ``pixel``. After griddepcontrol.wait.
DEVICE void load_factors(const Params& p, int first, int pixel, int lane, Channel (&constants)[MT][2]) {
    #pragma unroll
    for (int m = 0; m < MT; m++) load_factor_pair(p, first + m * 64, pixel, lane, constants[m]);
}
#endif

constexpr bool BEGUN = ROW_BIAS || EDGED;           // whether accumulators begin with values
constexpr int SETS = MT * BN <= 64 && SPAN >= 64 ? 2 : 1;

// One K step: weights [64 * MT][BK] x pixels [BN][BK]; products over 32 bytes of K alternate between the sets of accumulators.
DEVICE void multiply(Acc (&acc)[SETS][MT][BN / 2], u32 weights, u32 pixels, int k) {
    const u64 b = wgmma_descriptor<SPAN>(pixels);
    constexpr int NEXT = ACROSS ? SPAN : 2;        // step along K, in the descriptor's units of 16 bytes
    #pragma unroll
    for (int step = 0; step < SPAN / 32; step++) {
        #pragma unroll
        for (int m = 0; m < MT; m++) {
            const u64 a = wgmma_descriptor<SPAN>(weights + m * 64 * SPAN) + NEXT * step;
            wgmma_step(acc[step % SETS][m], a, b + 2 * step, BEGUN || (k | (step / SETS)) != 0);
        }
    }
}

#if ROW_BIAS
static_assert(SPLIT == 1 && !STREAM && !INTEGER, "a tile's sums begin once, as floats");

// Accumulators (wgmma's columns are pixels) begin with the bias of each pixel, in the first set.
DEVICE void begin_sums(const Params& p, int, int first_pixel, int, int lane, Acc (&acc)[SETS][MT][BN / 2]) {
    const int last = (p.pixel_count - 1) & ~1;     // first pixel of the last pair
    #pragma unroll
    for (int i = 0; i < BN / 2; i += 2) {
        const float2 bias = __ldg(reinterpret_cast<const float2*>(p.row_bias + min(first_pixel + i / 4 * 8 + lane % 4 * 2, last)));
        #pragma unroll
        for (int m = 0; m < MT; m++) {
            if (SETS == 2) acc[SETS - 1][m][i] = acc[SETS - 1][m][i + 1] = 0.0f;
            acc[0][m][i] = bias.x, acc[0][m][i + 1] = bias.y;
        }
    }
}
#endif

#if EDGED
static_assert(INTEGER && !STREAM, "only integers have a zero point, and a tile's sums begin once");

// Accumulators begin with what the taps outside of the image add, in the first set. Blocks that split K: only in the first of them.
DEVICE void begin_sums(const Params& p, int first_channel, int first_pixel, int k_begin, int lane, Acc (&acc)[SETS][MT][BN / 2]) {
    begin_at_edges<BN>(p, lane, [&](int column) {
        return k_begin == 0 && first_pixel + column < p.pixel_count ? (first_pixel + column) % p.image_pixels : -1;
    }, [&](int j, int e, int kind) {
        #pragma unroll
        for (int i = 0; i < MT * 2; i++) {
            if (SETS == 2) acc[SETS - 1][i / 2][j * 4 + i % 2 * 2 + e] = 0;
            acc[0][i / 2][j * 4 + i % 2 * 2 + e] = edge_sum(p, kind, channel_row(first_channel + i / 2 * 64, lane, i % 2));
        }
    });
}
#endif

#if ROW_SCALED
static_assert(INTEGER && SPLIT == 1 && !STREAM, "whole sums of integers become floats once");

// The scales of a tile's pixels, another kernel's result. A warp holds each scale once: lane 4 j + t has pixels 8 j + 2 t and 8 j + 2 t + 1.
struct RowScales {
    float2 held[(BN + 63) / 64];

    __device__ __forceinline__ void load(const Params& p, int first_pixel, int lane) {
        const int last = (p.pixel_count - 1) & ~1;             // first pixel of the last pair
        #pragma unroll
        for (int i = 0; i < (BN + 63) / 64; i++)
            held[i] = *reinterpret_cast<const float2*>(p.row_scales + min(first_pixel + i * 64 + lane * 2, last));
    }

    // Another lane's value. Volatile: values kept from one subtile to the next make accumulators spill.
    static __device__ __forceinline__ float of_lane(float x, int lane) {
        float y;
        asm volatile("shfl.sync.idx.b32 %0, %1, %2, 31, 0xffffffff;" : "=f"(y) : "f"(x), "r"(lane));
        return y;
    }

    // Multiplies the accumulators of eight pixels by their scales; the floats stay in the same registers.
    __device__ __forceinline__ void apply(Acc* four, int eight, int lane) const {
        const float2 own = held[eight / 8];
        const int from = eight % 8 * 4 + lane % 4;
        const float2 scale = make_float2(of_lane(own.x, from), of_lane(own.y, from));
        #pragma unroll
        for (int i = 0; i < 4; i++) four[i] = __float_as_int(__fmul_rn(float(four[i]), i % 2 ? scale.y : scale.x));
    }
};
#endif

// A block stays until its peers are done, since they arrive at its barriers. Called at the end of each role: registers move between
// warpgroups only in a branch of their own.
DEVICE void leave() {
    if (SHARERS == 1) return;
    __syncwarp();
    cluster_arrive_relaxed();
    cluster_wait();
}
