// Packed weights as 16-bit floats in rows of channels, for products of many rows.
//
//   out[column, k] = (number[column, k] - zero) * scale
//
// A warp takes a chunk at a time: it unpacks its registers, turns them in shared memory, and stores 16 bytes a lane.
//
// generated.cuh defines WARPS, DEPTH (chunks of a warp), and what packed.cuh says.
#include "ptx.cuh"
#include "mma.cuh"
#include "generated.cuh"
#include "stream.cuh"
#include "packed.cuh"

struct Params {
    PackedWeights weights;
    u16* output;                                   // [columns][pitch], rows aligned to 16 bytes
    int columns, pitch;                            // what is beyond K is stored, too, up to the pitch
};

constexpr int ROW_WORDS = CHUNK_K / 2 + 4;         // eight rows of four lanes lie in other banks
constexpr int ROW_VECTORS = CHUNK_K / 8;           // of 16 bytes

DEVICE void store_pair(u32* row, int at, u32 pair, float scale) {
    row[at] = pack2(low_float(pair) * scale, high_float(pair) * scale);
}

// The lane's numbers of a chunk, times their scales, to rows g and g + 8.
DEVICE void unpack_chunk(u32* turned, const Chunk& chunk, int lane) {
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        u32* row = turned + (lane / 4 + h * 8) * ROW_WORDS;
        #pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const int group = step / GROUP_STEPS, at = step % (STEPS / 4) * 2;
            const float scale = scale_at(chunk.scales[h], group);
            u32 pair[PAIRS];
            unpack_word(pair, word_of(chunk.weights[h], step * 4 / STEPS), zero_at(chunk, h, group));
            store_pair(row, step * 8 + lane % 4, pair[at], scale);
            store_pair(row, step * 8 + lane % 4 + 4, pair[at + 1], scale);
        }
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) packed_dense(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 shared[];  // of each warp 16 rows
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
        unpack_chunk(turned, ahead[d], lane);
        __syncwarp();
        #pragma unroll
        for (int i = 0; i < 16 * ROW_VECTORS / 32; i++) {
            const int row = (i * 32 + lane) / ROW_VECTORS, vector = (i * 32 + lane) % ROW_VECTORS, column = tile * 16 + row;
            if (column < p.columns && k + vector * 8 < p.pitch)
                *reinterpret_cast<uint4*>(p.output + (long long)column * p.pitch + k + vector * 8) =
                    *reinterpret_cast<const uint4*>(turned + row * ROW_WORDS + vector * 4);
        }
        __syncwarp();
    }
}
