// Sums, means or norms of the channels of channels-last images, 16-bit. fp32 sums in a fixed order.
//
// A cluster of CLUSTER blocks takes CHANNELS channels of an image, each block a share of its pixels. THREADS take vectors of eight channels,
// LINES pixels apart, AHEAD at a time. Warps add by shuffles, and the first block of the cluster adds the sums of all blocks.
//
// generated.cuh defines CLUSTER, THREADS, CHANNELS (a power of two from 32 on), AHEAD, SQUARES (1: of the elements' squares), ROOT (1: the root of the result)
// and NARROW (1: the result is quantized to integers, 2: to fp8).
#include "vectors.cuh"
#include "generated.cuh"
#include "narrow.cuh"
#if CLUSTER > 1
#include "ptx.cuh"
#endif

constexpr int VECTORS = CHANNELS / 8, LINES = THREADS / VECTORS, WARPS = THREADS / 32;

struct Params {
    const u16* x;                                  // [images][pixels][pitch]
    void* output;                                  // [images][row], u16, or bytes
    int channels, pixels, share, pitch, row;       // share: pixels per block; channels: a multiple of 8; row: at least as many
    float factor;                                  // of the sum
    Narrow narrow;
};

__shared__ float partial[WARPS][CHANNELS];
__shared__ float gathered[CLUSTER][CHANNELS];
__shared__ u64 met;                                // barrier of the first block, which counts the bytes of all sums

extern "C" __global__ void __launch_bounds__(THREADS) means(const __grid_constant__ Params p) {
    grid_launch_dependents();
    const int rank = blockIdx.x % CLUSTER, slab = blockIdx.x / CLUSTER * CHANNELS, image = blockIdx.y;
    const int vector = threadIdx.x % VECTORS, line = threadIdx.x / VECTORS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int end = min(p.pixels, (rank + 1) * p.share), channel = slab + vector * 8;
    const u16* x = p.x + (long long)image * p.pixels * p.pitch + channel;
#if CLUSTER > 1
    if (threadIdx.x == 0) {
        barrier_init(smem_address(&met), 1);
        barrier_init_fence();
        if (rank == 0) barrier_expect(smem_address(&met), CLUSTER * CHANNELS * 4);
    }
    cluster_arrive_relaxed();
#endif
    grid_dependency_wait();
    float sum[8];
    #pragma unroll
    for (int i = 0; i < 8; i++) sum[i] = 0.0f;
    for (int first = rank * p.share + line; first < end && channel < p.channels; first += AHEAD * LINES) {
        Packed<8> v[AHEAD];
        #pragma unroll
        for (int k = 0; k < AHEAD; k++) v[k] = load_packed<8>(x + (long long)min(first + k * LINES, end - 1) * p.pitch);
        #pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            if (first + k * LINES >= end) break;
            #pragma unroll
            for (int i = 0; i < 8; i++) sum[i] += SQUARES ? element(v[k], i) * element(v[k], i) : element(v[k], i);
        }
    }
    #pragma unroll
    for (int distance = 16; distance >= VECTORS; distance /= 2) {
        #pragma unroll
        for (int i = 0; i < 8; i++) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], distance);
    }
    #pragma unroll
    for (int i = 0; i < 8; i++)
        if (lane < VECTORS) partial[warp][lane * 8 + i] = sum[i];
    __syncthreads();
    const int own = min(int(threadIdx.x), CHANNELS - 1);
    float total = 0.0f;
    #pragma unroll
    for (int w = 0; w < WARPS; w++) total += partial[w][own];
#if CLUSTER > 1
    cluster_wait();                                // the first block runs and its barrier is initialized: its shared memory may be written
    if (threadIdx.x < CHANNELS) cluster_send(smem_address(&gathered[rank][own]), smem_address(&met), 0, __float_as_uint(total));
    if (rank) return;
    barrier_wait_cluster(smem_address(&met), 0);
    total = 0.0f;
    #pragma unroll
    for (int r = 0; r < CLUSTER; r++) total += gathered[r][own];
#endif
    total *= p.factor;
    if (threadIdx.x >= CHANNELS || slab + own >= p.channels) return;
    const long long at = (long long)image * p.row + slab + own;
    const u16 result = pack1(ROOT ? sqrtf(total) : total);
    if (NARROW) static_cast<u8*>(p.output)[at] = u8(narrow_four<NARROW == 2>(p.narrow, unpack1(result), 0.0f, 0.0f, 0.0f));
    else static_cast<u16*>(p.output)[at] = result;
}
