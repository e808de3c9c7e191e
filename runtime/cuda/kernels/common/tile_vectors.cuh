// Vectors of LANES elements (16-bit floats, with WIDE fp32) of tensors, as fp32.
//
// Where two launches read a tensor in sequence, each access gives L2 a priority for its lines. Lines that no launch reads again are evicted
// first.
#pragma once
#include "l2_priority.cuh"
#include "vectors.cuh"
#include "generated.cuh"

#if WIDE
typedef float Element;
#else
typedef u16 Element;
#endif

constexpr int VECTOR_BYTES = LANES * int(sizeof(Element));
static_assert(VECTOR_BYTES <= 16 && (VECTOR_BYTES & (VECTOR_BYTES - 1)) == 0, "one access");

struct Vector {
    u32 word[VECTOR_BYTES < 4 ? 1 : VECTOR_BYTES / 4];
};

// ---- accesses -------------------------------------------------------------------------------------------------------

DEVICE Vector load_vector(const Element* at, u64 policy) {
    Vector v;
    if constexpr (VECTOR_BYTES < 4) v.word[0] = *reinterpret_cast<const u16*>(at);
    else load_words(v.word, at, policy);
    return v;
}

DEVICE float lane_of(const Vector& v, int i) {
#if WIDE
    return __uint_as_float(v.word[i]);
#else
    return i % 2 ? high_float(v.word[i / 2]) : low_float(v.word[i / 2]);
#endif
}

DEVICE float element_of(const Element* at) {
#if WIDE
    return *at;
#else
    return unpack1(*at);
#endif
}

// Stores a vector unchanged.
DEVICE void put_vector(Element* at, const Vector& v) {
    if constexpr (VECTOR_BYTES == 16) *reinterpret_cast<uint4*>(at) = make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]);
    else if constexpr (VECTOR_BYTES == 8) *reinterpret_cast<uint2*>(at) = make_uint2(v.word[0], v.word[1]);
    else if constexpr (VECTOR_BYTES == 4) *reinterpret_cast<u32*>(at) = v.word[0];
    else *reinterpret_cast<u16*>(at) = u16(v.word[0]);
}
DEVICE Vector get_vector(const Element* at) {
    Vector v;
    if constexpr (VECTOR_BYTES == 16) {
        const uint4 x = *reinterpret_cast<const uint4*>(at);
        v.word[0] = x.x, v.word[1] = x.y, v.word[2] = x.z, v.word[3] = x.w;
    } else if constexpr (VECTOR_BYTES == 8) {
        const uint2 x = *reinterpret_cast<const uint2*>(at);
        v.word[0] = x.x, v.word[1] = x.y;
    } else if constexpr (VECTOR_BYTES == 4) {
        v.word[0] = *reinterpret_cast<const u32*>(at);
    } else {
        v.word[0] = *reinterpret_cast<const u16*>(at);
    }
    return v;
}

DEVICE Vector vector_of(const float* x) {
    Vector v;
#if WIDE
    #pragma unroll
    for (int i = 0; i < LANES; i++) v.word[i] = __float_as_uint(x[i]);
#else
    const Packed<LANES> packed = pack<LANES>(x);
    #pragma unroll
    for (int i = 0; i < (LANES + 1) / 2; i++) v.word[i] = packed.word[i];
#endif
    return v;
}

DEVICE void store_vector(Element* at, const float (&x)[LANES]) { put_vector(at, vector_of(x)); }

// ---- tiles and their moments -------------------------------------------------------------------------------------------

// The beginning of part `tile`, where `tiles` parts share `count` items; the first parts are the larger ones.
DEVICE int tile_begin(int count, int tile, int tiles) { return count / tiles * tile + min(tile, count % tiles); }

// Sum of v over WIDTH neighboring lanes, in all of them.
template <int WIDTH = 32> DEVICE float warp_sum(float v) {
    #pragma unroll
    for (int distance = WIDTH / 2; distance > 0; distance /= 2) v += __shfl_xor_sync(0xffffffffu, v, distance);
    return v;
}

struct Moments {
    float mean, variance;
};

// 1 / standard deviation. A variance below zero is rounding; NaN stays NaN.
DEVICE float inverse_deviation(const Moments& m, float epsilon) { return rsqrtf((m.variance < 0.0f ? 0.0f : m.variance) + epsilon); }

// Combines the moments (mean, variance) of all tiles, by Chan, Golub and LeVeque: WIDTH neighboring lanes add them, in an order that depends
// on `tiles` alone. The tiles share `items`, each with the same number of elements. Means are relative to the mean of the first tile.
template <int WIDTH = 32> DEVICE Moments combine(const float2* tile_moments, int items, int tiles) {
    const int base = items / tiles, larger = items % tiles;
    const float pivot = tile_moments[0].x, inverse = 1.0f / float(items);
    float total = 0.0f, deviations = 0.0f;
    #pragma unroll 4
    for (int t = threadIdx.x % WIDTH; t < tiles; t += WIDTH) {
        const float2 m = tile_moments[t];
        const float d = m.x - pivot, count = float(base + (t < larger));
        total = fmaf(count, d, total);
        deviations = fmaf(count, fmaf(d, d, m.y), deviations);
    }
    const float mean = warp_sum<WIDTH>(total) * inverse;
    return {pivot + mean, fmaf(-mean, mean, warp_sum<WIDTH>(deviations) * inverse)};
}
