// GroupNorm and InstanceNorm, NHWC, fp32 statistics; the input is read once.
//
// A cluster of CLUSTER blocks (one before Hopper) takes a slab of channels (whole groups, whole vectors) of one image. Each block keeps its
// share of the pixels in registers (HELD vectors per thread), or in shared memory (HELD = 0). A group's pivot is the first channel of the
// image's first pixel. Sums over a block are added in a fixed order, sums of a cluster's blocks in rank order.
//
// generated.cuh defines LANES (channels per access), THREADS, CLUSTER, HELD, WIDE (fp32 elements), HAS_RESIDUAL, epilogue(), and the macros
// that group_sums.cuh and after_norm.cuh need.
#include "group_sums.cuh"
#include "after_norm.cuh"

constexpr int ROUND = HELD ? HELD : 4;             // loads of a thread in flight

struct Params {
    const Element* input;
    Element* output;
    const float* scale;                            // [channels]
    const float* bias;                             // [channels]
    const Element* added;                          // a vector of channels, added to each pixel of an image; may be null
    int pixels, slab, group;                       // slab: channels per cluster, group: channels per group
    int input_pitch, output_pitch;                 // elements between consecutive pixels
    int added_pitch;                               // elements between the vectors of consecutive images
    const Element* residual;                       // operand of the epilogue, and elements between its pixels
    int residual_pitch, channels;
    float inverse_count, epsilon;
    const float* numbers;                          // [2][channels]: operands of a stage of the epilogue; may be null
#if MODULATED
    Modulation modulation;
#endif
};

// Writes the sum and sum of squares of group g of the slab to all blocks of the cluster, by SHARE threads. ``met``: their barriers, which count
// the bytes (the release of a cluster barrier would wait for all loads in flight).
DEVICE void tell(float2* totals, float2* met, int rank, int groups, int g, float2 sums) {
    float2* slot = totals + rank * groups + g;
#if CLUSTER > 1
    for (int r = threadIdx.x % SHARE; r < CLUSTER; r += SHARE)
        cluster_send(smem_address(slot), smem_address(met), r, sums);
#else
    if (threadIdx.x % SHARE == 0) *slot = sums;
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS) group_norm(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) u8 shared[];
    grid_launch_dependents();
#if CLUSTER > 1
    const int rank = int(cluster_rank());
#else
    const int rank = 0;
#endif
    const int first_channel = blockIdx.x / CLUSTER * p.slab, n = blockIdx.y;
    const int vectors = p.slab / LANES, lines = THREADS / vectors, groups = p.slab / p.group;
    const int vector = threadIdx.x % vectors, line = threadIdx.x / vectors;      // threads beyond lines * vectors only help to reduce
    const int from = p.pixels * rank / CLUSTER, to = p.pixels * (rank + 1) / CLUSTER;
    const bool live = line < lines;
    const int channel = vector * LANES, mine = live ? to - from - line : 0;      // pixels from the thread's first pixel on
    float2* table = reinterpret_cast<float2*>(shared);                           // see group_sums.cuh
    float2* totals = table + vectors * SPAN * table_pitch(lines);                // [CLUSTER][groups]
    float2* moments = totals + CLUSTER * groups;                                 // [groups]: mean, 1 / standard deviation
    float2* met = moments + groups;                                              // a barrier
    float* pivots = reinterpret_cast<float*>(moments + groups + 1);              // [groups]
    const int head = 8 * (vectors * SPAN * table_pitch(lines) + (CLUSTER + 1) * groups + 1) + 4 * groups;
    Element* data = reinterpret_cast<Element*>(shared + (head + 15) / 16 * 16) + line * p.slab + channel;
    const Element* origin = p.input + (long long)n * p.pixels * p.input_pitch + first_channel;
    const Element* input = origin + (long long)(from + line) * p.input_pitch + channel;
    const Element* vector_added = p.added ? p.added + (long long)n * p.added_pitch + first_channel : nullptr;
    const VectorGroups own(channel, p.group);
    const u64 policy = evict_normally();
    float factor[LANES], shift[LANES];
    load_floats<LANES>(factor, p.scale + first_channel + channel);
    load_floats<LANES>(shift, p.bias + first_channel + channel);
#if CLUSTER > 1
    if (threadIdx.x == 0) {
        barrier_init(smem_address(met), 1);
        barrier_init_fence();
        barrier_expect(smem_address(met), CLUSTER * groups * 8);
    }
    cluster_arrive_relaxed();
#endif
    grid_dependency_wait();

    Vector v[ROUND];
    const auto load = [&](int begin) {
        #pragma unroll
        for (int k = 0; k < ROUND; k++)
            if (mine > begin + k * lines) v[k] = load_vector(input + (long long)(begin + k * lines) * p.input_pitch, policy);
    };
    load(0);
#if MODULATED
    p.modulation.apply(factor, shift, n, first_channel + channel);
#endif
    const auto added_to = [&](int c) { return vector_added ? element_of(vector_added + c) : 0.0f; };
    float pivot[SPAN], center[LANES], sum[LANES], square[LANES];
    #pragma unroll
    for (int k = 0; k < SPAN; k++) {
        const int first = min(own.first + k, groups - 1) * p.group;
        pivot[k] = element_of(origin + first) + added_to(first);
    }
    #pragma unroll
    for (int i = 0; i < LANES; i++) center[i] = own.pick(pivot, i) - added_to(channel + i), sum[i] = square[i] = 0.0f;
    for (int g = threadIdx.x; g < groups; g += THREADS) pivots[g] = element_of(origin + g * p.group) + added_to(g * p.group);
    for (int begin = 0; begin < mine; begin += ROUND * lines) {
        if (begin) load(begin);
        #pragma unroll
        for (int k = 0; k < ROUND; k++) {
            if (mine <= begin + k * lines) break;
            if constexpr (HELD == 0) put_vector(data + (begin + k * lines) * p.slab, v[k]);
            #pragma unroll
            for (int i = 0; i < LANES; i++) {
                const float d = lane_of(v[k], i) - center[i];
                sum[i] += d;
                square[i] = fmaf(d, d, square[i]);
            }
        }
        if constexpr (HELD > 0) break;
    }
    Vector r[ROUND];
    const Element* residual = p.residual + ((long long)n * p.pixels + from + line) * p.residual_pitch + first_channel + channel;
    const auto load_residual = [&](int begin) {
        #pragma unroll
        for (int k = 0; HAS_RESIDUAL && k < ROUND; k++)
            if (mine > begin + k * lines) r[k] = load_vector(residual + (long long)(begin + k * lines) * p.residual_pitch, policy);
    };
    if constexpr (HELD > 0) load_residual(0);      // in flight while the blocks synchronize
    if (live) put_sums(table, own, vector, line, lines, sum, square);
    __syncthreads();
#if CLUSTER > 1
    cluster_wait();                                // the peers run and their barriers are initialized: their shared memory may be written
#endif
    for (int begin = 0; begin < groups; begin += THREADS / SHARE) {
        const int g = begin + threadIdx.x / SHARE;
        const float2 sums = group_sums(table, min(g, groups - 1), p.group, lines);
        if (g < groups) tell(totals, met, rank, groups, g, sums);
    }
#if CLUSTER > 1
    barrier_wait_cluster(smem_address(met), 0);
#else
    __syncthreads();
#endif
    for (int g = threadIdx.x; g < groups; g += THREADS) {
        float2 total = make_float2(0.0f, 0.0f);
        #pragma unroll
        for (int r = 0; r < CLUSTER; r++) total.x += totals[r * groups + g].x, total.y += totals[r * groups + g].y;
        const float mean = total.x * p.inverse_count;
        const Moments m = {pivots[g] + mean, fmaf(-mean, mean, total.y * p.inverse_count)};
        moments[g] = make_float2(m.mean, inverse_deviation(m, p.epsilon));
    }
    __syncthreads();
    if (!live) return;
    float means[SPAN], inverses[SPAN];
    #pragma unroll
    for (int k = 0; k < SPAN; k++) {
        const float2 m = moments[min(own.first + k, groups - 1)];
        means[k] = m.x, inverses[k] = m.y;
    }
    #pragma unroll
    for (int i = 0; i < LANES; i++) center[i] = own.pick(means, i) - added_to(channel + i), factor[i] *= own.pick(inverses, i);
    const StageOperands operands(p.numbers, p.channels, first_channel + channel);
    Element* output = p.output + ((long long)n * p.pixels + from + line) * p.output_pitch + first_channel + channel;
    for (int begin = 0; begin < mine; begin += ROUND * lines) {
        if constexpr (HELD == 0) load_residual(begin);
        #pragma unroll
        for (int k = 0; k < ROUND; k++) {
            if (mine <= begin + k * lines) break;
            if constexpr (HELD == 0) v[k] = get_vector(data + (begin + k * lines) * p.slab);
            float y[LANES];
            #pragma unroll
            for (int i = 0; i < LANES; i++) {
                const float normal = fmaf(lane_of(v[k], i) - center[i], factor[i], shift[i]);
                y[i] = epilogue(normal, operands.of(i), HAS_RESIDUAL ? lane_of(r[k], i) : 0.0f);
            }
            store_vector(output + (long long)(begin + k * lines) * p.output_pitch, y);
        }
        if constexpr (HELD > 0) break;
    }
}
