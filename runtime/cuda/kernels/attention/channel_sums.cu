// Partial scores of attention between channels over many tokens: each part sums q^T k, and the squares of q and k, over DEPTH x WARPS groups
// of sixteen tokens. channel_results.cu adds the parts. BANDS blocks share a part: each has ROWS channels of the queries, and all keys.
//
// The layout of a part is [2 + CHANNELS][CHANNELS] of fp32: squares of the queries, squares of the keys, then a row for each channel of the
// queries. generated.cuh also defines DEPTH (for the other macros see attention_channels.cuh).
#include "ptx.cuh"
#include "mma.cuh"
#include "generated.cuh"
#include "attention_channels.cuh"

struct Params {
    const u16 *queries, *keys;
    float* sums;
    int tokens, channels;
    View of_queries, of_keys;
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) channel_sums(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 shared[];  // squares, and the rings, whose space the sums reuse
    const int warp = threadIdx.x / 32, head = blockIdx.y, batch = blockIdx.z;
    const u32 rings = WARPS * SQUARES * 4;
    const u16* queries = p.queries + batch * p.of_queries.batch + head * p.of_queries.head;
    const u16* keys = p.keys + batch * p.of_keys.batch + head * p.of_keys.head;
    const int at = blockIdx.x / BANDS, band = blockIdx.x % BANDS * ROWS;
    const int begin = at * WARPS * DEPTH, end = min(begin + WARPS * DEPTH, (p.tokens + 15) / 16);
    float* part = p.sums + ((long long)(batch * gridDim.y + head) * (gridDim.x / BANDS) + at) * PART;
    grid_launch_dependents();
    grid_dependency_wait();

    Sums sums;
    sum_tokens(sums, shared, rings + warp * SLOTS * SLOT_BYTES, queries, keys, p.of_queries.position, p.of_keys.position,
               band, begin + warp, end, p.tokens, p.channels, [] {});
    float* all_sums = reinterpret_cast<float*>(shared + rings);
    float* all_squares = reinterpret_cast<float*>(shared);
    sums.store(all_sums + warp * SUMS, all_squares + warp * SQUARES);
    __syncthreads();
    for (int i = threadIdx.x; i < (2 + ROWS) * CHANNELS; i += THREADS) {
        const int row = i / CHANNELS - 2, column = i % CHANNELS;
        const int to = row == -2 ? column + band : row == -1 ? i : i + band * CHANNELS;
        const bool own = row == -2 ? column < ROWS && to < CHANNELS : row == -1 ? band == 0 : row + band < CHANNELS;
        if (!own) continue;
        const float* from = row < 0 ? all_squares + i : all_sums + row * PITCH + column;
        float total = 0.0f;
        #pragma unroll
        for (int w = 0; w < WARPS; w++) total += from[w * (row < 0 ? SQUARES : SUMS)];
        part[to] = total;
    }
}
