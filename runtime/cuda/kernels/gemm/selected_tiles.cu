// Rows times the matrices of a stack that they select (mixtures of experts), for any number of rows:
//
//   y[r, column] = sum_k x[r / times, k] * weights[index[r], k, column]
//
// A block takes BN columns of one matrix (blockIdx.y). It reads all indices, and collects the rows that selected this matrix. BM of them at a
// time are the rows of a tile, which are gathered from x. The tiles of a matrix are shared by gridDim.z blocks. So a matrix is read once for
// BM rows, rows are multiplied with no other matrix, and the sums of a row do not depend on the other rows.
//
// generated.cuh defines the macros of a tile, multiply() on tensor cores, SUMS (floats in shared memory for the tile), SCALAR (the tile is true
// fp32), RESULT_FLOAT (y is fp32) and VECTORS (rows of y begin at multiples of 8 elements, and columns are a multiple of 8).
#include "general.cuh"
#include "generated.cuh"
#if SCALAR
#include "matmul_fp32.cuh"
typedef float Number;
constexpr int BLOCKS = 1;                          // of a multiprocessor, that registers must allow
#else
#include "matmul_mma.cuh"
constexpr int BLOCKS = ITEM == 2 ? 3 : 1;
#endif
#if RESULT_FLOAT
typedef float Result;
#else
typedef Number Result;
#endif

struct Params {
    Result* y;                                     // [rows][y_pitch]
    const Number* x;                               // [rows / times][x_pitch]
    const Number* weights;                         // matrices, each of matrix_pitch elements
    const i64* index;                              // [rows]; counted from the end if negative
    int rows, n, k;
    Size times;
    i64 matrices, matrix_pitch, place_pitch, column_pitch, x_pitch, y_pitch;   // place, column: steps in a matrix along K and from column to column
};

constexpr int INDICES = 8, PITCH = BN + 8, LANES = 8;
DEVICE void meet() { __syncthreads(); }
#include "selected_rows.cuh"

DEVICE void store(Result* to, const float* sums, int left) {
    if (VECTORS) {
        constexpr int WIDE = 16 / sizeof(Result);  // elements of a store
        #pragma unroll
        for (int i = 0; i < LANES; i += WIDE) {
            __align__(16) Result out[WIDE];
            #pragma unroll
            for (int j = 0; j < WIDE; j++) out[j] = narrow<Result>(sums[i + j]);
            *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(out);
        }
    } else {
        #pragma unroll
        for (int i = 0; i < LANES; i++)
            if (i < left) to[i] = narrow<Result>(sums[i]);
    }
}

// A tile: ``count`` rows of the list. ``sources``: their numbers in x.
DEVICE void multiply_rows(const Params& p, float* shared, const int* list, int* sources, int count) {
    const int first = blockIdx.x * BN;
    for (int i = threadIdx.x; i < count; i += THREADS) sources[i] = u32(list[i]) / p.times;
    __syncthreads();
    float acc[TM][TN];
    const Matrix left = {p.x, int(p.x_pitch), 1}, right = {p.weights + blockIdx.y * p.matrix_pitch, int(p.place_pitch), int(p.column_pitch)};
    product_tile(acc, shared, left, right, 0, first, count, p.n, p.k, sources);
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < TM; i++)
        #pragma unroll
        for (int j = 0; j < TN; j++) shared[(own_row() + row_of(i)) * PITCH + own_column() + column_of(j)] = acc[i][j];
    __syncthreads();
    #pragma unroll 2
    for (int at = threadIdx.x; at < BM * BN / LANES; at += THREADS) {
        const int i = at / (BN / LANES), j = at % (BN / LANES) * LANES, left = p.n - first - j;
        if (i < count && left > 0) store(p.y + list[i] * p.y_pitch + first + j, shared + i * PITCH + j, left);
    }
    __syncthreads();                               // the next tile overwrites the sums
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) selected_tiles(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) float shared[];
    int* numbers = reinterpret_cast<int*>(shared + SUMS);   // behind the ring, and behind the sums in its place
    Rows rows = {numbers, numbers + BM + CHUNK, 0, 0, int(blockIdx.y)};
    launch_dependents();
    wait_for_predecessor();
    for (int tile = 0;; tile++, rows.drop()) {
        const int count = rows.find(p);
        if (!count) return;
        if (tile % gridDim.z == blockIdx.z) multiply_rows(p, shared, rows.list, numbers + BM + CHUNK + WARPS, count);
    }
}
