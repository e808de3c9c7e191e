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
// memory works in that time: each warp has a ring in shared memory, DEPTH spans of TILES tiles, and it is full before
// griddepcontrol.wait returns. The next kernel begins beside this one when the last weights are on their way: its ring fills then, and its
// loads hold up none of this one's. Of the first weights, PACE spans are in flight at a time, so that memory answers others in between.
//
// A block takes neighbouring tiles of eight columns, TILES (of both matrices) at a time. Its warps share K in spans of 64 elements, and each
// copies what it multiplies itself: a lane copies and reads the same 16 bytes, so that nothing is synchronized. Weights are operand B of
// mma.sync, rows operand A: the order of elements within a product is free. The sums of warps are added in a fixed order.
//
// generated.cuh defines ROWS, TILES, WARPS, DEPTH, PACE, EXACT (spans of all warps end where K does), PASSING (the matrix does not fit L2), HAS_RESIDUAL, NORM, PAIRED,
// RESULT_FLOAT (results and residuals are fp32), multiply(), epilogue() and, PAIRED, epilogue_beside().
#include "vectors.cuh"
#include "mma.cuh"
#include "generated.cuh"
#include "stream.cuh"
#include "gemv_operands.cuh"

constexpr int MATRICES = 1 + PAIRED, THREADS = WARPS * 32;
constexpr int SPAN = 64, TILE = 8;                 // elements of K that a warp multiplies at a time, columns
constexpr int TILE_BYTES = SPAN * TILE * 2, STAGE_BYTES = TILES * TILE_BYTES, RING_BYTES = DEPTH * STAGE_BYTES;
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

// The copies of a lane: groups of tiles, span by span.
struct Copies {
    const Stream& stream;
    const u16 *from, *beside;                      // the lane's place in the first tile of the group
    const u32 ring;
    const int limit, k, spans, tile_step;          // columns and elements of K that there are; elements from tile to tile
    int column, at, span = 0, slot = 0, left;      // of the lane in the first tile; spans that are left to copy

    __device__ __forceinline__ Copies(const Params& p, const Stream& stream, int first, int last, int groups, u32 ring, int warp, int lane)
        : stream(stream), ring(ring + lane * 16), limit(min(last * TILE, p.columns)), k(p.k), spans(p.spans), tile_step(TILE * p.k),
          column(first * TILE + lane / 4), at(warp * SPAN + lane % 4 * 8), left(groups * p.spans) {
        const long long begin = (long long)column * p.k + at;
        from = p.weights + begin, beside = PAIRED ? p.beside + begin : nullptr;
    }

    // Gives whether these were the last.
    __device__ __forceinline__ bool next() {
        if (left == 0) {
            copies_commit();
            return false;
        }
        #pragma unroll
        for (int n = 0; n < TILES; n++) {
            const u16* const source = (n % MATRICES ? beside : from) + n / MATRICES * tile_step;
            const u32 to = ring + slot * STAGE_BYTES + n * TILE_BYTES;
            if (column + n / MATRICES * TILE < limit) {
                if (EXACT || at < k) stream.copy(to, source);
                if (EXACT || at + 32 < k) stream.copy(to + 512, source + 32);
            }
        }
        copies_commit();
        slot = slot + 1 == DEPTH ? 0 : slot + 1;
        int step = WARPS * SPAN;
        if (++span == spans) step += PAIRS * tile_step - spans * (WARPS * SPAN), at -= spans * (WARPS * SPAN), column += PAIRS * TILE, span = 0;
        at += WARPS * SPAN, from += step, beside += PAIRED ? step : 0;
        return --left == 0;
    }
};

// The warp's part of the rows, of a norm times the scale, to shared memory; gives the lane's sum of their squares.
DEVICE void bring_rows(u16* own, float (&squares)[ROWS], const Params& p, const float (&first_scale)[8], int warp, int lane) {
    constexpr int MANY = 4;                        // vectors of a lane that are in flight
    const int vectors = p.spans * (SPAN / 8);
    for (int m = 0; m < ROWS; m++) {
        for (int begin = lane; begin < vectors; begin += 32 * MANY) {
            uint4 v[MANY];
            #pragma unroll
            for (int i = 0; i < MANY; i++) {
                const int place = begin + 32 * i, at = place / 8 * (WARPS * SPAN) + warp * SPAN + place % 8 * 8;
                v[i] = make_uint4(0u, 0u, 0u, 0u);
                if (place < vectors && at < p.k) v[i] = *reinterpret_cast<const uint4*>(p.x + m * p.x_pitch + at);
            }
            #pragma unroll
            for (int i = 0; i < MANY; i++) {
                const int place = begin + 32 * i, at = place / 8 * (WARPS * SPAN) + warp * SPAN + place % 8 * 8;
                if (place >= vectors) break;
                u16* const to = own + (m * vectors + place) * 8;
                if (NORM) {
                    float x[8], scale[8];
                    unpack(x, v[i]);
                    #pragma unroll
                    for (int e = 0; e < 8; e++) scale[e] = first_scale[e];
                    if (place >= 32 && at < p.k) load_floats<8>(scale, p.scale + at);
                    #pragma unroll
                    for (int e = 0; e < 8; e++) {
                        squares[m] = fmaf(x[e], x[e], squares[m]);
                        x[e] *= scale[e] * p.shrink;
                    }
                    store_packed<8>(to, pack<8>(x));
                } else {
                    *reinterpret_cast<uint4*>(to) = v[i];
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) gemv_staged(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) mark(0);
    float* const sums = reinterpret_cast<float*>(shared + WARPS * RING_BYTES);                     // [2][WARPS][SUMS]
    float* const squared = sums + 2 * WARPS * SUMS;                            // [WARPS][ROWS]
    u16* const own = reinterpret_cast<u16*>(squared + WARPS * ROWS) + warp * (ROWS * p.spans * SPAN);      // [ROWS][spans * SPAN]
    const u8* const ring = shared + warp * RING_BYTES;
#if TRIGGER == 0
    grid_launch_dependents();
#endif
    const int tiles = (p.columns + TILE - 1) / TILE, first = blockIdx.x * p.share, last = min(first + p.share, tiles);
    const int groups = (last - first + PAIRS - 1) / PAIRS;

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
    const Stream stream;
    Copies copies(p, stream, first, last, groups, smem_address(ring), warp, lane);
    #pragma unroll 1
    for (int i = 0; i < DEPTH; i++) {
        if (copies.next() && TRIGGER == 1) grid_launch_dependents();
        if (PACE && i >= PACE) copies_wait_but<PACE>();
    }
    if (threadIdx.x == 0) mark(1);
    grid_dependency_wait();
    if (threadIdx.x == 0) mark(2);
    load_residual(column_of(0));
    float squares[ROWS] = {};
    bring_rows(own, squares, p, scale, warp, lane);
    __syncwarp();
    if (threadIdx.x == 0) mark(3);

    const u16* const rows = own + min(lane / 4, ROWS - 1) * p.spans * SPAN + lane % 4 * 8;
    const u8* const weights = ring + lane * 16;
    int slot = 0;
    for (int group = 0; group < groups; group++) {
        float sum[TILES][4];
        #pragma unroll
        for (int i = 0; i < TILES * 4; i++) sum[i / 4][i % 4] = 0.0f;
        for (int span = 0; span < p.spans; span++) {
            copies_wait_but<DEPTH - 1>();
            #pragma unroll
            for (int j = 0; j < 2; j++) {
                const uint4 x = *reinterpret_cast<const uint4*>(rows + span * SPAN + 32 * j);
                const bool inside = EXACT || span * (WARPS * SPAN) + warp * SPAN + lane % 4 * 8 + 32 * j < p.k;
                const u32 even[4] = {x.x, 0u, x.y, 0u}, odd[4] = {x.z, 0u, x.w, 0u};
                uint4 w[TILES];
                #pragma unroll
                for (int n = 0; n < TILES; n++) {
                    w[n] = make_uint4(0u, 0u, 0u, 0u);
                    if (inside) w[n] = *reinterpret_cast<const uint4*>(weights + slot * STAGE_BYTES + n * TILE_BYTES + j * 512);
                }
                #pragma unroll
                for (int n = 0; n < TILES; n++) multiply(sum[n], even, w[n].x, w[n].y);
                #pragma unroll
                for (int n = 0; n < TILES; n++) multiply(sum[n], odd, w[n].z, w[n].w);
            }
            if (copies.next() && TRIGGER == 1) grid_launch_dependents();
            slot = slot + 1 == DEPTH ? 0 : slot + 1;
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
}
