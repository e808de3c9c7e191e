// GroupNorm and InstanceNorm of images of any size, NHWC, fp32 statistics: two launches, which both read the input.
//
// A block of either kernel takes a slab of channels (whole groups, whole vectors) of a tile of an image's pixels.
// group_moments: each tile's mean and variance, for each group. A group's pivot is the first channel of the tile's first pixel.
// group_apply: each block adds the moments of all tiles, in a fixed order, and normalizes its own tile. Blocks take their tiles in the
// opposite order: the last reads of group_moments are still in L2.
//
// generated.cuh defines LANES (channels per access), THREADS, WIDE (fp32 elements), ADDED, epilogue(), and the macros that group_sums.cuh
// and after_norm.cuh need.
#include "after_norm.cuh"
#include "group_tiles.cuh"

constexpr int AHEAD = 4;                           // loads of a thread in flight

struct MomentsParams {
    const Element* input;
    const Element* added;                          // with ADDED: a vector of channels, added to each pixel of an image
    float2* moments;                               // [batch][groups][tiles]: mean, variance
    Tiling tiling;
};

struct ApplyParams {
    const Element* input;
    const Element* added;
    Element* output;
    const float* scale;                            // [channels]
    const float* bias;                             // [channels]
    const float2* moments;
    Tiling tiling;
    int output_pitch;
    float epsilon;
    const float* numbers;                          // [2][channels]: operands of a stage of the epilogue; may be null
#if MODULATED
    Modulation modulation;
#endif
};

// The pixels of a thread: every `lines`-th of the tile, AHEAD of them at once.
struct Cursor {
    const Element* at;
    long long step;
    int left, lines;                               // left: pixels of the tile from this one on

    __device__ __forceinline__ Cursor(const Place& place, const Tiling& t, const Element* input)
        : at(input + place.at(t, place.from + place.line, t.pitch) + place.vector * LANES), step((long long)place.lines * t.pitch),
          left(place.live ? place.to - place.from - place.line : 0), lines(place.lines) {}
    __device__ __forceinline__ bool has(int k) const { return left > k * lines; }
    __device__ __forceinline__ void load(Vector (&v)[AHEAD], u64 policy) const {
        #pragma unroll
        for (int k = 0; k < AHEAD; k++)
            if (has(k)) v[k] = load_vector(at + k * step, policy);
    }
    __device__ __forceinline__ void advance() { at += AHEAD * step, left -= AHEAD * lines; }
};

extern "C" __global__ void __launch_bounds__(THREADS) group_moments(const __grid_constant__ MomentsParams p) {
    extern __shared__ __align__(16) float2 table[];                             // see group_sums.cuh; [groups] pivots follow
    grid_launch_dependents();
    const Tiling& t = p.tiling;
    const Place place(t, blockIdx.x);
    const Element* origin = p.input + place.at(t, place.from, t.pitch);
    const u64 policy = int(blockIdx.x) >= t.kept ? evict_normally() : evict_first();
    const int groups = t.slab / t.group, channel = place.vector * LANES;
    const VectorGroups own(channel, t.group);
    float* pivots = reinterpret_cast<float*>(table + t.slab / LANES * SPAN * table_pitch(place.lines));
    Cursor cursor(place, t, p.input);
    Vector v[AHEAD];
    grid_dependency_wait();

    cursor.load(v, policy);
    const auto pivot_of = [&](int g) { return element_of(origin + g * t.group) + place.added_to(p.added, t, g * t.group); };
    float pivot[SPAN], center[LANES], sum[LANES], square[LANES];
    #pragma unroll
    for (int k = 0; k < SPAN; k++) pivot[k] = pivot_of(min(own.first + k, groups - 1));
    #pragma unroll
    for (int i = 0; i < LANES; i++)
        center[i] = own.pick(pivot, i) - place.added_to(p.added, t, channel + i), sum[i] = square[i] = 0.0f;
    for (int g = threadIdx.x; g < groups; g += THREADS) pivots[g] = pivot_of(g);
    while (cursor.has(0)) {
        #pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            if (!cursor.has(k)) break;
            #pragma unroll
            for (int i = 0; i < LANES; i++) {
                const float d = lane_of(v[k], i) - center[i];
                sum[i] += d;
                square[i] = fmaf(d, d, square[i]);
            }
        }
        cursor.advance();
        cursor.load(v, policy);
    }
    if (place.live) put_sums(table, own, place.vector, place.line, place.lines, sum, square);
    __syncthreads();
    const float inverse = 1.0f / (float(place.to - place.from) * float(t.group));
    const long long row = (long long)place.image * (t.channels / t.group) + place.first_channel / t.group;
    for (int begin = 0; begin < groups; begin += THREADS / SHARE) {
        const int g = begin + threadIdx.x / SHARE;
        const float2 sums = group_sums(table, min(g, groups - 1), t.group, place.lines);
        const float mean = sums.x * inverse;
        if (threadIdx.x % SHARE == 0 && g < groups)
            p.moments[(row + g) * t.tiles + place.tile] = make_float2(pivots[g] + mean, fmaf(-mean, mean, sums.y * inverse));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, THREADS > 256 ? 1 : 768 / THREADS) group_apply(const __grid_constant__ ApplyParams p) {
    extern __shared__ __align__(16) float2 moments[];                           // [groups]: mean, 1 / standard deviation
    grid_launch_dependents();
    const Tiling& t = p.tiling;
    const Place place(t, gridDim.x - 1 - blockIdx.x);
    const int groups = t.slab / t.group, channel = place.vector * LANES;
    const VectorGroups own(channel, t.group);
    const u64 policy = t.kept ? evict_first() : evict_normally();
    float factor[LANES], shift[LANES], mean[LANES];  // for 16-bit elements, the mean is part of the shift
    load_floats<LANES>(factor, p.scale + place.first_channel + channel);
    load_floats<LANES>(shift, p.bias + place.first_channel + channel);
    Cursor cursor(place, t, p.input);
    Element* output = p.output + place.at(t, place.from + place.line, p.output_pitch) + channel;
    const long long output_step = (long long)place.lines * p.output_pitch;
    Vector v[AHEAD];
    grid_dependency_wait();

    cursor.load(v, policy);                        // in flight beside the loads of the moments
#if MODULATED
    p.modulation.apply(factor, shift, place.image, place.first_channel + channel);
#endif
    const long long row = (long long)place.image * (t.channels / t.group) + place.first_channel / t.group;
    for (int begin = 0; begin < groups; begin += THREADS / SHARE) {
        const int g = begin + threadIdx.x / SHARE;
        const Moments m = combine<SHARE>(p.moments + (row + min(g, groups - 1)) * t.tiles, t.pixels, t.tiles);
        if (threadIdx.x % SHARE == 0 && g < groups) moments[g] = make_float2(m.mean, inverse_deviation(m, p.epsilon));
    }
    __syncthreads();
    if (!place.live) return;
    float means[SPAN], inverses[SPAN];
    #pragma unroll
    for (int k = 0; k < SPAN; k++) {
        const float2 m = moments[min(own.first + k, groups - 1)];
        means[k] = m.x, inverses[k] = m.y;
    }
    #pragma unroll
    for (int i = 0; i < LANES; i++) {
        const float center = own.pick(means, i) - place.added_to(p.added, t, channel + i);
        factor[i] *= own.pick(inverses, i);
        if constexpr (WIDE) mean[i] = center;
        else mean[i] = 0.0f, shift[i] = fmaf(-center, factor[i], shift[i]);
    }
    const StageOperands operands(p.numbers, t.channels, place.first_channel + channel);
    while (cursor.has(0)) {
        #pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            if (!cursor.has(k)) break;
            float y[LANES];
            #pragma unroll
            for (int i = 0; i < LANES; i++) y[i] = epilogue(fmaf(lane_of(v[k], i) - mean[i], factor[i], shift[i]), operands.of(i), 0.0f);
            store_vector(output + k * output_step, y);
        }
        cursor.advance();
        output += AHEAD * output_step;
        cursor.load(v, policy);
    }
}
