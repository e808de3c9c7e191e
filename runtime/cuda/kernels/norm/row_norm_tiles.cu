// Normalization of contiguous rows of any length, fp32 statistics: LayerNorm, and GroupNorm and InstanceNorm of NCHW images, where groups
// are rows.
//
// Rows of one tile: row_norm takes a block per row, and reads the row twice. Longer rows: row_moments stores each tile's mean and sum of
// squared deviations; row_apply adds them and normalizes its own tile. Its blocks take tiles in the opposite order: the last reads of
// row_moments are still in L2. Sums are of differences from the tile's first element, so that a large mean does not cancel them.
//
// generated.cuh defines LANES (elements per access), THREADS, WIDE (fp32 elements), EACH (each element of a row has a scale and bias of
// its own) and epilogue().
#include "tile_vectors.cuh"

constexpr int AHEAD = 4;                           // loads of a thread in flight

struct Tiling {
    int vectors, tiles;                            // of a row: accesses, and tiles
    int kept;                                      // from this block on, row_moments leaves its reads in L2
};

struct MomentsParams {
    const Element* input;
    float2* moments;                               // [rows][tiles]: mean, variance
    Tiling tiling;
};

struct ApplyParams {
    const Element* input;
    Element* output;
    const float* scale;
    const float* bias;
    const float2* moments;                         // null in row_norm
    Tiling tiling;
    int run, period;                               // vectors of a row that share a scale; rows after which the scales repeat
    float epsilon;
};

struct Place {
    int row, tile, from, to;                       // from, to: vectors of the row

    __device__ __forceinline__ Place(const Tiling& t, int block) {
        row = block / t.tiles;
        tile = block % t.tiles;
        from = tile_begin(t.vectors, tile, t.tiles);
        to = tile_begin(t.vectors, tile + 1, t.tiles);
    }
};

// Calls use(index of a vector, vector) for the vectors of a thread; loads run ahead of their use.
template <class Use> DEVICE void each_vector(const Place& place, const Element* row, u64 policy, Use use) {
    int i = place.from + threadIdx.x;
    for (; i + (AHEAD - 1) * THREADS < place.to; i += AHEAD * THREADS) {
        Vector v[AHEAD];
        #pragma unroll
        for (int k = 0; k < AHEAD; k++) v[k] = load_vector(row + (long long)(i + k * THREADS) * LANES, policy);
        #pragma unroll
        for (int k = 0; k < AHEAD; k++) use(i + k * THREADS, v[k]);
    }
    for (; i < place.to; i += THREADS) use(i, load_vector(row + (long long)i * LANES, policy));
}

// Sum of v over the block, in all threads.
DEVICE float block_sum(float v) {
    __shared__ float partial[THREADS / 32];
    v = warp_sum(v);
    if constexpr (THREADS == 32) return v;
    __syncthreads();                               // an earlier sum has been read
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
    __syncthreads();
    return warp_sum(threadIdx.x % 32 < THREADS / 32 ? partial[threadIdx.x % 32] : 0.0f);
}

// The moments of a tile, in all threads.
DEVICE Moments moments_of(const Place& place, const Element* row, u64 policy) {
    const float first = element_of(row + (long long)place.from * LANES);
    float sum = 0.0f, square = 0.0f;
    each_vector(place, row, policy, [&](int, const Vector& v) {
        #pragma unroll
        for (int i = 0; i < LANES; i++) {
            const float d = lane_of(v, i) - first;
            sum += d;
            square = fmaf(d, d, square);
        }
    });
    const float count = float(place.to - place.from) * LANES;
    const float mean = block_sum(sum) / count;
    return {first + mean, block_sum(square) / count - mean * mean};
}

DEVICE void apply(const ApplyParams& p, const Place& place, const Moments& m, u64 policy) {
    const float inverse = inverse_deviation(m, p.epsilon);
    const long long begin = (long long)place.row * p.tiling.vectors * LANES;
#if EACH
    const long long own = (long long)(place.row % p.period) * p.tiling.vectors * LANES;
#else
    const int channel = place.row % p.period * (p.tiling.vectors / p.run);
#endif
    each_vector(place, p.input + begin, policy, [&](int index, const Vector& v) {
        float y[LANES];
#if EACH
        float scale[LANES], bias[LANES];
        load_floats<LANES>(scale, p.scale + own + (long long)index * LANES);
        load_floats<LANES>(bias, p.bias + own + (long long)index * LANES);
        #pragma unroll
        for (int i = 0; i < LANES; i++) y[i] = epilogue(fmaf(lane_of(v, i) - m.mean, inverse * scale[i], bias[i]), 0.0f, 0.0f);
#else
        const int c = channel + index / p.run;
        const float factor = inverse * __ldg(p.scale + c), shift = __ldg(p.bias + c);
        #pragma unroll
        for (int i = 0; i < LANES; i++) y[i] = epilogue(fmaf(lane_of(v, i) - m.mean, factor, shift), 0.0f, 0.0f);
#endif
        store_vector(p.output + begin + (long long)index * LANES, y);
    });
}

extern "C" __global__ void __launch_bounds__(THREADS) row_moments(const __grid_constant__ MomentsParams p) {
    grid_launch_dependents();
    const Tiling& t = p.tiling;
    const Place place(t, blockIdx.x);
    const u64 policy = int(blockIdx.x) >= t.kept ? evict_normally() : evict_first();
    grid_dependency_wait();
    const Moments m = moments_of(place, p.input + (long long)place.row * t.vectors * LANES, policy);
    if (threadIdx.x == 0) p.moments[blockIdx.x] = make_float2(m.mean, m.variance);
}

extern "C" __global__ void __launch_bounds__(THREADS) row_apply(const __grid_constant__ ApplyParams p) {
    __shared__ Moments whole;
    grid_launch_dependents();
    const Tiling& t = p.tiling;
    const Place place(t, gridDim.x - 1 - blockIdx.x);
    grid_dependency_wait();
    if (threadIdx.x < 32) {
        const Moments m = combine(p.moments + (long long)place.row * t.tiles, t.vectors, t.tiles);
        if (threadIdx.x == 0) whole = m;
    }
    __syncthreads();
    apply(p, place, whole, t.kept ? evict_first() : evict_normally());
}

extern "C" __global__ void __launch_bounds__(THREADS) row_norm(const __grid_constant__ ApplyParams p) {
    grid_launch_dependents();
    const Place place(p.tiling, blockIdx.x);
    const u64 policy = evict_normally();
    grid_dependency_wait();
    const Moments m = moments_of(place, p.input + (long long)place.row * p.tiling.vectors * LANES, policy);
    apply(p, place, m, policy);
}
