// A few rows times a matrix (batch 1 to 4), as gemv.cu, for matrices whose columns are shared by as many blocks as there are multiprocessors.
// 16-bit operands, fp32 sums.
//
//   out[m, column] = epilogue(sum_k x[m, k] * weights[column, k])
//
// NORM: rows are divided by the root of the mean of their squares first, and multiplied by ``scale``. PAIRED: the epilogue reads the product
// with a second matrix, after stages of its own (gated linear units). Both as in gemv.cu, but products are of rows times ``scale``,
// rounded to 16 bits: ``shrink``, a power of two, keeps them in range.
//
// The time between the last store of the kernel before and this one's first product is what a small product costs on top of its bytes. So
// memory works in that time: each warp has a ring in shared memory, DEPTH turns of TOGETHER tiles, and it is full before
// griddepcontrol.wait returns. The ring of the next kernel, whose blocks begin beside this one's, fills in the same way. Weights that
// are on their way take no registers.
//
// A block takes neighbouring tiles of eight columns, TILES (of both matrices) at a time. Its warps share K in spans of 64 elements, and each
// copies what it multiplies itself: a lane copies and reads the same 16 bytes, so that nothing is synchronized. Weights are operand B of
// mma.sync, rows operand A: the order of elements within a product is free. The sums of warps are added in a fixed order.
//
// generated.cuh defines ROWS, TILES, TOGETHER, WARPS, DEPTH, RESIDENT (blocks of a multiprocessor), PASSING (the matrix does not fit L2), HAS_RESIDUAL,
// NORM, PAIRED, RESULT_FLOAT (results and residuals are fp32), multiply(), epilogue() and, PAIRED, epilogue_beside().
#include "vectors.cuh"
#include "mma.cuh"
#include "generated.cuh"
#include "stream.cuh"
#include "gemv_operands.cuh"

constexpr int MATRICES = 1 + PAIRED, THREADS = WARPS * 32;
constexpr int SPAN = 64, TILE = 8;                 // elements of K that a warp multiplies at a time, columns
constexpr int TILE_BYTES = SPAN * TILE * 2, TURN_BYTES = TOGETHER * TILE_BYTES, RING_BYTES = DEPTH * TURN_BYTES;
constexpr int TURNS = (TILES + TOGETHER - 1) / TOGETHER;           // of a span
constexpr int PAIRS = TILES / MATRICES, RESULTS = PAIRS * TILE * ROWS, SUMS = TILES * TILE * ROWS;
static_assert(TILES % MATRICES == 0, "tiles of two matrices come in pairs");
static_assert(RESULTS <= THREADS, "a thread has one result of a group");

struct Params {
    const u16* x;                                  // [ROWS][x_pitch]
    const u16* weights;                            // [columns][k]
    const float* bias;
    const Result* residual;                        // as output
    Result* output;                                // [ROWS][out_pitch]
    const u16* beside;                             // the second matrix, and its bias
    const float* beside_bias;
    const float* scale;                            // [k]
    int columns, k, x_pitch, out_pitch;
    int share, spans;                              // tiles of a block, of each matrix; spans of a warp
    float epsilon, shrink;
};

// The copies of a lane, turn by turn: groups of tiles, their spans, their tiles.
struct Copies {
    const Params& p;
    const Stream& stream;
    const int first, last, k, row;                 // the block's tiles; the lane's place in a span and in a tile
    const u32 ring;
    int group = 0, span = 0, turn = 0, slot = 0;

    __device__ __forceinline__ Copies(const Params& p, const Stream& stream, int first, int last, u32 ring, int warp, int lane)
        : p(p), stream(stream), first(first), last(last), k(warp * SPAN + lane % 4 * 8), row(lane / 4), ring(ring + lane * 16) {}

    __device__ __forceinline__ void next() {
        const int at = span * (WARPS * SPAN) + k;
        #pragma unroll
        for (int i = 0; i < TOGETHER; i++) {
            const int n = turn * TOGETHER + i, tile = first + group * PAIRS + n / MATRICES;
            if (n < TILES && tile < last) {
                const u16* matrix = n % MATRICES ? p.beside : p.weights;
                const u16* from = matrix + (long long)min(tile * TILE + row, p.columns - 1) * p.k + at;
                const u32 to = ring + slot * TURN_BYTES + i * TILE_BYTES;
                if (at < p.k) stream.copy(to, from);
                if (at + 32 < p.k) stream.copy(to + 512, from + 32);
            }
        }
        copies_commit();
        slot = slot + 1 == DEPTH ? 0 : slot + 1;
        if (++turn == TURNS) {
            turn = 0;
            if (++span == p.spans) span = 0, group++;
        }
    }
};

// The warp's part of the rows, times the scale, in shared memory; gives the lane's sum of their squares.
DEVICE void scale_rows(u16* own, float (&squares)[ROWS], const Params& p, float (&scale)[8], int warp, int lane) {
    for (int v = lane; v < p.spans * (SPAN / 8); v += 32) {
        const int at = v / 8 * (WARPS * SPAN) + warp * SPAN + v % 8 * 8;
        if (at < p.k && v >= 32) load_floats<8>(scale, p.scale + at);
        #pragma unroll
        for (int m = 0; m < ROWS; m++) {
            float x[8] = {};
            if (at < p.k) unpack(x, *reinterpret_cast<const uint4*>(p.x + m * p.x_pitch + at));
            #pragma unroll
            for (int i = 0; i < 8; i++) {
                squares[m] = fmaf(x[i], x[i], squares[m]);
                x[i] *= scale[i] * p.shrink;
            }
            store_packed<8>(own + (m * p.spans * SPAN + v * 8), pack<8>(x));
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) gemv_staged(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) mark(0);
    float* const sums = reinterpret_cast<float*>(shared + WARPS * RING_BYTES);                     // [2][WARPS][SUMS]
    float* const squared = sums + 2 * WARPS * SUMS;                            // [WARPS][ROWS]
    u16* const own = reinterpret_cast<u16*>(squared + WARPS * ROWS) + warp * (ROWS * p.spans * SPAN);      // NORM: [ROWS][spans * SPAN]
    const u8* const ring = shared + warp * RING_BYTES;
#if TRIGGER == 0
    grid_launch_dependents();
#endif
    const int tiles = (p.columns + TILE - 1) / TILE, first = blockIdx.x * p.share, last = min(first + p.share, tiles);
    const int groups = ((last - first) * MATRICES + TILES - 1) / TILES;
    const Stream stream;
    Copies copies(p, stream, first, last, smem_address(ring), warp, lane);
    #pragma unroll 1
    for (int i = 0; i < DEPTH; i++) copies.next();
    if (threadIdx.x == 0) mark(1);
#if TRIGGER == 1
    grid_launch_dependents();
#endif

    // Of a group, this thread's result: its row, its tile and its column.
    const int mine = threadIdx.x, m = mine / (PAIRS * TILE), pair = mine / TILE % PAIRS, c = mine % TILE;
    float bias = 0.0f, beside_bias = 0.0f, residual = 0.0f, scale[8] = {};
    auto column_of = [&](int group) {
        const int tile = first + group * PAIRS + pair;
        return mine < RESULTS && tile < last && tile * TILE + c < p.columns ? tile * TILE + c : -1;
    };
    auto load_biases = [&](int column) {
        if (column < 0) return;
        bias = p.bias[column];
        if (PAIRED) beside_bias = p.beside_bias[column];
    };
    auto load_residual = [&](int column) {
        if (HAS_RESIDUAL && column >= 0) residual = widen(p.residual[(long long)m * p.out_pitch + column]);
    };
    load_biases(column_of(0));
    if (NORM) {
        const int at = lane / 8 * (WARPS * SPAN) + warp * SPAN + lane % 8 * 8;
        if (at < p.k) load_floats<8>(scale, p.scale + at);
    }
    grid_dependency_wait();
    if (threadIdx.x == 0) mark(2);
    load_residual(column_of(0));
    float squares[ROWS] = {};
    if (NORM) {
        scale_rows(own, squares, p, scale, warp, lane);
        __syncwarp();
    }
    if (threadIdx.x == 0) mark(3);
    const int row = min(lane / 4, ROWS - 1), k = warp * SPAN + lane % 4 * 8;
    auto load_rows = [&](uint4 (&x)[2], int span) {
        #pragma unroll
        for (int j = 0; j < 2; j++) {
            const int at = span * (WARPS * SPAN) + k + 32 * j;
            x[j] = make_uint4(0u, 0u, 0u, 0u);
            if (NORM) x[j] = *reinterpret_cast<const uint4*>(own + (row * p.spans + span) * SPAN + lane % 4 * 8 + 32 * j);
            else if (at < p.k && span < p.spans) x[j] = *reinterpret_cast<const uint4*>(p.x + row * p.x_pitch + at);
        }
    };

    int slot = 0;
    for (int group = 0; group < groups; group++) {
        float sum[TILES][4];
        #pragma unroll
        for (int i = 0; i < TILES * 4; i++) sum[i / 4][i % 4] = 0.0f;
        uint4 x[2], ahead[2];
        if (!NORM) load_rows(ahead, 0);
        for (int span = 0; span < p.spans; span++) {
            const int at = span * (WARPS * SPAN) + k;
            if (NORM) {
                load_rows(x, span);
            } else {
                x[0] = ahead[0], x[1] = ahead[1];
                load_rows(ahead, span + 1);
            }
            #pragma unroll
            for (int turn = 0; turn < TURNS; turn++) {
                copies_wait_but<DEPTH - 1>();
                #pragma unroll
                for (int j = 0; j < 2; j++) {
                    #pragma unroll
                    for (int i = 0; i < TOGETHER; i++) {
                        if (turn * TOGETHER + i >= TILES) break;
                        uint4 w = make_uint4(0u, 0u, 0u, 0u);
                        if (at + 32 * j < p.k) w = *reinterpret_cast<const uint4*>(ring + slot * TURN_BYTES + i * TILE_BYTES + j * 512 + lane * 16);
                        const u32 even[4] = {x[j].x, 0u, x[j].y, 0u}, odd[4] = {x[j].z, 0u, x[j].w, 0u};
                        multiply(sum[turn * TOGETHER + i], even, w.x, w.y);
                        multiply(sum[turn * TOGETHER + i], odd, w.z, w.w);
                    }
                }
                copies.next();
                slot = slot + 1 == DEPTH ? 0 : slot + 1;
            }
        }
        if (threadIdx.x == 0) mark(4);
        float* const found = sums + group % 2 * (WARPS * SUMS);
        #pragma unroll
        for (int n = 0; n < TILES; n++)
            if (lane / 4 < ROWS)
                *reinterpret_cast<float2*>(found + warp * SUMS + (n * ROWS + lane / 4) * TILE + lane % 4 * 2) = make_float2(sum[n][0], sum[n][1]);
        if (NORM && group == 0) {
            #pragma unroll
            for (int i = 0; i < ROWS; i++) {
                #pragma unroll
                for (int offset = 16; offset > 0; offset /= 2) squares[i] += __shfl_xor_sync(0xffffffffu, squares[i], offset);
                if (lane == 0) squared[warp * ROWS + i] = squares[i];
            }
        }
        __syncthreads();
        const int column = column_of(group);
        if (column >= 0) {
            auto whole = [&](const float* from, int step) {
                float total = 0.0f;
                #pragma unroll
                for (int w = 0; w < WARPS; w++) total += from[w * step];
                return total;
            };
            const float factor = NORM ? rsqrtf(whole(squared + m, ROWS) / p.k + p.epsilon) / p.shrink : 1.0f;
            const float* const own_sums = found + (pair * MATRICES * ROWS + m) * TILE + c;
            float other = residual;
#if PAIRED
            other = epilogue_beside(whole(own_sums + ROWS * TILE, SUMS) * factor, beside_bias, 0.0f);
#endif
            p.output[(long long)m * p.out_pitch + column] = narrow(epilogue(whole(own_sums, SUMS) * factor, bias, other));
        }
        if (threadIdx.x == 0) mark(5);
        if (group + 1 < groups) {
            load_biases(column_of(group + 1));
            load_residual(column_of(group + 1));
        }
    }
#if TRIGGER == 2
    grid_launch_dependents();
#endif
}
