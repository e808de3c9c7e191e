// GroupNorm and InstanceNorm of images of any size, NHWC, fp32 statistics: two launches, each of which reads the input.
//
// A block of either kernel takes a slab of channels (whole groups, whole vectors) of a tile of an image's pixels.
// group_moments: each tile's mean and variance, for each group. Sums are of differences from the tile's first
// pixel, channel by channel, so that a large mean does not cancel the deviations.
// group_apply: each block adds up the moments of all tiles, in the order of tiles, and normalizes its own tile. Blocks take their
// tiles in the opposite order: what group_moments read last is still in L2.
//
// generated.cuh defines LANES (channels per access), THREADS, WIDE (fp32 elements), ONE_PITCH (input and output have one), ADDED and epilogue().
#include "tile_vectors.cuh"

constexpr int AHEAD = 4;                           // loads of a thread that are under way at once

struct Tiling {
    int pixels, channels, slab, group, tiles;      // slab: channels per block, group: channels per group
    int kept;                                      // blocks of group_moments from this one on leave what they read in L2
    int pitch;                                     // elements from a pixel of the input to the next
    int added_pitch;                               // elements from an image's vector of `added` to the next one's
};

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
};

// What a block works on. The slabs of a tile are neighbours in the order of blocks, as they are in memory.
struct Place {
    int image, tile, first_channel, vector, line, lines, from, to;
    bool live;                                     // threads past lines * vectors only help to reduce

    __device__ __forceinline__ Place(const Tiling& t, int block) {
        const int slabs = t.channels / t.slab, vectors = t.slab / LANES;
        first_channel = block % slabs * t.slab;
        tile = block / slabs % t.tiles;
        image = block / slabs / t.tiles;
        lines = THREADS / vectors;
        vector = threadIdx.x % vectors;
        line = threadIdx.x / vectors;
        live = line < lines;
        from = tile_begin(t.pixels, tile, t.tiles);
        to = tile_begin(t.pixels, tile + 1, t.tiles);
    }
    // The first channel of the slab at a pixel of a tensor with this pitch.
    __device__ __forceinline__ long long at(const Tiling& t, int pixel, int pitch) const {
        return ((long long)image * t.pixels + pixel) * pitch + first_channel;
    }
    // What is added to a channel of the slab.
    __device__ __forceinline__ float added_to(const Element* added, const Tiling& t, int channel) const {
        return ADDED ? element_of(added + (long long)image * t.added_pitch + first_channel + channel) : 0.0f;
    }
};

// Calls use(offset, vector) for a thread's vector of each of its pixels; loads run ahead of their use. The offset is that of a tensor
// whose pixels are `pitch` apart.
template <class Use> DEVICE void each_pixel(const Place& place, const Tiling& t, const Element* input, int pitch, u64 policy, Use use) {
    const int begin = place.from + place.line, channel = place.vector * LANES;
    const long long step = (long long)place.lines * t.pitch, other_step = ONE_PITCH ? step : (long long)place.lines * pitch;
    long long offset = place.at(t, begin, t.pitch) + channel, other = ONE_PITCH ? 0 : place.at(t, begin, pitch) + channel;
    int left = place.to - begin;                                                // pixels from this one on
    for (; left > (AHEAD - 1) * place.lines; left -= AHEAD * place.lines) {
        Vector v[AHEAD];
        #pragma unroll
        for (int k = 0; k < AHEAD; k++) v[k] = load_vector(input + offset + k * step, policy);
        #pragma unroll
        for (int k = 0; k < AHEAD; k++) use((ONE_PITCH ? offset : other) + k * other_step, v[k]);
        offset += AHEAD * step;
        other += AHEAD * other_step;
    }
    for (; left > 0; left -= place.lines, offset += step, other += other_step)
        use(ONE_PITCH ? offset : other, load_vector(input + offset, policy));
}

// Adds the lines of both tables [2][lines][slab] in shared memory to line 0 of each, pair by pair.
DEVICE void add_lines(float* table, int lines, int slab) {
    const int second = lines * slab;
    for (int left = lines; left > 1; left = (left + 1) / 2) {
        __syncthreads();
        const int half = (left + 1) / 2;
        for (int i = threadIdx.x; i < (left - half) * slab; i += THREADS) {
            table[i] += table[half * slab + i];
            table[second + i] += table[second + half * slab + i];
        }
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS) group_moments(const __grid_constant__ MomentsParams p) {
    extern __shared__ __align__(16) float partial[];                            // [2][lines][slab]
    grid_launch_dependents();
    const Tiling& t = p.tiling;
    const Place place(t, blockIdx.x);
    const Element* origin = p.input + place.at(t, place.from, t.pitch);
    const u64 policy = int(blockIdx.x) >= t.kept ? evict_normally() : evict_first();
    float* squares = partial + place.lines * t.slab;
    grid_dependency_wait();

    if (place.live) {
        float sum[LANES], square[LANES], first[LANES];
        const Vector v = load_vector(origin + place.vector * LANES, policy);
        #pragma unroll
        for (int i = 0; i < LANES; i++) sum[i] = square[i] = 0.0f, first[i] = lane_of(v, i);
        each_pixel(place, t, p.input, t.pitch, policy, [&](long long, const Vector& v) {
            #pragma unroll
            for (int i = 0; i < LANES; i++) {
                const float d = lane_of(v, i) - first[i];
                sum[i] += d;
                square[i] = fmaf(d, d, square[i]);
            }
        });
        const int at = place.line * t.slab + place.vector * LANES;
        #pragma unroll
        for (int i = 0; i < LANES; i++) partial[at + i] = sum[i], squares[at + i] = square[i];
    }
    add_lines(partial, place.lines, t.slab);
    const float count = float(place.to - place.from);
    for (int c = threadIdx.x; c < t.slab; c += THREADS) {                        // each channel's mean and variance
        const float sum = partial[c];
        squares[c] = (squares[c] - sum * (sum / count)) / count;
        partial[c] = element_of(origin + c) + place.added_to(p.added, t, c) + sum / count;
    }
    __syncthreads();
    const int groups = t.slab / t.group, lane = threadIdx.x % 32;
    for (int g = threadIdx.x / 32; g < groups; g += THREADS / 32) {              // a warp per group
        const int from = g * t.group, to = from + t.group;
        float total = 0.0f, deviations = 0.0f;
        for (int c = from + lane; c < to; c += 32) total += partial[c];
        const float mean = warp_sum(total) / float(t.group);
        for (int c = from + lane; c < to; c += 32) deviations += fmaf(partial[c] - mean, partial[c] - mean, squares[c]);
        const float variance = warp_sum(deviations) / float(t.group);
        const long long row = (long long)place.image * (t.channels / t.group) + place.first_channel / t.group + g;
        if (lane == 0) p.moments[row * t.tiles + place.tile] = make_float2(mean, variance);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) group_apply(const __grid_constant__ ApplyParams p) {
    extern __shared__ __align__(16) float2 moments[];                           // [groups]: mean, 1 / standard deviation
    grid_launch_dependents();
    const Tiling& t = p.tiling;
    const Place place(t, gridDim.x - 1 - blockIdx.x);
    const int groups = t.slab / t.group, channel = place.first_channel + place.vector * LANES;
    const u64 policy = t.kept ? evict_first() : evict_normally();
    float factor[LANES], shift[LANES], mean[LANES];  // of 16-bit elements, the mean is part of the shift
    if (place.live) {
        load_floats<LANES>(factor, p.scale + channel);
        load_floats<LANES>(shift, p.bias + channel);
    }
    grid_dependency_wait();

    const long long row = (long long)place.image * (t.channels / t.group) + place.first_channel / t.group;
    for (int g = threadIdx.x / 32; g < groups; g += THREADS / 32) {              // a warp per group
        const Moments m = combine(p.moments + (row + g) * t.tiles, t.pixels, t.tiles);
        if (threadIdx.x % 32 == 0) moments[g] = make_float2(m.mean, inverse_deviation(m, p.epsilon));
    }
    __syncthreads();
    if (!place.live) return;
    #pragma unroll
    for (int i = 0; i < LANES; i++) {
        const float2 m = moments[(place.vector * LANES + i) / t.group];
        const float centre = m.x - place.added_to(p.added, t, place.vector * LANES + i);
        factor[i] *= m.y;
        if constexpr (WIDE) mean[i] = centre;
        else mean[i] = 0.0f, shift[i] = fmaf(-centre, factor[i], shift[i]);
    }
    each_pixel(place, t, p.input, p.output_pitch, policy, [&](long long offset, const Vector& v) {
        float y[LANES];
        #pragma unroll
        for (int i = 0; i < LANES; i++) y[i] = epilogue(fmaf(lane_of(v, i) - mean[i], factor[i], shift[i]), 0.0f, 0.0f);
        store_vector(p.output + offset, y);
    });
}
