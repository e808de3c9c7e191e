// Unpacks packed weights to rows of channels, for products of many rows: 16-bit floats, or (EIGHT_BITS) int8 with one scale per channel.
//
//   out[column, k] = (number[column, k] - zero) * scale
//   out[column, k] = round((number[column, k] - zero) * (scale * inverse[column]))
//
// A warp takes a chunk at a time: it unpacks its registers, transposes them in shared memory, and stores 16 bytes per lane.
//
// generated.cuh defines WARPS, DEPTH (chunks per warp), EIGHT_BITS, and the macros of packed.cuh.
#include "ptx.cuh"
#include "mma.cuh"
#include "generated.cuh"
#include "stream.cuh"
#include "packed.cuh"

struct Params {
    PackedWeights weights;
    u8* output;                                    // [columns][pitch], rows aligned to 16 bytes
    int columns, pitch;                            // in bytes; columns beyond K are stored, too, up to the pitch
    const float* inverse;                          // per column, for whole tiles of 16: 127 / its largest magnitude
};

constexpr int ITEM = EIGHT_BITS ? 1 : 2;           // bytes of a number
constexpr int ROW_WORDS = CHUNK_K * ITEM / 4 + 4;  // eight rows of four lanes are on different banks
constexpr int ROW_VECTORS = CHUNK_K * ITEM / 16;   // of 16 bytes

// Stores a pair of integers times their factor, at a position of a row.
DEVICE void store_pair(u32* row, int at, u32 pair, float factor) {
#if EIGHT_BITS
    constexpr float MAGIC = 12582912.0f;           // 1.5 * 2^23: the sum's low byte is the rounded product
    const u32 low = __float_as_uint(__fmaf_rn(low_float(pair), factor, MAGIC)), high = __float_as_uint(__fmaf_rn(high_float(pair), factor, MAGIC));
    reinterpret_cast<u16*>(row)[at] = u16(__byte_perm(low, high, 0x0040));
#else
    row[at] = pack2(low_float(pair) * factor, high_float(pair) * factor);
#endif
}

// Writes the lane's numbers of a chunk, times their scales, to rows g and g + 8.
DEVICE void unpack_chunk(u32* turned, const Chunk& chunk, const float (&inverse)[2], int lane) {
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        u32* row = turned + (lane / 4 + h * 8) * ROW_WORDS;
        #pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const int group = step / GROUP_STEPS, at = step % (STEPS / 4) * 2;
            const float scale = EIGHT_BITS ? __fmul_rn(scale_at(chunk.scales[h], group), inverse[h]) : scale_at(chunk.scales[h], group);
            u32 pair[PAIRS];
            unpack_word(pair, word_of(chunk.weights[h], step * 4 / STEPS), zero_at(chunk, h, group));
            store_pair(row, step * 8 + lane % 4, pair[at], scale);
            store_pair(row, step * 8 + lane % 4 + 4, pair[at + 1], scale);
        }
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) packed_dense(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 shared[];  // 16 rows per warp
    grid_launch_dependents();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first = (blockIdx.x * WARPS + warp) * DEPTH, count = (p.columns + 15) / 16 * p.weights.chunks;
    const Stream stream;
    Chunk ahead[DEPTH];
    #pragma unroll
    for (int d = 0; d < DEPTH; d++)
        if (first + d < count) ahead[d] = load_chunk(p.weights, stream, (first + d) / p.weights.chunks, (first + d) % p.weights.chunks, lane);
    grid_dependency_wait();
    u32* turned = reinterpret_cast<u32*>(shared) + warp * 16 * ROW_WORDS;
    #pragma unroll
    for (int d = 0; d < DEPTH; d++) {
        if (first + d >= count) return;            // a whole warp
        const int tile = (first + d) / p.weights.chunks, k = (first + d) % p.weights.chunks * CHUNK_K;
        float inverse[2] = {1.0f, 1.0f};
        if (EIGHT_BITS) inverse[0] = __ldg(p.inverse + tile * 16 + lane / 4), inverse[1] = __ldg(p.inverse + tile * 16 + lane / 4 + 8);
        unpack_chunk(turned, ahead[d], inverse, lane);
        __syncwarp();
        #pragma unroll
        for (int i = 0; i < 16 * ROW_VECTORS / 32; i++) {
            const int row = (i * 32 + lane) / ROW_VECTORS, vector = (i * 32 + lane) % ROW_VECTORS, column = tile * 16 + row;
            if (column < p.columns && k * ITEM + vector * 16 < p.pitch)
                *reinterpret_cast<uint4*>(p.output + (long long)column * p.pitch + k * ITEM + vector * 16) =
                    *reinterpret_cast<const uint4*>(turned + row * ROW_WORDS + vector * 4);
        }
        __syncwarp();
    }
}
