// GroupNorm and InstanceNorm, NHWC, 16-bit storage, fp32 statistics; the input is read once.
//
// A cluster of CLUSTER blocks (one before Hopper) takes a slab of channels (whole groups, whole vectors) of one image; each block
// keeps its share of the pixels in shared memory. Sums over a block are added in a fixed order, those of a cluster's blocks in rank
// order: mean first, then the squared deviations from it.
//
// generated.cuh defines LANES (channels per access), THREADS, CLUSTER and epilogue().
#include "vectors.cuh"
#include "generated.cuh"

struct Params {
    const u16* input;
    u16* output;
    const float* scale;                            // [channels]
    const float* bias;                             // [channels]
    const u16* added;                              // a vector of channels, added to each pixel of an image; may be null
    int pixels, slab, group;                       // slab: channels per cluster, group: channels per group
    int input_pitch, output_pitch;                 // elements from a pixel to the next
    int added_pitch;                               // elements from the vector of an image to that of the next
    float inverse_count, epsilon;
};

#if CLUSTER > 1
DEVICE void cluster_put(u32 address, float v) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS) group_norm(const Params p) {
    extern __shared__ __align__(16) u8 shared[];
    grid_launch_dependents();
#if CLUSTER > 1
    const int rank = int(cluster_rank());
#else
    const int rank = 0;
#endif
    const int slab = blockIdx.x / CLUSTER, n = blockIdx.y, first_channel = slab * p.slab;
    const int vectors = p.slab / LANES, lines = THREADS / vectors, groups = p.slab / p.group;
    const int vector = threadIdx.x % vectors, line = threadIdx.x / vectors;      // threads past lines * vectors only help to reduce
    const int from = p.pixels * rank / CLUSTER, to = p.pixels * (rank + 1) / CLUSTER;
    const bool live = line < lines;
    float* partial = reinterpret_cast<float*>(shared);                           // [lines][slab]
    float* totals = partial + lines * p.slab;                                    // [2][CLUSTER][groups]
    float* moments = totals + 2 * CLUSTER * groups;                              // [2][groups]
    u16* data = reinterpret_cast<u16*>(shared + ((lines * p.slab + (2 * CLUSTER + 2) * groups) * 4 + 15) / 16 * 16);
    const u16* input = p.input + (long long)n * p.pixels * p.input_pitch + first_channel + vector * LANES;
    u16* output = p.output + (long long)n * p.pixels * p.output_pitch + first_channel + vector * LANES;
    float scale[LANES], bias[LANES];
    if (live) {
        load_floats<LANES>(scale, p.scale + first_channel + vector * LANES);
        load_floats<LANES>(bias, p.bias + first_channel + vector * LANES);
    }
#if CLUSTER > 1
    cluster_arrive();
#endif
    grid_dependency_wait();
#if CLUSTER > 1
    cluster_wait();                                // the peers run: their shared memory may be written
#endif

    float sum[LANES], mean[LANES], factor[LANES], added[LANES];                  // mean: of the pixels as they are read
    #pragma unroll
    for (int i = 0; i < LANES; i++) sum[i] = mean[i] = added[i] = 0.0f;
    if (live && p.added) {
        const Packed<LANES> v =
            load_packed<LANES>(p.added + (long long)n * p.added_pitch + first_channel + vector * LANES);
        #pragma unroll
        for (int i = 0; i < LANES; i++) added[i] = element(v, i);
    }
    if (live) {
        #pragma unroll 8
        for (int pixel = from + line; pixel < to; pixel += lines) {
            const Packed<LANES> v = load_packed<LANES>(input + (long long)pixel * p.input_pitch);
            store_packed(data + ((pixel - from) * vectors + vector) * LANES, v);
            #pragma unroll
            for (int i = 0; i < LANES; i++) sum[i] += element(v, i) + added[i];
        }
    }
    #pragma unroll
    for (int moment = 0; moment < 2; moment++) {
        if (moment == 1) {
            #pragma unroll
            for (int i = 0; i < LANES; i++) sum[i] = 0.0f;
            if (live) {
                #pragma unroll 4
                for (int pixel = from + line; pixel < to; pixel += lines) {
                    const Packed<LANES> v = load_packed<LANES>(data + ((pixel - from) * vectors + vector) * LANES);
                    #pragma unroll
                    for (int i = 0; i < LANES; i++) {
                        const float d = element(v, i) - mean[i];
                        sum[i] = fmaf(d, d, sum[i]);
                    }
                }
            }
        }
        if (live) {
            #pragma unroll
            for (int i = 0; i < LANES; i++) partial[line * p.slab + vector * LANES + i] = sum[i];
        }
        __syncthreads();
        for (int g = threadIdx.x / 32; g < groups; g += THREADS / 32) {          // a warp per group
            float total = 0.0f;
            for (int i = threadIdx.x % 32; i < lines * p.group; i += 32)
                total += partial[i / p.group * p.slab + g * p.group + i % p.group];
            #pragma unroll
            for (int distance = 16; distance > 0; distance /= 2) total += __shfl_xor_sync(0xffffffffu, total, distance);
            float* slot = totals + (moment * CLUSTER + rank) * groups + g;
#if CLUSTER > 1
            if (threadIdx.x % 32 < CLUSTER) cluster_put(cluster_map(smem_address(slot), threadIdx.x % 32), total);
#else
            if (threadIdx.x % 32 == 0) *slot = total;
#endif
        }
#if CLUSTER > 1
        cluster_arrive();
        cluster_wait();
#else
        __syncthreads();
#endif
        for (int g = threadIdx.x; g < groups; g += THREADS) {
            float total = 0.0f;
            for (int r = 0; r < CLUSTER; r++) total += totals[(moment * CLUSTER + r) * groups + g];
            total *= p.inverse_count;
            moments[moment * groups + g] = moment == 0 ? total : rsqrtf(total + p.epsilon);
        }
        __syncthreads();
        if (live) {
            #pragma unroll
            for (int i = 0; i < LANES; i++) {
                const float value = moments[moment * groups + (vector * LANES + i) / p.group];
                if (moment == 0) mean[i] = value - added[i];
                else factor[i] = value;
            }
        }
    }
    if (!live) return;
    #pragma unroll
    for (int i = 0; i < LANES; i++) factor[i] *= scale[i];
    #pragma unroll 4
    for (int pixel = from + line; pixel < to; pixel += lines) {
        const Packed<LANES> v = load_packed<LANES>(data + ((pixel - from) * vectors + vector) * LANES);
        float y[LANES];
        #pragma unroll
        for (int i = 0; i < LANES; i++) y[i] = epilogue(fmaf(element(v, i) - mean[i], factor[i], bias[i]), 0.0f, 0.0f);
        store_packed(output + (long long)pixel * p.output_pitch, pack<LANES>(y));
    }
}
