// Two products in sequence with a vector of each image: the gate of squeeze-and-excitation, or a perceptron of few rows.
//
//   hidden[h] = round(between_one(sum_k first[h, k] x[k]))        out[c] = epilogue(sum_h second[c, h] hidden[h])
//
// ``blocks`` blocks take IMAGES images. Each block computes a share of the result. In a cluster it computes a share of the hidden vector and
// of the means, too, and sends them to the other blocks; otherwise it computes both by itself. Weights are operand A of mma.sync, in
// registers. They are loaded before the producer of the vectors has ended: no kernel writes weights. The columns of operand B are images.
// 16-bit operands, fp32 sums in a fixed order.
//
// A product's K is walked in chunks of 32. Lane t of four takes the elements 8 t .. 8 t + 7 of a chunk, of weights and vectors alike.
//
// POOL: the vectors hold the means of images' channels, computed from the sums of the images' tiles, which the previous kernel has written.
//
// generated.cuh defines
//   WARPS, IMAGES (a power of two, at most 8), CLUSTER (1: blocks exchange nothing)
//   DEPTH (a multiple of 8), HIDDEN, CHANNELS, FLOAT_RESULT (results are fp32)
//   ROWS, COLUMNS: rows of the hidden vector, and columns of the result, per block; multiples of 16
//   FIRST_PARTS, SECOND_PARTS: warps that share the K of a tile of 16 rows
//   FIRST_CHUNKS, SECOND_CHUNKS, SECOND_TILES: most chunks and tiles of a warp
//   POOL, OWN (channels whose means a block computes, a multiple of 8), LINES (threads that add up the sums of a channel), AHEAD (loads
//   that each has in flight)
//   between_one(), epilogue() and multiply()
#include "vectors.cuh"
#include "mma.cuh"
#include "generated.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int DEPTH_CHUNKS = (DEPTH + 31) / 32, HIDDEN_CHUNKS = (HIDDEN + 31) / 32;
constexpr int X_PITCH = (DEPTH_CHUNKS | 1) * 32, HIDDEN_PITCH = (HIDDEN_CHUNKS | 1) * 32;     // lanes of a warp read different banks
constexpr int WHOLE = (HIDDEN + 15) / 16 * 16, SECOND_PITCH = (HIDDEN + 7) / 8 * 8;

#if FLOAT_RESULT
typedef float Result;
DEVICE Result result_of(float v) { return v; }
#else
typedef u16 Result;
DEVICE Result result_of(float v) { return pack1(v); }
#endif

struct Params {
    const void* x;                                 // [images][x_pitch]; POOL: [images][tiles][x_pitch] in fp32
    const u16* first;                              // [HIDDEN][DEPTH]
    const float* first_bias;                       // [HIDDEN]
    const u16* second;                             // [CHANNELS][SECOND_PITCH]
    const float* second_bias;                      // [CHANNELS]
    Result* output;                                // [images][out_pitch]
    int images, blocks, x_pitch, out_pitch;
    int tiles;                                     // POOL: sums per channel
    float factor;                                  // sum * factor is the mean
};

// A warp's part of a matrix, of which PARTS warps share the K of a tile: rows lane / 4 and lane / 4 + 8 of its tiles.
template <int PARTS_, int TILES_, int CHUNKS_> struct Part {
    static constexpr int PARTS = PARTS_, TILES = TILES_, CHUNKS = CHUNKS_;
    uint4 low[TILES][CHUNKS], high[TILES][CHUNKS];
};
template <int PARTS> DEVICE int tile_of(int warp, int i) { return warp / PARTS + i * (WARPS / PARTS); }

DEVICE uint4 load_row(const u16* weights, int row, int rows, int pitch, int k) {
    return row < rows && k < pitch ? __ldg(reinterpret_cast<const uint4*>(weights + row * pitch + k)) : make_uint4(0, 0, 0, 0);
}
template <class Own> DEVICE void load_weights(Own& own, const u16* weights, int rows, int pitch, int warp, int lane) {
    #pragma unroll
    for (int i = 0; i < Own::TILES; i++) {
        #pragma unroll
        for (int c = 0; c < Own::CHUNKS; c++) {
            const int row = tile_of<Own::PARTS>(warp, i) * 16 + lane / 4, k = (warp % Own::PARTS * Own::CHUNKS + c) * 32 + lane % 4 * 8;
            own.low[i][c] = load_row(weights, row, rows, pitch, k), own.high[i][c] = load_row(weights, row + 8, rows, pitch, k);
        }
    }
}

// The products with ``vectors``, [IMAGES][pitch] in shared memory, of ``chunks`` chunks: ``take(row, image, sum)`` for the sums of this lane.
// Rows count from the block's first one.
template <class Own, class Take> DEVICE void multiply_vectors(const Own& own, const u16* vectors, int pitch, int chunks, int warp, int lane, const Take& take) {
    constexpr int SETS = Own::TILES > 1 ? 2 : 4;   // successive products do not wait for each other
    float acc[Own::TILES][SETS][4] = {};
    #pragma unroll
    for (int c = 0; c < Own::CHUNKS; c++) {
        const int chunk = warp % Own::PARTS * Own::CHUNKS + c;
        if (chunk >= chunks) break;
        const Packed<8> v = load_packed<8>(vectors + lane / 4 % IMAGES * pitch + chunk * 32 + lane % 4 * 8);
        #pragma unroll
        for (int i = 0; i < Own::TILES; i++) {
            const uint4 a = own.low[i][c], b = own.high[i][c];
            multiply(acc[i][2 * c % SETS], {a.x, b.x, a.y, b.y}, v.word[0], v.word[1]);
            multiply(acc[i][(2 * c + 1) % SETS], {a.z, b.z, a.w, b.w}, v.word[2], v.word[3]);
        }
    }
    #pragma unroll
    for (int i = 0; i < Own::TILES; i++) {
        float sum[4];
        #pragma unroll
        for (int j = 0; j < 4; j++) {
            sum[j] = acc[i][0][j] + acc[i][1][j];
            if (SETS == 4) sum[j] += acc[i][2 % SETS][j] + acc[i][3 % SETS][j];
        }
        const int row = tile_of<Own::PARTS>(warp, i) * 16 + lane / 4, column = lane % 4 * 2;
#if IMAGES == 1                                    // all columns are equal
        if (column < 4) take(row + column * 4, 0, column == 0 ? sum[0] : sum[2]);
#else
        #pragma unroll
        for (int j = 0; j < 4; j++)
            if (column + j % 2 < IMAGES) take(row + j / 2 * 8, column + j % 2, sum[j]);
#endif
    }
}

// The sum of COUNT numbers, ``step`` apart.
template <int COUNT> DEVICE float sum_of(const float* from, int step) {
    float sum[4] = {};
    #pragma unroll
    for (int i = 0; i < COUNT; i++) sum[i % 4] += from[i * step];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// Eight channels of the sums of a tile.
struct Eight {
    float4 low, high;
};
DEVICE Eight load_eight(const float* from) {
    return {reinterpret_cast<const float4*>(from)[0], reinterpret_cast<const float4*>(from)[1]};
}
DEVICE void add_eight(float (&sum)[8], const Eight& v) {
    sum[0] += v.low.x, sum[1] += v.low.y, sum[2] += v.low.z, sum[3] += v.low.w;
    sum[4] += v.high.x, sum[5] += v.high.y, sum[6] += v.high.z, sum[7] += v.high.w;
}

// Stores a pair of means of this block, or sends it to all blocks of the cluster.
DEVICE void put_means(u16* at, u32 pair, u32 met) {
#if CLUSTER > 1
    for (int to = 0; to < CLUSTER; to++) cluster_send(smem_address(at), met, to, pair);
#else
    *reinterpret_cast<u32*>(at) = pair;
#endif
}

// Means of images from ``first`` on, of the channels from ``begin`` on that the block computes. A thread takes the sums of eight channels of
// tiles that are LINES apart, AHEAD at a time. ``partial``: eight floats per thread. ``met`` counts means from all blocks.
DEVICE void load_means(const Params& p, int first, int begin, u16* x, float* partial, u32 met) {
    constexpr int VECTORS = OWN / 8, ALL = IMAGES * VECTORS, WIDTH = ALL < THREADS ? ALL : THREADS;
    static_assert(LINES * WIDTH <= THREADS, "a thread has one line");
    const int line = threadIdx.x / WIDTH;
#if CLUSTER > 1
    if (LINES == 1) cluster_wait();                // the peers run and their barriers are initialized: their shared memory may be written
#endif
    for (int v = threadIdx.x % WIDTH; v < ALL && line < LINES; v += WIDTH) {
        const int image = v / VECTORS, channel = begin + v % VECTORS * 8;
        if (channel >= DEPTH) continue;
        const float* const from = static_cast<const float*>(p.x) + (long long)min(first + image, p.images - 1) * p.tiles * p.x_pitch + channel;
        float sum[8] = {};
        for (int t = line; t < p.tiles; t += AHEAD * LINES) {
            Eight next[AHEAD];
            #pragma unroll
            for (int k = 0; k < AHEAD; k++) next[k] = load_eight(from + min(t + k * LINES, p.tiles - 1) * p.x_pitch);
            #pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                if (t + k * LINES >= p.tiles) break;
                add_eight(sum, next[k]);
            }
        }
        if (LINES > 1) {
            #pragma unroll
            for (int i = 0; i < 8; i++) partial[(line * ALL + v) * 8 + i] = sum[i];
        } else {
            #pragma unroll
            for (int i = 0; i < 8; i += 2) put_means(x + image * X_PITCH + channel + i, pack2(sum[i] * p.factor, sum[i + 1] * p.factor), met);
        }
    }
    if (LINES == 1) return;
    __syncthreads();
#if CLUSTER > 1
    cluster_wait();
#endif
    for (int c = threadIdx.x; c < ALL * 4; c += THREADS) {
        const int image = c * 2 / OWN, channel = begin + c * 2 % OWN;
        const float low = sum_of<LINES>(partial + c * 2, ALL * 8), high = sum_of<LINES>(partial + c * 2 + 1, ALL * 8);
        if (channel < DEPTH) put_means(x + image * X_PITCH + channel, pack2(low * p.factor, high * p.factor), met);
    }
}

DEVICE void load_vectors(const Params& p, int first, u16* x) {
    constexpr int VECTORS = DEPTH / 8;
    for (int v = threadIdx.x; v < IMAGES * VECTORS; v += THREADS) {
        const int image = v / VECTORS, channel = v % VECTORS * 8;
        const u16* const from = static_cast<const u16*>(p.x) + (long long)min(first + image, p.images - 1) * p.x_pitch + channel;
        store_packed<8>(x + image * X_PITCH + channel, load_packed<8>(from));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) gemv_pair(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) u8 shared[];
    const u32 met = smem_address(shared), means_met = met + 8;                    // barriers that count bytes from all blocks
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % p.blocks, image = blockIdx.x / p.blocks * IMAGES;
    u16* const x = reinterpret_cast<u16*>(shared + 16);
    u16* const hidden = x + IMAGES * X_PITCH;
    float* const first_bias = reinterpret_cast<float*>(hidden + IMAGES * HIDDEN_PITCH);
    float* const second_bias = first_bias + ROWS;
    float* const partial = second_bias + COLUMNS;
#if CLUSTER > 1
    if (threadIdx.x == 0) {
        barrier_init(met, 1);
        barrier_init(means_met, 1);
        barrier_init_fence();
    }
    cluster_arrive_relaxed();
#endif
    grid_launch_dependents();
    const int row = CLUSTER > 1 ? rank * ROWS : 0, rows = min(HIDDEN - row, ROWS);             // none, or fewer, for the last blocks
    const int column = rank * COLUMNS, columns = min(CHANNELS - column, COLUMNS);
    Part<FIRST_PARTS, 1, FIRST_CHUNKS> first;
    Part<SECOND_PARTS, SECOND_TILES, SECOND_CHUNKS> second;
    load_weights(first, p.first + row * DEPTH, rows, DEPTH, warp, lane);
    load_weights(second, p.second + column * SECOND_PITCH, columns, SECOND_PITCH, warp, lane);
    for (int i = threadIdx.x; i < ROWS; i += THREADS) first_bias[i] = i < rows ? __ldg(p.first_bias + row + i) : 0.0f;
    for (int i = threadIdx.x; i < COLUMNS; i += THREADS) second_bias[i] = i < columns ? __ldg(p.second_bias + column + i) : 0.0f;
    for (int i = threadIdx.x; i < IMAGES * 32; i += THREADS) {                    // the ends of vectors
        const int k = DEPTH_CHUNKS * 32 - 32 + i % 32, h = HIDDEN_CHUNKS * 32 - 32 + i % 32;
        if (k >= DEPTH) x[i / 32 * X_PITCH + k] = 0;
        if (h >= WHOLE) hidden[i / 32 * HIDDEN_PITCH + h] = 0;
    }
    grid_dependency_wait();
#if POOL
    load_means(p, image, CLUSTER > 1 ? rank * OWN : 0, x, partial, means_met);
#else
    load_vectors(p, image, x);
#endif
#if POOL && CLUSTER > 1
    if (threadIdx.x == 0) barrier_expect(means_met, 2 * IMAGES * DEPTH);
    barrier_wait_cluster(means_met, 0);
#endif
    __syncthreads();

    auto hidden_of = [&](int r, float sum) { return r < rows ? pack1(between_one(sum, first_bias[r], 0.0f)) : u16(0); };
#if CLUSTER == 1 && FIRST_PARTS == 1
    multiply_vectors(first, x, X_PITCH, DEPTH_CHUNKS, warp, lane, [&](int r, int n, float v) {
        if (r < ROWS) hidden[n * HIDDEN_PITCH + r] = hidden_of(r, v);
    });
#else
    multiply_vectors(first, x, X_PITCH, DEPTH_CHUNKS, warp, lane, [&](int r, int n, float v) {
        if (r < ROWS) partial[(warp % FIRST_PARTS * IMAGES + n) * ROWS + r] = v;
    });
#if CLUSTER > 1
    if (threadIdx.x == 0) barrier_expect(met, 2 * IMAGES * WHOLE);
    if (!POOL) cluster_wait();                     // as in load_means()
#endif
    __syncthreads();
    for (int begin = 0; begin < IMAGES * ROWS; begin += THREADS) {
        const int i = min(begin + int(threadIdx.x), IMAGES * ROWS - 1), n = i / ROWS, r = i % ROWS;
        const u16 y = hidden_of(r, sum_of<FIRST_PARTS>(partial + i, IMAGES * ROWS));
        u16* const at = hidden + n * HIDDEN_PITCH + row + r;
#if CLUSTER > 1
        const u32 pair = y | __shfl_xor_sync(0xffffffffu, u32(y), 1) << 16;
        if (i == begin + int(threadIdx.x) && lane % 2 == 0 && row + r < WHOLE)
            for (int to = 0; to < CLUSTER; to++) cluster_send(smem_address(at), met, to, pair);
#else
        *at = y;
#endif
    }
#endif
#if CLUSTER > 1
    barrier_wait_cluster(met, 0);
#endif
    __syncthreads();

    auto store = [&](int c, int n, float v) {
        if (c < columns && image + n < p.images) p.output[(long long)(image + n) * p.out_pitch + column + c] = result_of(epilogue(v, second_bias[c], 0.0f));
    };
#if SECOND_PARTS == 1
    multiply_vectors(second, hidden, HIDDEN_PITCH, HIDDEN_CHUNKS, warp, lane, store);
#else
    multiply_vectors(second, hidden, HIDDEN_PITCH, HIDDEN_CHUNKS, warp, lane, [&](int c, int n, float v) {
        if (c < COLUMNS) partial[(warp % SECOND_PARTS * IMAGES + n) * COLUMNS + c] = v;
    });
    __syncthreads();
    for (int i = threadIdx.x; i < IMAGES * COLUMNS; i += THREADS)
        store(i % COLUMNS, i / COLUMNS, sum_of<SECOND_PARTS>(partial + i, IMAGES * COLUMNS));
#endif
}
