// A few rows times a matrix (batch 1 to 4): bound by reading the matrix once. 16-bit operands, fp32 sums.
//
//   out[m, column] = epilogue(sum_k x[m, k] * weights[column, k])
//
// A block takes COLUMNS columns, whose K its warps share: each lane reads 16 bytes of every column's weights at a time, and
// DEPTH such steps are in flight. The first weights are on their way before griddepcontrol.wait: they depend on no other kernel. Sums of
// lanes, then of warps, in a fixed order.
//
// generated.cuh defines ROWS, COLUMNS, WARPS, DEPTH, PASSING (the matrix does not fit L2), HAS_RESIDUAL,
// RESULT_FLOAT (results and residuals are fp32) and epilogue().
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

struct Params {
    const u16* x;                                  // [ROWS][x_pitch]
    const u16* weights;                            // [columns][k]
    const float* bias;
    const Result* residual;                        // as output
    Result* output;                                // [ROWS][out_pitch]
    int columns, k, x_pitch, out_pitch;
};

DEVICE void add_products(float& sum, const uint4& a, const uint4& b) {
    sum = fmaf(low_float(a.x), low_float(b.x), sum), sum = fmaf(high_float(a.x), high_float(b.x), sum);
    sum = fmaf(low_float(a.y), low_float(b.y), sum), sum = fmaf(high_float(a.y), high_float(b.y), sum);
    sum = fmaf(low_float(a.z), low_float(b.z), sum), sum = fmaf(high_float(a.z), high_float(b.z), sum);
    sum = fmaf(low_float(a.w), low_float(b.w), sum), sum = fmaf(high_float(a.w), high_float(b.w), sum);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) gemv(const __grid_constant__ Params p) {
    __shared__ float partial[WARPS][COLUMNS * ROWS];
    grid_launch_dependents();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.x * COLUMNS;
    constexpr int STEP = WARPS * 256;              // elements of K that a block takes at a time
    const Stream stream;
    const u16* rows[COLUMNS];
    #pragma unroll
    for (int c = 0; c < COLUMNS; c++) rows[c] = p.weights + (long long)min(first + c, p.columns - 1) * p.k;

    const int begin = warp * 256 + lane * 8;
    uint4 w[DEPTH][COLUMNS];
    #pragma unroll
    for (int d = 0; d < DEPTH; d++) {
        #pragma unroll
        for (int c = 0; c < COLUMNS; c++)
            w[d][c] = begin + d * STEP < p.k ? stream(rows[c] + begin + d * STEP) : make_uint4(0u, 0u, 0u, 0u);
    }
    grid_dependency_wait();
    float sum[COLUMNS][ROWS];
    #pragma unroll
    for (int i = 0; i < COLUMNS * ROWS; i++) sum[i / ROWS][i % ROWS] = 0.0f;
    for (int k = begin; k < p.k; k += DEPTH * STEP) {
        #pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            const int at = k + d * STEP;
            if (at >= p.k) break;
            #pragma unroll
            for (int m = 0; m < ROWS; m++) {
                const uint4 x = *reinterpret_cast<const uint4*>(p.x + m * p.x_pitch + at);
                #pragma unroll
                for (int c = 0; c < COLUMNS; c++) add_products(sum[c][m], w[d][c], x);
            }
            const int next = at + DEPTH * STEP;
            #pragma unroll
            for (int c = 0; c < COLUMNS; c++)
                if (next < p.k) w[d][c] = stream(rows[c] + next);
        }
    }
    #pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        #pragma unroll
        for (int m = 0; m < ROWS; m++) {
            float total = sum[c][m];
            #pragma unroll
            for (int offset = 16; offset > 0; offset /= 2) total += __shfl_xor_sync(0xffffffffu, total, offset);
            if (lane == 0) partial[warp][c * ROWS + m] = total;
        }
    }
    __syncthreads();
    const int column = first + int(threadIdx.x) / ROWS, m = threadIdx.x % ROWS;
    if (threadIdx.x >= COLUMNS * ROWS || column >= p.columns) return;
    float total = 0.0f;
    #pragma unroll
    for (int i = 0; i < WARPS; i++) total += partial[i][threadIdx.x];
    const long long at = (long long)m * p.out_pitch + column;
    p.output[at] = narrow(epilogue(total, p.bias[column], HAS_RESIDUAL ? widen(p.residual[at]) : 0.0f));
}
