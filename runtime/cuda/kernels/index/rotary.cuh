// Shared by the kernels of rotary position embeddings: vectors of features and of angles, and the rotation itself.
#pragma once
#include "element.cuh"

typedef Pack<Element, LANES> Vector;
static_assert(LANES > 1 && LANES * sizeof(Element) <= 16, "one access");

template <bool VECTOR> DEVICE Vector angles(const Element* row, u32 first, i64 step) {
    if constexpr (VECTOR) return Vector(row + first);
    Vector v;
    #pragma unroll
    for (int j = 0; j < LANES; j++) v.lane[j] = row[(first + j) * step];
    return v;
}

DEVICE void store_features(Element* at, const float* feature) {
    Vector v;
    #pragma unroll
    for (int j = 0; j < LANES; j++) v.lane[j] = narrow<Element>(feature[j]);
    v.store(at);
}

#ifndef PARTS
#define PARTS 1                                    // parts of a head that each form their own pairs
#endif

// The place in a head of a vector's first features, and the distance to its second features.
constexpr u32 PART = TURNING / PARTS;              // vectors of pairs in a part
constexpr u32 DISTANCE = (INTERLEAVED ? 1 : PART) * LANES;
DEVICE u32 place_of(u32 vector) {
    return (INTERLEAVED ? 2 * vector : vector / PART * PART + vector) * LANES;
}

// Rotates LANES pairs: neighbors, or a feature of the first vector with one of the second.
DEVICE void turn(float (&feature)[2 * LANES], const Vector& cosines, const Vector& sines) {
    #pragma unroll
    for (int j = 0; j < LANES; j++) {
        float& one = feature[INTERLEAVED ? 2 * j : j];
        float& other = feature[INTERLEAVED ? 2 * j + 1 : LANES + j];
        const float u = one, v = other, cosine = widen(cosines.lane[j]), sine = widen(sines.lane[j]);
        one = cosine * u - sine * v;
        other = sine * u + cosine * v;
    }
}
