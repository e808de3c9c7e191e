// The mean of an image's pixels, then its product with a matrix: the end of a classifier at batch 1. 16-bit operands, fp32 sums.
//
//   out[n, column] = epilogue(sum_k mean over pixels(x[n, pixel, k]) * weights[column, k])
//
// Each block of a cluster sums a share of the channels and sends their means to all of its peers (st.async, counted by the receiver's
// barrier); then every block has the whole row, and multiplies it with COLUMNS columns, whose weights it has read before
// griddepcontrol.wait: they depend on no other kernel. Sums are formed in a fixed order. grid.x: blocks of a whole number of clusters;
// grid.y: images.
//
// generated.cuh defines CHANNELS (a multiple of 8), PIXELS, COLUMNS, WARPS, CLUSTER and epilogue().
#include "vectors.cuh"
#include "generated.cuh"

struct Params {
    const u16* x;                                  // [n][PIXELS] rows of pixel_pitch elements
    const u16* weights;                            // [columns][CHANNELS]
    const float* bias;
    u16* output;                                // [n][out_pitch]
    long long image_pitch;                         // elements
    int pixel_pitch, columns, out_pitch;
};

constexpr int THREADS = WARPS * 32, VECTORS = CHANNELS / 8;
constexpr int SHARE = (VECTORS + CLUSTER - 1) / CLUSTER;             // vectors of a block, at most
constexpr int GROUPS = THREADS / SHARE;                              // of threads, which share the pixels
constexpr int BATCH = PIXELS < 8 * GROUPS ? (PIXELS + GROUPS - 1) / GROUPS : 8;   // pixels of a thread in flight
constexpr int QUADS = SHARE * 2, SENDERS = THREADS / QUADS;          // four channels each; how many peers are sent to at a time
constexpr int STEPS = (VECTORS + THREADS - 1) / THREADS;             // vectors of a row that a thread multiplies
static_assert(QUADS <= THREADS, "a thread sends four channels at least");

DEVICE uint4 stream(const u16* at) {               // read once
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_gemv(const __grid_constant__ Params p) {
    __shared__ alignas(16) float partial[GROUPS][SHARE * 8];
    __shared__ alignas(16) float means[CHANNELS];
    __shared__ float sums[WARPS][COLUMNS];
    __shared__ alignas(8) u64 barrier;
    const int rank = int(cluster_rank()), thread = threadIdx.x, first = blockIdx.x * COLUMNS;
    const u32 arrived = smem_address(&barrier);
    if (thread == 0) {
        barrier_init(arrived, 1);
        barrier_init_fence();
        barrier_expect(arrived, CHANNELS * 4);
    }
    __syncthreads();
    cluster_arrive();                              // this block's barrier counts
    grid_launch_dependents();

    uint4 w[STEPS][COLUMNS];
    #pragma unroll
    for (int s = 0; s < STEPS; s++) {
        const int vector = s * THREADS + thread;
        #pragma unroll
        for (int c = 0; c < COLUMNS; c++)
            w[s][c] = vector < VECTORS ? stream(p.weights + (long long)min(first + c, p.columns - 1) * CHANNELS + vector * 8)
                                       : make_uint4(0u, 0u, 0u, 0u);
    }
    const float bias = thread < COLUMNS && first + thread < p.columns ? p.bias[first + thread] : 0.0f;
    const int begin = VECTORS * rank / CLUSTER, count = VECTORS * (rank + 1) / CLUSTER - begin;
    const int vector = thread % SHARE, group = thread / SHARE;
    const u16* image = p.x + blockIdx.y * p.image_pitch + (begin + vector) * 8;
    grid_dependency_wait();

    if (group < GROUPS && vector < count) {
        float total[8] = {};
        #pragma unroll 1
        for (int pixel = group; pixel < PIXELS; pixel += GROUPS * BATCH) {
            Packed<8> v[BATCH] = {};
            #pragma unroll
            for (int k = 0; k < BATCH; k++)
                if (pixel + k * GROUPS < PIXELS) v[k] = load_packed<8>(image + (long long)(pixel + k * GROUPS) * p.pixel_pitch);
            #pragma unroll
            for (int k = 0; k < BATCH; k++) {
                #pragma unroll
                for (int i = 0; i < 8; i++) total[i] += element(v[k], i);
            }
        }
        float4* to = reinterpret_cast<float4*>(&partial[group][vector * 8]);
        to[0] = make_float4(total[0], total[1], total[2], total[3]);
        to[1] = make_float4(total[4], total[5], total[6], total[7]);
    }
    __syncthreads();
    cluster_wait();                                // the peers' barriers count, too
    const int quad = thread % QUADS;
    if (quad < count * 2 && thread < SENDERS * QUADS) {
        float mean[4] = {};
        #pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const float4 v = *reinterpret_cast<const float4*>(&partial[g][quad * 4]);
            mean[0] += v.x, mean[1] += v.y, mean[2] += v.z, mean[3] += v.w;
        }
        #pragma unroll
        for (int i = 0; i < 4; i++) mean[i] *= 1.0f / PIXELS;
        const u32 place = smem_address(means + begin * 8 + quad * 4);
        #pragma unroll
        for (int to = thread / QUADS; to < CLUSTER; to += SENDERS)
            cluster_store_async(cluster_map(place, to), cluster_map(arrived, to), mean);
    }
    barrier_wait_cluster(arrived, 0);

    float sum[COLUMNS] = {};
    #pragma unroll
    for (int s = 0; s < STEPS; s++) {
        const int at = min(s * THREADS + thread, VECTORS - 1) * 8;   // beyond the row: weights of zero
        const float4 a = *reinterpret_cast<const float4*>(means + at), b = *reinterpret_cast<const float4*>(means + at + 4);
        #pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            const uint4 v = w[s][c];
            float t = sum[c];
            t = fmaf(low_float(v.x), a.x, t), t = fmaf(high_float(v.x), a.y, t), t = fmaf(low_float(v.y), a.z, t);
            t = fmaf(high_float(v.y), a.w, t), t = fmaf(low_float(v.z), b.x, t), t = fmaf(high_float(v.z), b.y, t);
            t = fmaf(low_float(v.w), b.z, t), t = fmaf(high_float(v.w), b.w, t);
            sum[c] = t;
        }
    }
    #pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        #pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) sum[c] += __shfl_xor_sync(0xffffffffu, sum[c], offset);
        if (thread % 32 == 0) sums[thread / 32][c] = sum[c];
    }
    __syncthreads();
    if (thread >= COLUMNS || first + thread >= p.columns) return;
    float total = 0.0f;
    #pragma unroll
    for (int i = 0; i < WARPS; i++) total += sums[i][thread];
    p.output[(long long)blockIdx.y * p.out_pitch + first + thread] = pack1(epilogue(total, bias, 0.0f));
}
