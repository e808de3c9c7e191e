// A few rows times packed weights (batch 1 to 8), in integers: bound by reading the weights once. 16-bit activations.
//
//   out[m, column] = epilogue(sum_k x[m, k] * (number[column, k] - zero) * scale)
//
// mma.sync on 8-bit integers takes packed numbers nearly as they are: four of them cost one LOP3. Rows become integers of 23 bits, whose power
// of two 128 of K share. Each is three digits of 8 bits, which are three columns of operand B. So sums of a group are exact, the zero
// point is subtracted exactly, and the rest is fp32.
//
// A block takes the tiles of 16 columns from its first to its last one. Its warps share K: a warp takes the same chunks of each tile, so it
// makes the digits of its own part of the rows, and reads them alone. Weights come straight to registers, DEPTH chunks of each lane in
// flight; the first are on their way before griddepcontrol.wait, since they depend on no other kernel. Warps meet once, at the end: their sums of a tile are added in a fixed order.
//
// NORM: rows are divided by the root of the mean of their squares first, and multiplied by ``scale``. A block sees whole rows, so it sums the
// squares, and divides the sums. PAIRED: the epilogue reads the product with a second matrix of the same form, after stages of its own
// (gated linear units): a tile of it follows each tile of the first matrix.
//
// generated.cuh defines ROWS, BLOCKS, WARPS, DEPTH, SET_SHIFT (chunk c has the scales of set c >> SET_SHIFT), TILES (of a block, at most), RESIDENT
// (blocks of a multiprocessor), HAS_RESIDUAL, NORM,
// PAIRED, multiply() of 8-bit integers, epilogue() and, PAIRED, epilogue_beside(), and what packed.cuh says.
#include "ptx.cuh"
#include "mma.cuh"
#include "generated.cuh"
#include "stream.cuh"
#include "packed.cuh"
#include "packed_digits.cuh"

struct Params {
    const u16* x;                                  // [ROWS][x_pitch], rows aligned to 16 bytes
    PackedWeights weights;
    const float* bias;
    const u16* residual;                           // as output
    u16* output;                                   // [ROWS][out_pitch]
    PackedWeights beside;                          // the second matrix, and its bias
    const float* beside_bias;
    const float* scale;                            // [k]
    int columns, k, x_pitch, out_pitch;
    float epsilon;
};

constexpr int THREADS = WARPS * 32, MATRICES = 1 + PAIRED;
constexpr int TILE_SUMS = WARPS * ROWS * 16;       // of a tile of one matrix
constexpr int SCALE_SET = 16 * GROUPS * SCALE_BYTES, ZERO_SET = 16 * GROUPS * ZERO_BYTES;  // bytes
constexpr int TOGETHER = GROUPS * ROW_PAIRS <= 2 && DEPTH > 2 ? 2 : 1; // chunks whose products are made side by side, where registers suffice
static_assert(DEPTH % TOGETHER == 0, "chunks in flight are whole groups");
constexpr int SQUARES = NORM ? (WARPS * ROWS + 3) / 4 * 4 : 0;

// The block's tiles, and the warp's chunks of each of them.
struct Share {
    int begin, tiles, first, count;
    __device__ __forceinline__ Share(const Params& p, int warp) {
        const u32 all = (p.columns + 15) / 16, chunks = p.weights.chunks;
        begin = all * blockIdx.x / BLOCKS, tiles = all * (blockIdx.x + 1) / BLOCKS - begin;
        first = chunks * warp / WARPS, count = chunks * (warp + 1) / WARPS - first;
    }
};

// A matrix as a lane reads it: a tile's first chunk, and its scales and zero points.
struct Tiles {
    const u8 *weights, *scales, *zeros;
    __device__ __forceinline__ Tiles(const PackedWeights& w, int first, int lane)
        : weights(w.tiles + (long long)first * w.chunks * CHUNK_BYTES + lane * 16), scales(w.scales + (long long)first * w.sets * SCALE_SET + lane / 4 * (SCALE_SET / 16)),
          zeros(w.zeros + (long long)first * w.sets * ZERO_SET + lane / 4 * (ZERO_SET / 16)) {}
    __device__ __forceinline__ void next(const PackedWeights& w) {
        weights += w.chunks * CHUNK_BYTES, scales += w.sets * SCALE_SET, zeros += w.sets * ZERO_SET;
    }
};

// The chunks of the warp in turn: of each tile, and of both matrices.
struct Loads {
    const Params& p;
    const Stream& stream;
    const int first, end;                          // of the warp's chunks
    int left, at;                                  // tiles (of both matrices) to come, and the next chunk
    Tiles here, there;
    __device__ __forceinline__ Loads(const Params& p, const Share& share, const Stream& stream, int lane)
        : p(p), stream(stream), first(share.first), end(share.first + share.count), left(share.tiles * MATRICES), at(share.first),
          here(p.weights, share.begin, lane), there(PAIRED ? p.beside : p.weights, share.begin, lane) {}
    __device__ __forceinline__ void operator()(Chunk& into) {
        if (left == 0) return;
        const int set = at >> SET_SHIFT;
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            into.weights[h] = stream(here.weights + at * CHUNK_BYTES + h * 512);
            into.scales[h] = load_words<GROUPS * SCALE_BYTES>(here.scales + set * SCALE_SET + h * (SCALE_SET / 2));
#if ZEROS
            into.zeros[h] = load_words<GROUPS * ZERO_BYTES>(here.zeros + set * ZERO_SET + h * (ZERO_SET / 2));
#endif
        }
        if (++at < end) return;
        at = first, left--;
        here.next(p.weights);                      // the other matrix has as many chunks and sets
        if (PAIRED) {
            const Tiles other = there;
            there = here, here = other;
        }
    }
};

// Brings the norm's scale into L2, a line by each block: nobody has read it in this run, and all blocks need it at once.
DEVICE void prefetch_scale(const Params& p) {
    for (int i = blockIdx.x * 32; i < p.k; i += BLOCKS * 32) prefetch_l2(p.scale + i);
}

// What the thread's first result reads beside its sums, early.
struct Around {
    float bias, beside, residual;
    __device__ __forceinline__ void constants(const Params& p, int column) {
        bias = column < p.columns ? p.bias[column] : 0.0f;
        beside = PAIRED && column < p.columns ? p.beside_bias[column] : 0.0f;
    }
    __device__ __forceinline__ void rows(const Params& p, int m, int column) {
        residual = HAS_RESIDUAL && column < p.columns ? unpack1(p.residual[(long long)m * p.out_pitch + column]) : 0.0f;
    }
};

// The result of column i % 16 of a tile and of a row, from the sums of the warps.
DEVICE float summed(const float* sums, int tile, int m, int i) {
    float total = 0.0f;
    #pragma unroll
    for (int w = 0; w < WARPS; w++) total += sums[tile * TILE_SUMS + (w * ROWS + m) * 16 + i];
    return total;
}

DEVICE float norm_factor(const Params& p, const float* squares, int m) {
    float total = 0.0f;
    #pragma unroll
    for (int w = 0; w < WARPS; w++) total += squares[w * ROWS + m];
    return rsqrtf(total / p.k + p.epsilon);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) packed_digits(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 shared[];
    grid_launch_dependents();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Share share(p, warp);
    const Stream stream;
    Loads load(p, share, stream, lane);
    Chunk ahead[DEPTH];
    #pragma unroll
    for (int d = 0; d < DEPTH; d++) load(ahead[d]);
    if (NORM && threadIdx.x == 0) prefetch_scale(p);
    const int results = share.tiles * ROWS * 16;
    const int own_column = (share.begin + threadIdx.x / (ROWS * 16)) * 16 + threadIdx.x % 16, own_row = threadIdx.x / 16 % ROWS;
    Around around;
    around.constants(p, own_column);

    float* const sums = reinterpret_cast<float*>(shared);              // [tile][matrix][WARPS][ROWS][16]
    float* const squares = sums + TILES * MATRICES * TILE_SUMS;        // [WARPS][ROWS]
    u8* const digits = shared + (TILES * MATRICES * TILE_SUMS + SQUARES) * 4 + share.first * (ROWS * ROW_BYTES);   // the warp's, which it reads alone
    grid_dependency_wait();
    around.rows(p, own_row, own_column);
    put_rows<NORM>(digits, p.x, p.x_pitch, p.scale, squares + warp * ROWS, share.first * CHUNK_K, share.count, p.k, lane);
    __syncwarp();

    const LaneDigits rows(digits, lane);
    float total[ROW_PAIRS][2];
    clear(total);
    const int all = share.count * share.tiles * MATRICES;
    int at = 0;                                    // of the warp's chunks
    float* own = sums + warp * ROWS * 16;          // of the tile
    auto finish = [&](const ChunkSums& sum, const Chunk& chunk) {
        add_chunk(total, sum, chunk, rows, at * (ROWS * ROW_BYTES));
        if (++at < share.count) return;
        store_sums(own, total, lane);
        clear(total);
        own += TILE_SUMS, at = 0;
    };
    for (int turn = 0; turn < all; turn += DEPTH) {
        #pragma unroll
        for (int d = 0; d < DEPTH; d += TOGETHER) {
            if (turn + d >= all) break;
            int from[TOGETHER] = {at * (ROWS * ROW_BYTES)};
            if (TOGETHER > 1) from[TOGETHER - 1] = at + 1 < share.count ? from[0] + ROWS * ROW_BYTES : 0;
            ChunkSums sum[TOGETHER];
            multiply_chunks<TOGETHER>(sum, ahead + d, rows, from);
            #pragma unroll
            for (int i = 0; i < TOGETHER; i++) {
                if (turn + d + i < all) finish(sum[i], ahead[d + i]);
                load(ahead[d + i]);
            }
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < results; i += THREADS) {
        const int tile = i / (ROWS * 16), m = i / 16 % ROWS, column = (share.begin + tile) * 16 + i % 16;
        if (i != threadIdx.x) around.constants(p, column), around.rows(p, m, column);
        if (column >= p.columns) continue;
        const float factor = NORM ? norm_factor(p, squares, m) : 1.0f;
        float other = around.residual;
#if PAIRED
        other = epilogue_beside(summed(sums, tile * MATRICES + 1, m, i % 16) * factor, around.beside, 0.0f);
#endif
        p.output[(long long)m * p.out_pitch + column] = pack1(epilogue(summed(sums, tile * MATRICES, m, i % 16) * factor, around.bias, other));
    }
}
