// Vectors of LANES elements (16-bit floats, with WIDE fp32) of tensors that two launches read one after the other, as fp32.
//
// Each access says how long L2 should keep its lines: what is not read again makes room first.
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

DEVICE void store_vector(Element* at, const float (&x)[LANES]) {
#if WIDE
    Vector v;
    #pragma unroll
    for (int i = 0; i < LANES; i++) v.word[i] = __float_as_uint(x[i]);
    if constexpr (LANES == 4)
        *reinterpret_cast<uint4*>(at) = make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]);
    else if constexpr (LANES == 2)
        *reinterpret_cast<uint2*>(at) = make_uint2(v.word[0], v.word[1]);
    else
        *reinterpret_cast<u32*>(at) = v.word[0];
#else
    store_packed(at, pack<LANES>(x));
#endif
}

// ---- tiles and their moments -------------------------------------------------------------------------------------------

// Where part `tile` of `count` items in `tiles` parts begins; the first parts are the larger ones.
DEVICE int tile_begin(int count, int tile, int tiles) { return count / tiles * tile + min(tile, count % tiles); }

// Sum of v over a warp, in all lanes.
DEVICE float warp_sum(float v) {
    #pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) v += __shfl_xor_sync(0xffffffffu, v, distance);
    return v;
}

struct Moments {
    float mean, variance;
};

// 1 / standard deviation. A variance below zero is rounding; NaN stays NaN.
DEVICE float inverse_deviation(const Moments& m, float epsilon) { return rsqrtf((m.variance < 0.0f ? 0.0f : m.variance) + epsilon); }

// The moments (mean, variance) of all tiles as one, by Chan, Golub and LeVeque: a warp adds them up, in an order that depends on
// `tiles` alone. The tiles share out `items` of equally many elements.
DEVICE Moments combine(const float2* tile_moments, int items, int tiles) {
    const int lane = threadIdx.x % 32, base = items / tiles, larger = items % tiles;
    float total = 0.0f, deviations = 0.0f;
    #pragma unroll 4
    for (int t = lane; t < tiles; t += 32) total = fmaf(float(base + (t < larger)), tile_moments[t].x, total);
    const float mean = warp_sum(total) / float(items);
    #pragma unroll 4
    for (int t = lane; t < tiles; t += 32) {
        const float2 m = tile_moments[t];
        deviations = fmaf(float(base + (t < larger)), fmaf(m.x - mean, m.x - mean, m.y), deviations);
    }
    return {mean, warp_sum(deviations) / float(items)};
}
