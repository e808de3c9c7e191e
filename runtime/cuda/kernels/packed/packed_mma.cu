// Several rows times packed weights (up to 64 in a block), for any tensor-core GPU from sm_80 on. 16-bit activations, fp32 accumulators.
//
//   out[m, column] = epilogue(sum_k x[m, k] * (number[column, k] - zero) * scale)
//
// A block takes WN * TILES tiles of 16 columns and ROW_TILES * 8 rows. WN warps share the rows; WK such groups of warps take chunks of K in
// turn. Weights are loaded straight to registers, DEPTH chunks per lane in flight; the first are loaded before griddepcontrol.wait. There
// they are converted to 16-bit floats, times their scale, and are operand A of mma.sync. Rows pass through a ring of STAGES stages in shared
// memory, of WK chunks each.
// SPLIT blocks split K where tiles are few. Each block writes its accumulators. The last block to arrive adds all of them in the order of K,
// so results repeat to the bit. p.arrived counts the blocks of a tile that have written; it is zero between launches, since the last block
// resets it.
//
// generated.cuh defines ROW_TILES, TILES, WN, WK, DEPTH, STAGES, SPLIT, HAS_RESIDUAL, epilogue(), and the macros of packed.cuh.
#include "ptx.cuh"
#include "mma.cuh"
#include "generated.cuh"
#include "stream.cuh"
#include "packed.cuh"
#include "packed_sums.cuh"

struct Params {
    const u16* x;                                  // [rows][x_pitch], rows aligned to 16 bytes
    PackedWeights weights;
    const float* bias;
    const u16* residual;                           // shaped as the output
    u16* output;                                   // [rows][out_pitch], aligned to 8 bytes
    float4* partial;
    u32* arrived;
    int rows, columns, k, x_pitch, out_pitch;
};

constexpr int THREADS = WN * WK * 32, COLUMNS = WN * TILES * 16, ROWS = ROW_TILES * 8, FOURS = COLUMNS / 4;
constexpr int STAGE_K = WK * CHUNK_K, PITCH = STAGE_K * 2 + 16;    // bytes of a row: the eight rows of an ldmatrix are on different banks
constexpr int STAGE_BYTES = ROWS * PITCH, SUM_PITCH = COLUMNS + 4;

static_assert(THREADS % FOURS == 0, "a thread stores the same columns of some rows");

typedef float Sums[TILES][ROW_TILES][4];

// Copies rows of WK chunks into a stage, with zeros beyond K.
DEVICE void copy_stage(u32 target, const Params& p, int first_row, int first_chunk) {
    constexpr int VECTORS = STAGE_K / 8;
    const int rows = min(ROWS, p.rows - first_row);
    for (int i = threadIdx.x; i < rows * VECTORS; i += THREADS) {
        const int m = i / VECTORS, v = i % VECTORS, k = first_chunk * CHUNK_K + v * 8, bytes = max(0, min(16, (p.k - k) * 2));
        copy_16_or_zeros(target + m * PITCH + v * 16, bytes > 0 ? p.x + (long long)(first_row + m) * p.x_pitch + k : p.x, bytes);
    }
}

// Adds the products of a chunk of each tile. rows: address of the lane's 16 bytes for ldmatrix.
DEVICE void add_chunk(Sums& sums, const Chunk (&chunk)[TILES], u32 rows) {
    #pragma unroll
    for (int step = 0; step < STEPS; step += 2) {
        u32 a[2][TILES][4];
        #pragma unroll
        for (int n = 0; n < TILES; n++) unpack_operand(a[0][n], chunk[n], step), unpack_operand(a[1][n], chunk[n], step + 1);
        #pragma unroll
        for (int m = 0; m < ROW_TILES; m++) {
            u32 b[4];
            ldmatrix_x4(rows + m * 8 * PITCH + step * 32, b[0], b[1], b[2], b[3]);
            #pragma unroll
            for (int n = 0; n < TILES; n++) {
                multiply(sums[n][m], a[0][n], b[0], b[1]);
                multiply(sums[n][m], a[1][n], b[2], b[3]);
            }
        }
    }
}

// Adds the accumulators of all warps in shared memory, [ROWS][SUM_PITCH], in the order of the warp groups.
DEVICE void add_warps(float* shared, const Sums& sums, int group, int first_column, int lane) {
    for (int w = 0; w < WK; w++) {
        if (group == w) {
            #pragma unroll
            for (int n = 0; n < TILES; n++) {
                #pragma unroll
                for (int m = 0; m < ROW_TILES; m++) {
                    #pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float& at = shared[(m * 8 + lane % 4 * 2 + i % 2) * SUM_PITCH + first_column + n * 16 + lane / 4 + i / 2 * 8];
                        at = w ? at + sums[n][m][i] : sums[n][m][i];
                    }
                }
            }
        }
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) packed_mma(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 base = smem_address(shared);
    grid_launch_dependents();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / WN, part = blockIdx.y;
    const int first_tile = blockIdx.x * (WN * TILES) + warp % WN * TILES, tiles = (p.columns + 15) / 16, first_row = blockIdx.z * ROWS;
    const int begin = p.weights.chunks * part / SPLIT, end = p.weights.chunks * (part + 1) / SPLIT, steps = (end - begin + WK - 1) / WK;
    const Stream stream;
    Chunk ahead[DEPTH][TILES];
    auto load = [&](Chunk (&into)[TILES], int chunk) {
        #pragma unroll
        for (int n = 0; n < TILES; n++) into[n] = load_chunk(p.weights, stream, min(first_tile + n, tiles - 1), chunk, lane);
    };
    #pragma unroll
    for (int d = 0; d < DEPTH; d++)
        if (begin + group + d * WK < end) load(ahead[d], begin + group + d * WK);
    const int column = blockIdx.x * COLUMNS + threadIdx.x % FOURS * 4;
    const float4 bias = bias_of_four(p.bias, column, p.columns);
    grid_dependency_wait();

    Sums sums;
    #pragma unroll
    for (int n = 0; n < TILES; n++)
        #pragma unroll
        for (int i = 0; i < ROW_TILES * 4; i++) sums[n][i / 4][i % 4] = 0.0f;
    #pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < steps) copy_stage(base + s * STAGE_BYTES, p, first_row, begin + s * WK);
        copies_commit();
    }
    int stage = 0;
    for (int turn = 0; turn < steps; turn += DEPTH) {
        #pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            const int step = turn + d, chunk = begin + step * WK + group;
            if (step >= steps) break;
            copies_wait_but<STAGES - 2>();
            __syncthreads();                       // this step has landed for all threads; all have read the stage of the last step
            if (step + STAGES - 1 < steps)
                copy_stage(base + (stage ? stage - 1 : STAGES - 1) * STAGE_BYTES, p, first_row, begin + (step + STAGES - 1) * WK);
            copies_commit();
            const u32 rows = base + stage * STAGE_BYTES + lane % 8 * PITCH + lane / 8 * 16 + group * (CHUNK_K * 2);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            if (chunk >= end) continue;
            add_chunk(sums, ahead[d], rows);
            if (chunk + DEPTH * WK < end) load(ahead[d], chunk + DEPTH * WK);
        }
    }

    __syncthreads();                               // nobody reads the ring any more: accumulators take its place
    float* total = reinterpret_cast<float*>(shared);
    add_warps(total, sums, group, warp % WN * (TILES * 16), lane);
    const int count = min(ROWS, p.rows - first_row) * FOURS;
    const PartialSums<SPLIT, ROWS * FOURS> parts = {p.partial, p.arrived, blockIdx.z * gridDim.x + blockIdx.x};
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const float4 sum = *reinterpret_cast<const float4*>(total + i / FOURS * SUM_PITCH + i % FOURS * 4);
        if (SPLIT > 1)
            parts.put(part, i, sum);
        else
            store_four(p, first_row + i / FOURS, column, sum, bias);
    }
    if (SPLIT == 1) return;
    __threadfence();
    __syncthreads();                               // nobody reads the accumulators any more: their first word holds whether this block is the last
    if (!parts.is_last(reinterpret_cast<u32*>(shared), [] { __syncthreads(); })) return;
    for (int i = threadIdx.x; i < count; i += THREADS)
        store_four(p, first_row + i / FOURS, column, parts.sum(i), bias);
}
