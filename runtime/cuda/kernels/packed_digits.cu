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
// flight; the first are on their way before griddepcontrol.wait, since they depend on no other kernel, and L2 is told to fetch the
// PREFETCH chunks of the block behind those. Warps meet once, at the end: their sums of a tile are added in a fixed order.
//
// NORM: rows are divided by the root of the mean of their squares first, and multiplied by ``scale``. A block sees whole rows, so it sums the
// squares, and divides the sums. PAIRED: the epilogue reads the product with a second matrix of the same form, after stages of its own
// (gated linear units): a tile of it follows each tile of the first matrix.
//
// generated.cuh defines ROWS, WARPS, DEPTH, LATE (whether the next kernel's blocks begin behind the rows), PREFETCH, TILES (of a block, at most), RESIDENT (blocks of a multiprocessor), HAS_RESIDUAL, NORM,
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
constexpr int SQUARES = NORM ? (WARPS * ROWS + 3) / 4 * 4 : 0;

// The block's tiles, and the warp's chunks of each of them.
struct Share {
    int begin, tiles, first, count;
    __device__ __forceinline__ Share(const Params& p, int warp) {
        const u32 all = (p.columns + 15) / 16, chunks = p.weights.chunks;
        begin = all * blockIdx.x / gridDim.x, tiles = all * (blockIdx.x + 1) / gridDim.x - begin;
        first = chunks * warp / WARPS, count = chunks * (warp + 1) / WARPS - first;
    }
};

// The chunks of the warp in turn: of each tile, and of both matrices.
struct Loads {
    const Params& p;
    const Share& share;
    const Stream& stream;
    int lane, left, at, row, set_row;              // tiles (of both matrices) to come; the next chunk, and where its tile's begin
    const u8 *tiles, *scales, *zeros;              // as the lane reads them
    __device__ __forceinline__ Loads(const Params& p, const Share& share, const Stream& stream, int lane)
        : p(p), share(share), stream(stream), lane(lane), left(share.tiles * MATRICES), at(share.first), row(share.begin * p.weights.chunks),
          set_row(share.begin * p.weights.sets) {
        take(p.weights);
    }
    __device__ __forceinline__ void take(const PackedWeights& w) {
        tiles = w.tiles + lane * 16, scales = w.scales + lane / 4 * (GROUPS * SCALE_BYTES), zeros = w.zeros + lane / 4 * (GROUPS * ZERO_BYTES);
    }
    __device__ __forceinline__ void operator()(Chunk& into) {
        if (left == 0) return;
        const u8* const from = tiles + (long long)(row + at) * CHUNK_BYTES;
        const int set = set_row + (at >> p.weights.set_shift);
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            into.weights[h] = stream(from + h * 512);
            into.scales[h] = load_words<GROUPS * SCALE_BYTES>(scales + (long long)set * (16 * GROUPS * SCALE_BYTES) + h * (8 * GROUPS * SCALE_BYTES));
#if ZEROS
            into.zeros[h] = load_words<GROUPS * ZERO_BYTES>(zeros + (long long)set * (16 * GROUPS * ZERO_BYTES) + h * (8 * GROUPS * ZERO_BYTES));
#endif
        }
        if (++at < share.first + share.count) return;
        at = share.first, left--;
        if (PAIRED) take(left % 2 ? p.beside : p.weights);
        if (!PAIRED || left % 2 == 0) row += p.weights.chunks, set_row += p.weights.sets;
    }
};

// Tells L2 to fetch what the block reads after the chunks that are on their way to registers.
DEVICE void prefetch_weights(const Params& p, const Share& share) {
    #pragma unroll
    for (int i = 0; i < MATRICES; i++) {
        const PackedWeights& w = i ? p.beside : p.weights;
        const int chunks = min(share.tiles * w.chunks, PREFETCH / MATRICES);
        if (chunks > 0) bulk_prefetch(w.tiles + (long long)share.begin * w.chunks * CHUNK_BYTES, chunks * CHUNK_BYTES);
    }
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
    if (!LATE) grid_launch_dependents();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Share share(p, warp);
    const Stream stream;
    Loads load(p, share, stream, lane);
    Chunk ahead[DEPTH];
    #pragma unroll
    for (int d = 0; d < DEPTH; d++) load(ahead[d]);
    if (PREFETCH > 0 && threadIdx.x == 0) prefetch_weights(p, share);
    const int results = share.tiles * ROWS * 16;
    const int own_column = (share.begin + threadIdx.x / (ROWS * 16)) * 16 + threadIdx.x % 16, own_row = threadIdx.x / 16 % ROWS;
    Around around;
    around.constants(p, own_column);

    float* const sums = reinterpret_cast<float*>(shared);              // [tile][matrix][WARPS][ROWS][16]
    float* const squares = sums + TILES * MATRICES * TILE_SUMS;        // [WARPS][ROWS]
    const Digits digits(shared + (TILES * MATRICES * TILE_SUMS + SQUARES) * 4, p.weights.chunks, share.first);
    grid_dependency_wait();
    around.rows(p, own_row, own_column);
    put_rows<NORM>(digits, p.x, p.x_pitch, p.scale, squares + warp * ROWS, share.first * CHUNK_K, share.count, p.k, lane);
    __syncwarp();
    if (LATE) grid_launch_dependents();

    const LaneDigits rows(digits, lane);
    float total[ROW_PAIRS][2];
    clear(total);
    const int all = share.count * share.tiles * MATRICES;
    int at = 0;                                    // of the warp's chunks
    float* own = sums + warp * ROWS * 16;          // of the tile
    for (int turn = 0; turn < all; turn += DEPTH) {
        #pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            if (turn + d >= all) break;
            add_chunk(total, ahead[d], rows, at);
            load(ahead[d]);
            if (++at < share.count) continue;
            store_sums(own, total, lane);
            clear(total);
            own += TILE_SUMS, at = 0;
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
