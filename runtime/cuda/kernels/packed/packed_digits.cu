// A few rows times packed weights (batch 1 to 8), in integers: bound by reading the weights once. 16-bit activations.
//
//   out[m, column] = epilogue(sum_k x[m, k] * (number[column, k] - zero) * scale)
//
// mma.sync on 8-bit integers takes packed numbers almost without conversion: eight 4-bit numbers cost one LOP3. Rows become integers of 18
// bits (22 for 8-bit numbers) with a power of two that 256 elements of K share. Each integer has three digits of 8 bits, which are three
// columns of operand B. So the sums of a group are exact, the zero point is subtracted exactly, and the rest is fp32.
//
// A block takes a contiguous range of tiles of 16 columns, two side by side. Its warps split K. A warp takes the same chunks of each tile, so
// it computes the digits of its own part of the rows and is their only reader. Weights are loaded straight to registers, AHEAD chunks in
// flight; the first are loaded before griddepcontrol.wait, since no kernel writes them. Warps synchronize once, at the end: their
// accumulators of a tile are added in a fixed order.
//
// NORM: rows are first divided by their root mean square and multiplied by ``scale``. A block sees whole rows, so it sums the squares, and
// divides the accumulators instead. PAIRED: the epilogue reads the product with a second matrix of the same form, after stages of its own
// (gated linear units): a tile of it follows each tile of the first matrix.
//
// generated.cuh defines ROWS, BLOCKS, WARPS, AHEAD, SHARE (most chunks of a tile in a warp), EVEN (each warp has SHARE chunks), SET_SHIFT
// (chunk c has the scales of set c >> SET_SHIFT), TILES (most tiles of a block), RESIDENT (blocks per multiprocessor), HAS_RESIDUAL, NORM,
// PAIRED, multiply() of 8-bit integers, epilogue() and, PAIRED, epilogue_beside(), and the macros of packed.cuh.
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
    const u16* residual;                           // shaped as the output
    u16* output;                                   // [ROWS][out_pitch]
    PackedWeights beside;                          // the second matrix, and its bias
    const float* beside_bias;
    const float* scale;                            // [k]
    int columns, k, x_pitch, out_pitch;
    float epsilon;
};

constexpr int THREADS = WARPS * 32, MATRICES = 1 + PAIRED;
constexpr int TILE_SUMS = WARPS * ROWS * 16;       // per tile of one matrix
constexpr int TOGETHER = TILES * MATRICES > 1 ? 2 : 1, EACH = TOGETHER / MATRICES;     // tiles multiplied side by side: in all, of each matrix
constexpr int DEPTH = AHEAD / TOGETHER;
constexpr int SQUARES = NORM ? (WARPS * ROWS + 3) / 4 * 4 : 0;
constexpr int SCALE_SET = 16 * GROUPS * SCALE_BYTES, ZERO_SET = 16 * GROUPS * ZERO_BYTES;  // bytes
static_assert(DEPTH >= 1, "a chunk of each tile is in flight");

// The block's tiles, and the warp's chunks of each of them.
struct Share {
    int begin, tiles, first, count;
    __device__ __forceinline__ Share(const Params& p, int warp) {
        const u32 all = (p.columns + 15) / 16, chunks = p.weights.chunks;
        begin = all * blockIdx.x / BLOCKS, tiles = all * (blockIdx.x + 1) / BLOCKS - begin;
        first = EVEN ? SHARE * warp : chunks * warp / WARPS, count = EVEN ? SHARE : chunks * (warp + 1) / WARPS - first;
    }
};

// A lane's read addresses in a matrix: the next tile's first chunk, scales and zero points.
struct Tiles {
    const u8 *weights, *scales, *zeros;
    __device__ __forceinline__ Tiles(const PackedWeights& w, int first, int lane)
        : weights(w.tiles + (long long)first * w.chunks * CHUNK_BYTES + lane * 16), scales(w.scales + (long long)first * w.sets * SCALE_SET + lane / 4 * (SCALE_SET / 16)),
          zeros(w.zeros + (long long)first * w.sets * ZERO_SET + lane / 4 * (ZERO_SET / 16)) {}
    __device__ __forceinline__ void next(const PackedWeights& w) {
        weights += w.chunks * EACH * CHUNK_BYTES, scales += w.sets * EACH * SCALE_SET, zeros += w.sets * EACH * ZERO_SET;
    }
};

// The chunks of the warp in order, for TOGETHER tiles side by side.
struct Loads {
    const Params& p;
    const Stream& stream;
    const int first, end;                          // of the warp's chunks
    int left, at;                                  // remaining tiles of a matrix, and the next chunk
    Tiles here, there;
    __device__ __forceinline__ Loads(const Params& p, const Share& share, const Stream& stream, int lane)
        : p(p), stream(stream), first(share.first), end(share.first + share.count), left(share.tiles), at(share.first),
          here(p.weights, share.begin, lane), there(PAIRED ? p.beside : p.weights, share.begin + (PAIRED ? 0 : 1), lane) {}
    __device__ __forceinline__ void load(Chunk& into, const Tiles& from) const {
        const int set = at >> SET_SHIFT;
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            into.weights[h] = stream(from.weights + at * CHUNK_BYTES + h * 512);
            into.scales[h] = load_words<GROUPS * SCALE_BYTES>(from.scales + set * SCALE_SET + h * (SCALE_SET / 2));
#if ZEROS
            into.zeros[h] = load_words<GROUPS * ZERO_BYTES>(from.zeros + set * ZERO_SET + h * (ZERO_SET / 2));
#endif
        }
    }
    __device__ __forceinline__ void operator()(Chunk (&into)[TOGETHER]) {
        if (left <= 0) return;
        load(into[0], here);
        if (TOGETHER == 2 && (PAIRED || left > 1)) load(into[TOGETHER - 1], there);
        if (++at < end) return;
        at = first, left -= EACH;
        here.next(p.weights);                      // the other matrix has the same number of chunks and sets
        if (TOGETHER == 2) there.next(p.weights);
    }
};

// Epilogue operands of the thread's first result, besides its accumulators; loaded early.
struct Around {
    float bias, beside;
    u16 residual;                                  // converted only at its use, so that nothing waits for it earlier
    __device__ __forceinline__ void constants(const Params& p, int column) {
        bias = column < p.columns ? p.bias[column] : 0.0f;
        beside = PAIRED && column < p.columns ? p.beside_bias[column] : 0.0f;
    }
    __device__ __forceinline__ void rows(const Params& p, int m, int column) {
        residual = HAS_RESIDUAL && column < p.columns ? p.residual[(long long)m * p.out_pitch + column] : u16(0);
    }
};

// The sum over the warps for column i % 16 of a tile and a row: four partial sums.
DEVICE float summed(const float* sums, int tile, int m, int i) {
    constexpr int SIDES = WARPS < 4 ? WARPS : 4;
    float total[4] = {};
    #pragma unroll
    for (int w = 0; w < WARPS; w++) total[w % SIDES] += sums[tile * TILE_SUMS + (w * ROWS + m) * 16 + i];
    return (total[0] + total[1]) + (total[2] + total[3]);
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
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);    // warp-uniform, and the compiler knows it
    const int lane = now(threadIdx.x % 32, threadIdx.x % 32) % 32u;
    const Share share(p, warp);
    const Stream stream;
    Loads load(p, share, stream, lane);
    Chunk ahead[DEPTH][TOGETHER];
    #pragma unroll
    for (int d = 0; d < DEPTH; d++) load(ahead[d]);
    RowPart part(share.first * CHUNK_K, share.count, p.k, lane);
    if (NORM) part.load_scales(p.scale, 0);
    const int own_column = (share.begin + threadIdx.x / (ROWS * 16)) * 16 + threadIdx.x % 16, own_row = threadIdx.x / 16 % ROWS;
    Around around;
    around.constants(p, own_column);

    float* const sums = reinterpret_cast<float*>(shared);    // [tile][matrix][WARPS][ROWS][16]
    float* const squares = sums + TILES * MATRICES * TILE_SUMS;        // [WARPS][ROWS]
    u8* const digits = reinterpret_cast<u8*>(squares + SQUARES) + share.first * (ROWS * ROW_BYTES);    // no other warp reads them
    const LaneDigits rows(digits, lane);
    grid_dependency_wait();
    part.load_rows(p.x, p.x_pitch, 0);
    if (threadIdx.x < share.tiles * (ROWS * 16)) around.rows(p, own_row, own_column);
    part.put(digits, 0);
    #pragma unroll 1
    for (int turn = SIDE; turn < TURNS; turn += SIDE) {
        if (NORM) part.load_scales(p.scale, turn);
        part.load_rows(p.x, p.x_pitch, turn);
        part.put(digits, turn);
    }
    if (NORM) part.put_squares(squares + warp * ROWS);
    __syncwarp();

    float* own = sums + warp * ROWS * 16;          // within the tile
    Totals<TOGETHER> total;
    clear<TOGETHER>(total);
    int left = share.tiles, at = 0;                // remaining tiles, and the index of the warp's chunk
    while (left > 0) {
        #pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            if (left <= 0) break;
            add_chunks<TOGETHER>(total, ahead[d], rows, at * (ROWS * ROW_BYTES));
            load(ahead[d]);
            if (++at < share.count) continue;
            #pragma unroll
            for (int n = 0; n < TOGETHER; n++, own += TILE_SUMS)
                if (PAIRED || n < left) store_sums(own, total[n], lane);
            clear<TOGETHER>(total);
            left -= EACH, at = 0;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < share.tiles * (ROWS * 16); i += THREADS) {
        const int tile = i / (ROWS * 16), m = i / 16 % ROWS, column = (share.begin + tile) * 16 + i % 16;
        if (i != threadIdx.x) around.constants(p, column), around.rows(p, m, column);
        if (column >= p.columns) continue;
        const float factor = NORM ? norm_factor(p, squares, m) : 1.0f;
        float other = unpack1(around.residual);
#if PAIRED
        other = epilogue_beside(summed(sums, tile * MATRICES + 1, m, i % 16) * factor, around.beside, 0.0f);
#endif
        p.output[(long long)m * p.out_pitch + column] = pack1(epilogue(summed(sums, tile * MATRICES, m, i % 16) * factor, around.bias, other));
    }
}
