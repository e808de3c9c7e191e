// GroupNorm and InstanceNorm of large images, NHWC, fp32 statistics: one cooperative launch that keeps as much of its input as fits.
//
// A block takes a slab of channels (whole groups, whole vectors) of a tile of an image's pixels. It sums the tile and writes the tile's
// moments. The first pixels stay in shared memory, the last ones in registers. When all blocks have written, each block adds the moments of
// its groups in a fixed order and normalizes its tile: first the last pixels, then the pixels that it must read again, backwards, since L2
// holds the most recent ones.
//
// generated.cuh defines LANES (channels per access), THREADS, WIDE (fp32 elements), ADDED, epilogue(), and the macros that group_sums.cuh
// and after_norm.cuh need.
#include "after_norm.cuh"
#include "group_tiles.cuh"
#include "grid_meeting.cuh"

constexpr int AHEAD = 6;                           // loads of a thread in flight

struct Params {
    const Element* input;
    const Element* added;                          // with ADDED: a vector of channels, added to each pixel of an image
    Element* output;
    const float* scale;                            // [channels]
    const float* bias;                             // [channels]
    float2* moments;                               // [batch][groups][tiles]: mean, variance
    u32* rounds;                                   // completed grid barriers, and blocks that have arrived at the next one
    Tiling tiling;
    int output_pitch, held;                        // held: pixels of a thread that stay in shared memory
    float epsilon;
    const float* numbers;                          // [2][channels]: operands of a stage of the epilogue; may be null
#if MODULATED
    Modulation modulation;
#endif
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) group_norm_grid(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) u8 shared[];
    const Tiling& t = p.tiling;
    const Place place(t, blockIdx.x);
    const int vectors = t.slab / LANES, groups = t.slab / t.group, channel = place.vector * LANES;
    const VectorGroups own(channel, t.group);
    float2* table = reinterpret_cast<float2*>(shared);                          // see group_sums.cuh
    float2* moments = table + vectors * SPAN * table_pitch(place.lines);        // [groups]: mean, 1 / standard deviation
    float* pivots = reinterpret_cast<float*>(moments + groups);                 // [groups]
    const int head = 8 * (vectors * SPAN * table_pitch(place.lines) + groups) + 4 * groups;
    Element* kept = reinterpret_cast<Element*>(shared + (head + 15) / 16 * 16) + place.line * t.slab + channel;
    const int kept_step = place.lines * t.slab;
    const Element* origin = p.input + place.at(t, place.from, t.pitch);
    const Element* input = origin + (long long)place.line * t.pitch + channel;
    const long long step = (long long)place.lines * t.pitch;
    const int mine = place.live ? max(0, (place.to - place.from - place.line + place.lines - 1) / place.lines) : 0;  // pixels
    const int last = mine ? (mine - 1) / AHEAD * AHEAD : 0;                     // the first pixel that stays in registers
    const u64 once = evict_first(), again = evict_normally();

    const auto pivot_of = [&](int g) { return element_of(origin + g * t.group) + place.added_to(p.added, t, g * t.group); };
    float pivot[SPAN], center[LANES], sum[LANES], square[LANES];
    #pragma unroll
    for (int k = 0; k < SPAN; k++) pivot[k] = pivot_of(min(own.first + k, groups - 1));
    #pragma unroll
    for (int i = 0; i < LANES; i++)
        center[i] = own.pick(pivot, i) - (place.live ? place.added_to(p.added, t, channel + i) : 0.0f), sum[i] = square[i] = 0.0f;
    for (int g = threadIdx.x; g < groups; g += THREADS) pivots[g] = pivot_of(g);
    Vector v[AHEAD];
    for (int begin = 0; begin < mine; begin += AHEAD) {
        #pragma unroll
        for (int k = 0; k < AHEAD; k++)
            if (begin + k < mine) v[k] = load_vector(input + (begin + k) * step, begin + k < p.held || begin >= last ? once : again);
        #pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            if (begin + k >= mine) break;
            if (begin + k < p.held) put_vector(kept + (begin + k) * kept_step, v[k]);
            #pragma unroll
            for (int i = 0; i < LANES; i++) {
                const float d = lane_of(v[k], i) - center[i];
                sum[i] += d;
                square[i] = fmaf(d, d, square[i]);
            }
        }
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
    meet(p.rounds);
    for (int begin = 0; begin < groups; begin += THREADS / SHARE) {
        const int g = begin + threadIdx.x / SHARE;
        const Moments m = combine<SHARE>(p.moments + (row + min(g, groups - 1)) * t.tiles, t.pixels, t.tiles);
        if (threadIdx.x % SHARE == 0 && g < groups) moments[g] = make_float2(m.mean, inverse_deviation(m, p.epsilon));
    }
    __syncthreads();
    if (!place.live) return;

    float means[SPAN], inverses[SPAN], factor[LANES], shift[LANES], mean[LANES];   // for 16-bit elements, the mean is part of the shift
    #pragma unroll
    for (int k = 0; k < SPAN; k++) {
        const float2 m = moments[min(own.first + k, groups - 1)];
        means[k] = m.x, inverses[k] = m.y;
    }
    load_floats<LANES>(factor, p.scale + place.first_channel + channel);
    load_floats<LANES>(shift, p.bias + place.first_channel + channel);
#if MODULATED
    p.modulation.apply(factor, shift, place.image, place.first_channel + channel);
#endif
    #pragma unroll
    for (int i = 0; i < LANES; i++) {
        const float all = own.pick(means, i) - place.added_to(p.added, t, channel + i);
        factor[i] *= own.pick(inverses, i);
        if constexpr (WIDE) mean[i] = all;
        else mean[i] = 0.0f, shift[i] = fmaf(-all, factor[i], shift[i]);
    }
    Element* output = p.output + place.at(t, place.from + place.line, p.output_pitch) + channel;
    const long long output_step = (long long)place.lines * p.output_pitch;
    const StageOperands operands(p.numbers, t.channels, place.first_channel + channel);
    const auto apply = [&](const Vector& x, int pixel) {
        float y[LANES];
        #pragma unroll
        for (int i = 0; i < LANES; i++) y[i] = epilogue(fmaf(lane_of(x, i) - mean[i], factor[i], shift[i]), operands.of(i), 0.0f);
        store_vector(output + pixel * output_step, y);
    };
    #pragma unroll
    for (int k = 0; k < AHEAD; k++)
        if (last + k < mine) apply(v[k], last + k);
    for (int end = last; end > p.held; end -= AHEAD) {
        #pragma unroll
        for (int k = 0; k < AHEAD; k++)
            if (end - 1 - k >= p.held) v[k] = load_vector(input + (end - 1 - k) * step, once);
        #pragma unroll
        for (int k = 0; k < AHEAD; k++)
            if (end - 1 - k >= p.held) apply(v[k], end - 1 - k);
    }
    for (int i = min(p.held, last) - 1; i >= 0; i--) apply(get_vector(kept + i * kept_step), i);
}
