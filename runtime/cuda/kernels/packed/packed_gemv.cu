// A few rows times packed weights (batch 1 to 8): bound by reading the weights once. 16-bit activations, fp32 accumulators.
//
//   out[m, column] = epilogue(sum_k x[m, k] * (number[column, k] - zero) * scale)
//
// A block takes TILES tiles of 16 columns, and its warps take the chunks of K in turn. Weights are loaded straight to registers, DEPTH chunks
// per lane in flight; the first are loaded before griddepcontrol.wait, since no kernel writes them. They are operand A of mma.sync. The rows,
// padded to eight by repetition, are operand B: products are exact, and summed in fp32. Each group of K that shares a scale has its own
// accumulator. Rows are in shared memory, PART chunks at a time. The accumulators of warps are added in a fixed order.
//
// generated.cuh defines ROWS, TILES, WARPS, DEPTH, PART (a multiple of WARPS * DEPTH), HAS_RESIDUAL, epilogue(), and the macros of packed.cuh.
#include "ptx.cuh"
#include "mma.cuh"
#include "generated.cuh"
#include "stream.cuh"
#include "packed.cuh"
#include "packed_few.cuh"

struct Params {
    const u16* x;                                  // [ROWS][x_pitch], rows aligned to 16 bytes
    PackedWeights weights;
    const float* bias;
    const u16* residual;                           // shaped as the output
    u16* output;                                   // [ROWS][out_pitch]
    int columns, k, x_pitch, out_pitch;
};

constexpr int THREADS = WARPS * 32, COLUMNS = TILES * 16;
constexpr int PITCH = PART * CHUNK_K * 2 + 64;     // bytes of a row: two rows are on different banks
static_assert(PART % (WARPS * DEPTH) == 0, "a part is whole turns of the ring");
static_assert(THREADS % COLUMNS == 0, "a thread finishes one column, of some rows");
static_assert(ROWS * (PITCH + PART * GROUPS * 4) >= WARPS * ROWS * COLUMNS * 4, "the sums of warps take the place of the rows");

#if __CUDA_ARCH__ >= 900
#define BOUNDS THREADS
#else
#define BOUNDS THREADS, 1                          // otherwise ptxas spills to fit more blocks
#endif
extern "C" __global__ void __launch_bounds__(BOUNDS) packed_gemv(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 shared[];
    grid_launch_dependents();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_tile = blockIdx.x * TILES, chunks = p.weights.chunks;
    const int tiles = (p.columns + 15) / 16;
    const Stream stream;
    Chunk ahead[DEPTH][TILES];
    auto load = [&](Chunk (&into)[TILES], int chunk) {
        #pragma unroll
        for (int n = 0; n < TILES; n++) into[n] = load_chunk(p.weights, stream, min(first_tile + n, tiles - 1), chunk, lane);
    };
    #pragma unroll
    for (int d = 0; d < DEPTH; d++)
        if (warp + d * WARPS < chunks) load(ahead[d], warp + d * WARPS);
    const int column = first_tile * 16 + threadIdx.x % COLUMNS;
    const float bias = column < p.columns ? p.bias[column] : 0.0f;
    grid_dependency_wait();
    const long long first_at = (long long)(threadIdx.x / COLUMNS) * p.out_pitch + column;
    const bool finishes = threadIdx.x < ROWS * COLUMNS && column < p.columns;
    const float residual = HAS_RESIDUAL && finishes ? unpack1(p.residual[first_at]) : 0.0f;

    Sums<TILES> total;
    #pragma unroll
    for (int i = 0; i < TILES * 4; i++) total[i / 4][i % 4] = 0.0f;
    for (int begin = 0; begin < chunks; begin += PART) {
        if (begin) __syncthreads();                // nobody reads the previous part any more
        const int end = min(begin + PART, chunks);
        const RowsHere here(shared, PART);
        put_rows<THREADS>(here, p.x, p.x_pitch, begin * CHUNK_K, p.k);
        __syncthreads();
        const LaneRows rows(here, lane);
        for (int turn = begin + warp; turn < end; turn += WARPS * DEPTH) {
            #pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                const int chunk = turn + d * WARPS;
                if (chunk >= end) break;
                add_chunk<TILES>(total, ahead[d], rows, chunk - begin);
                const int next = chunk + WARPS * DEPTH;
                if (next < chunks) load(ahead[d], next);
            }
        }
    }

    // Lane 4 g + t has the accumulators of columns g and g + 8 of rows 2 t and 2 t + 1.
    __syncthreads();
    float* partial = reinterpret_cast<float*>(shared);     // [WARPS][ROWS][COLUMNS]
    #pragma unroll
    for (int n = 0; n < TILES; n++) {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const int m = lane % 4 * 2 + i % 2, column = n * 16 + lane / 4 + i / 2 * 8;
            if (m < ROWS) partial[(warp * ROWS + m) * COLUMNS + column] = total[n][i];
        }
    }
    __syncthreads();
    if (!finishes) return;
    for (int i = threadIdx.x; i < ROWS * COLUMNS; i += THREADS) {
        float sum = 0.0f;
        #pragma unroll
        for (int w = 0; w < WARPS; w++) sum += partial[w * ROWS * COLUMNS + i];
        const long long at = (long long)(i / COLUMNS) * p.out_pitch + column;
        const float added = i == threadIdx.x ? residual : HAS_RESIDUAL ? unpack1(p.residual[at]) : 0.0f;
        p.output[at] = pack1(epilogue(sum, bias, added));
    }
}
