// A few rows times a matrix (batch 1 to 4): bound by reading the matrix once. 16-bit operands, fp32 accumulators.
//
//   out[m, column] = epilogue(sum_k x[m, k] * weights[column, k])
//
// NORM: rows are first divided by their root mean square and multiplied by ``scale``. A block sees whole rows, so it sums the squares beside
// the products, and divides the accumulators instead. PAIRED: the epilogue reads the product with a second matrix, after stages of its own
// (gated linear units).
//
// A block takes COLUMNS columns, and its warps split K: each lane reads 16 bytes of every column's weights at a time, and DEPTH such steps
// are in flight. The first weights are loaded before griddepcontrol.wait: no kernel writes them. Sums of lanes, then of warps, are added in a
// fixed order.
//
// SELECTED: each row has a matrix of its own, which ``index`` selects from a stack (mixtures of experts); blockIdx.y counts rows, and ROWS is 1.
// Nothing is loaded before griddepcontrol.wait then: another kernel computes the index.
//
// generated.cuh defines ROWS, COLUMNS, WARPS, DEPTH, PASSING (the matrix does not fit L2), HAS_RESIDUAL, NORM, PAIRED,
// RESULT_FLOAT (results and residuals are fp32), SELECTED or not, epilogue() and, PAIRED, epilogue_beside().
#include "vectors.cuh"
#include "generated.cuh"
#include "stream.cuh"

#if RESULT_FLOAT
typedef float Result;
DEVICE float widen(float v) { return v; }
DEVICE Result narrow(float v) { return v; }
#else
typedef u16 Result;
DEVICE float widen(u16 v) { return unpack1(v); }
DEVICE Result narrow(float v) { return pack1(v); }
#endif

#ifdef SELECTED
#define BIAS 0.0f
#else
#define BIAS p.bias[column]
#endif

constexpr int ALL = COLUMNS * (1 + PAIRED);        // columns of a block, of both matrices
constexpr int SUMS = ROWS * (ALL + NORM);          // values that warps add

struct Params {
    const u16* x;                                  // [ROWS][x_pitch]
    const u16* weights;                            // [columns][k]
    const float* bias;
    const Result* residual;                        // shaped as the output
    Result* output;                                // [ROWS][out_pitch]
    const u16* beside;                             // the second matrix, and its bias
    const float* beside_bias;
    const float* scale;                            // [k]
    int columns, k, x_pitch, out_pitch;
    float epsilon;
#ifdef SELECTED
    const long long* index;                        // [rows]
    long long matrices;                            // of the stack
    int times;                                     // neighboring rows that are one row of x
#endif
};

DEVICE void unpack(float (&x)[8], const uint4& v) {
    x[0] = low_float(v.x), x[1] = high_float(v.x), x[2] = low_float(v.y), x[3] = high_float(v.y);
    x[4] = low_float(v.z), x[5] = high_float(v.z), x[6] = low_float(v.w), x[7] = high_float(v.w);
}
DEVICE void add_products(float& sum, const uint4& a, const float (&x)[8]) {
    float w[8];
    unpack(w, a);
    #pragma unroll
    for (int i = 0; i < 8; i++) sum = fmaf(w[i], x[i], sum);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) gemv(const __grid_constant__ Params p) {
    __shared__ float partial[WARPS][SUMS];
    grid_launch_dependents();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.x * COLUMNS;
    constexpr int STEP = WARPS * 256;              // elements of K that a block takes at a time
    const Stream stream;
    const u16* x_rows = p.x;
    const u16* weights = p.weights;
    Result* output = p.output;
#ifdef SELECTED
    grid_dependency_wait();
    const long long given = p.index[blockIdx.y], matrix = given < 0 ? given + p.matrices : given;
    weights += min(max(matrix, 0ll), p.matrices - 1) * p.columns * p.k;
    x_rows += (long long)(blockIdx.y / p.times) * p.x_pitch;
    output += (long long)blockIdx.y * p.out_pitch;
#endif
    const u16* rows[ALL];
    #pragma unroll
    for (int c = 0; c < ALL; c++)
        rows[c] = (c < COLUMNS ? weights : p.beside) + (long long)min(first + c % COLUMNS, p.columns - 1) * p.k;

    const int begin = warp * 256 + lane * 8;
    uint4 w[DEPTH][ALL];
    #pragma unroll
    for (int d = 0; d < DEPTH; d++) {
        #pragma unroll
        for (int c = 0; c < ALL; c++)
            w[d][c] = begin + d * STEP < p.k ? stream(rows[c] + begin + d * STEP) : make_uint4(0u, 0u, 0u, 0u);
    }
#ifndef SELECTED
    grid_dependency_wait();
#endif
    float sum[SUMS];                               // column c and row m at c ROWS + m; the sums of squares follow
    #pragma unroll
    for (int i = 0; i < SUMS; i++) sum[i] = 0.0f;
    for (int k = begin; k < p.k; k += DEPTH * STEP) {
        #pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            const int at = k + d * STEP;
            if (at >= p.k) break;
            float scale[8];
            if (NORM) load_floats<8>(scale, p.scale + at);
            #pragma unroll
            for (int m = 0; m < ROWS; m++) {
                float x[8];
                unpack(x, *reinterpret_cast<const uint4*>(x_rows + m * p.x_pitch + at));
                if (NORM) {
                    #pragma unroll
                    for (int i = 0; i < 8; i++) {
                        sum[SUMS - ROWS + m] = fmaf(x[i], x[i], sum[SUMS - ROWS + m]);
                        x[i] *= scale[i];
                    }
                }
                #pragma unroll
                for (int c = 0; c < ALL; c++) add_products(sum[c * ROWS + m], w[d][c], x);
            }
            const int next = at + DEPTH * STEP;
            #pragma unroll
            for (int c = 0; c < ALL; c++)
                if (next < p.k) w[d][c] = stream(rows[c] + next);
        }
    }
    #pragma unroll
    for (int i = 0; i < SUMS; i++) {
        float total = sum[i];
        #pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) total += __shfl_xor_sync(0xffffffffu, total, offset);
        if (lane == 0) partial[warp][i] = total;
    }
    __syncthreads();
    const int column = first + int(threadIdx.x) / ROWS, m = threadIdx.x % ROWS;
    if (threadIdx.x >= COLUMNS * ROWS || column >= p.columns) return;
    auto whole = [&](int i) {
        float total = 0.0f;
        #pragma unroll
        for (int w = 0; w < WARPS; w++) total += partial[w][i];
        return total;
    };
    const float factor = NORM ? rsqrtf(whole(SUMS - ROWS + m) / p.k + p.epsilon) : 1.0f;
    const long long at = (long long)m * p.out_pitch + column;
    float other = HAS_RESIDUAL ? widen(p.residual[at]) : 0.0f;
#if PAIRED
    other = epilogue_beside(whole(COLUMNS * ROWS + threadIdx.x) * factor, p.beside_bias[column], 0.0f);
#endif
    output[at] = narrow(epilogue(whole(threadIdx.x) * factor, BIAS, other));
}
