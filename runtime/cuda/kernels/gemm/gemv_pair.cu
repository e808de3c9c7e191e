// Two products in sequence with a vector of each image: the gate of squeeze-and-excitation.
//
//   hidden[h] = round(between_one(sum_k first[h, k] x[k]))        out[c] = epilogue(sum_h second[c, h] hidden[h])
//
// A cluster of CLUSTER blocks takes an image. Each block computes a share of the hidden vector and sends it to all blocks, then computes a
// share of the result. Both shares of the weights are loaded into shared memory before the producer of the vectors has ended: no kernel
// writes weights. 16-bit operands, fp32 sums in a fixed order.
//
// POOL: the vector holds the means of an image's channels. Each block computes a share of them, from the sums of the image's tiles, which
// the previous kernel has written.
//
// generated.cuh defines CLUSTER, WARPS, PART (lanes that share a sum of the second product), POOL, between_one() and epilogue().
#include "vectors.cuh"
#include "mma.cuh"
#include "generated.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int AHEAD = 8;

struct Params {
    const void* x;                                 // [images][x_pitch]; POOL: [images][tiles][x_pitch] in fp32
    const u16* first;                              // [hidden][depth]
    const float* first_bias;                       // [hidden]
    const u16* second;                             // [channels][hidden]
    const float* second_bias;                      // [channels]
    u16* output;                                   // [images][out_pitch]
    int depth, hidden, channels;                   // depth and hidden: multiples of 8
    int rows, columns;                             // rows of the hidden vector, and columns of the result, per block
    int x_pitch, out_pitch;
    int tiles, share;                              // POOL: tiles; channels whose means a block computes, a multiple of 8
    float factor;                                  // sum * factor is the mean
};

DEVICE void copy(u16* to, const u16* from, int elements) {
    for (int i = threadIdx.x * 8; i < elements; i += THREADS * 8) copy_16_or_zeros(smem_address(to + i), from + i, 16);
}
DEVICE void add_products(float& sum, const u16* a, const u16* b) {
    const Packed<8> v = load_packed<8>(a), w = load_packed<8>(b);
    #pragma unroll
    for (int i = 0; i < 8; i++) sum = fmaf(element(v, i), element(w, i), sum);
}

// Waits until all blocks of the cluster have sent their shares.
DEVICE void meet(u32 barrier) {
#if CLUSTER > 1
    barrier_wait_cluster(barrier, 0);
#else
    __syncthreads();
#endif
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

// The sums of ``share`` channels from ``image`` on; the image has ``channels``. Each of the first ``share`` threads returns one sum. A thread
// takes vectors of tiles that are ``lines`` tiles apart, AHEAD at a time; ``partial``: 8 floats per thread.
DEVICE float channel_sum(const Params& p, const float* image, int channels, float* partial) {
    const int vectors = p.share / 8, lines = THREADS / vectors, vector = threadIdx.x % vectors, line = threadIdx.x / vectors;
    float sum[8];
    #pragma unroll
    for (int i = 0; i < 8; i++) sum[i] = 0.0f;
    if (line < lines && vector * 8 < channels) {
        for (int begin = line; begin < p.tiles; begin += AHEAD * lines) {
            Eight v[AHEAD];
            #pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                const int tile = begin + k * lines;
                v[k] = load_eight(image + (long long)min(tile, p.tiles - 1) * p.x_pitch + vector * 8);
            }
            #pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                if (begin + k * lines >= p.tiles) break;
                add_eight(sum, v[k]);
            }
        }
    }
    if (line < lines) {
        #pragma unroll
        for (int i = 0; i < 8; i++) partial[line * p.share + vector * 8 + i] = sum[i];
    }
    __syncthreads();
    // Several threads add the lines of a channel; then the first of them adds their sums.
    const int channel = threadIdx.x % p.share, first = threadIdx.x / p.share, step = THREADS / p.share;
    float total = 0.0f;
    for (int l = first; l < lines && first < step; l += step) total += partial[l * p.share + channel];
    __syncthreads();
    if (first < step) partial[first * p.share + channel] = total;
    __syncthreads();
    total = 0.0f;
    for (int l = 0; l < step && first == 0; l++) total += partial[l * p.share + channel];
    return total;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) gemv_pair(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) u8 shared[];
    const u32 means_met = smem_address(shared), hidden_met = means_met + 8;      // barriers that count bytes from all blocks
#if CLUSTER > 1
    const int rank = int(cluster_rank());
    if (threadIdx.x == 0) {
        barrier_init(means_met, 1);
        barrier_init(hidden_met, 1);
        barrier_init_fence();
        if (POOL) barrier_expect(means_met, 2 * p.depth);
        barrier_expect(hidden_met, 4 * p.hidden);
    }
    cluster_arrive_relaxed();
#else
    const int rank = 0;
#endif
    grid_launch_dependents();
    const int image = blockIdx.x / CLUSTER, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = rank * p.rows, rows = min(p.rows, p.hidden - row);             // none, or fewer, for the last blocks
    const int column = rank * p.columns, columns = min(p.columns, p.channels - column);
    float* hidden = reinterpret_cast<float*>(shared + 16);                         // [p.hidden], from all blocks
    u16* x = reinterpret_cast<u16*>(hidden + p.hidden);
    u16* first = x + p.depth;
    u16* second = first + p.rows * p.depth;
    float* first_bias = reinterpret_cast<float*>(second + p.columns * p.hidden);
    float* second_bias = first_bias + p.rows;
    copy(first, p.first + (long long)row * p.depth, rows * p.depth);
    copy(second, p.second + (long long)column * p.hidden, columns * p.hidden);
    for (int i = threadIdx.x; i < rows; i += THREADS) first_bias[i] = __ldg(p.first_bias + row + i);
    for (int i = threadIdx.x; i < columns; i += THREADS) second_bias[i] = __ldg(p.second_bias + column + i);
    grid_dependency_wait();
#if POOL
    float* partial = second_bias + (p.columns + 3) / 4 * 4;
    const int channel = rank * p.share, own = max(0, min(p.share, p.depth - channel));
    const float* const own_image = static_cast<const float*>(p.x) + (long long)image * p.tiles * p.x_pitch;
    const float total = channel_sum(p, own_image + channel, own, partial);
#else
    copy(x, static_cast<const u16*>(p.x) + (long long)image * p.x_pitch, p.depth);
#endif
    copies_commit();
    copies_wait_but<0>();
    __syncthreads();
#if CLUSTER > 1
    cluster_wait();                                // the peers run and their barriers are initialized: their shared memory may be written
#endif
#if POOL
    const u16 mean = pack1(total * p.factor);
#if CLUSTER > 1
    const u32 pair = mean | __shfl_down_sync(0xffffffffu, u32(mean), 1) << 16;     // ``own`` is even
    if (int(threadIdx.x) < own && lane % 2 == 0)
        for (int r = 0; r < CLUSTER; r++) cluster_send(smem_address(x + channel + threadIdx.x), means_met, r, pair);
#else
    if (int(threadIdx.x) < own) x[channel + threadIdx.x] = mean;
#endif
    meet(means_met);
#endif
    for (int r = warp; r < rows; r += WARPS) {
        float sum = 0.0f;
        for (int k = lane * 8; k < p.depth; k += 256) add_products(sum, x + k, first + r * p.depth + k);
        #pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
        const float y = unpack1(pack1(between_one(sum, first_bias[r], 0.0f)));
#if CLUSTER > 1
        if (lane < CLUSTER) cluster_send(smem_address(hidden + row + r), hidden_met, lane, __float_as_uint(y));
#else
        if (lane == 0) hidden[row + r] = y;
#endif
    }
    meet(hidden_met);
    for (int begin = 0; begin < columns; begin += THREADS / PART) {
        const int c = begin + int(threadIdx.x) / PART;
        float sum = 0.0f;
        for (int k = lane % PART * 8; k < p.hidden && c < columns; k += PART * 8) {
            const Packed<8> w = load_packed<8>(second + c * p.hidden + k);
            #pragma unroll
            for (int i = 0; i < 8; i++) sum = fmaf(element(w, i), hidden[k + i], sum);
        }
        #pragma unroll
        for (int mask = PART / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
        if (lane % PART == 0 && c < columns)
            p.output[(long long)image * p.out_pitch + column + c] = pack1(epilogue(sum, second_bias[c], 0.0f));
    }
}
