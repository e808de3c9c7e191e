// Rotary position embeddings: pairs of features of a head are rotated by the angles of its position. fp32 arithmetic.
//
// A thread rotates LANES pairs, two vectors of features, or copies one vector of the features that are not rotated. Threads follow the
// output's order in memory, so the vectors of a row are read and written side by side. Constant angles are loaded before the preceding
// launches end.
//
// One launch rotates one tensor, or two by the same angles: queries and keys.
//
// generated.cuh defines TENSORS (1 or 2), LANES (elements per access), WIDE (fp32 elements), BFLOAT (bf16 elements), RANK (axes of rows),
// TURNING and COPYING (vectors of pairs, and of other features, in a row), PARTS (parts of a head, each with its own pairs), OWN_ANGLES (each feature has an angle, otherwise each pair),
// INTERLEAVED (neighbors are pairs), EARLY (the angles are constant), COSINE_VECTORS and SINE_VECTORS (the angles of a thread are one
// aligned vector).
#include "rotary.cuh"

constexpr u32 THREADS = 128;
constexpr u32 VECTORS = TURNING + COPYING;

struct Tensor {                                    // x and the result, with their strides and the strides of the angles
    const Element* x;
    Element* output;
    u32 count;                                     // threads
    u32 sizes[RANK];
    i64 x_strides[RANK], cosine_strides[RANK], sine_strides[RANK], output_strides[RANK];
};

struct Params {
    const Element* cosines;
    const Element* sines;
    i64 cosine_step, sine_step;                    // elements between the angles of consecutive pairs
    Tensor tensor[TENSORS];
};

// Offsets of a row.
struct Row {
    i64 x, cosines, sines, output;
};

DEVICE Row row_of(const Tensor& t, u32 rest) {
    Row at = {0, 0, 0, 0};
    #pragma unroll
    for (int d = RANK - 1; d >= 0; d--) {
        const u32 k = d ? rest % t.sizes[d] : rest;
        if (d) rest /= t.sizes[d];
        at.x += k * t.x_strides[d];
        at.cosines += k * t.cosine_strides[d];
        at.sines += k * t.sine_strides[d];
        at.output += k * t.output_strides[d];
    }
    return at;
}

#if OWN_ANGLES
// turn(), where each feature of a vector has an angle of its own.
DEVICE void turn_each(float (&feature)[2 * LANES], const Vector (&cosines)[2], const Vector (&sines)[2]) {
    #pragma unroll
    for (int j = 0; j < LANES; j++) {
        const int one = INTERLEAVED ? 2 * j : j, other = INTERLEAVED ? 2 * j + 1 : LANES + j;
        const float u = feature[one], v = feature[other];
        feature[one] = widen(cosines[one / LANES].lane[one % LANES]) * u - widen(sines[one / LANES].lane[one % LANES]) * v;
        feature[other] = widen(sines[other / LANES].lane[other % LANES]) * u + widen(cosines[other / LANES].lane[other % LANES]) * v;
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS) rotary(const __grid_constant__ Params p) {
    launch_dependents();
    if (!EARLY) wait_for_predecessor();
    u32 index = blockIdx.x * THREADS + threadIdx.x;
    const bool second = TENSORS > 1 && index >= p.tensor[0].count;
    if (second) index -= p.tensor[0].count;
    const Tensor& t = p.tensor[second ? TENSORS - 1 : 0];
    if (index >= t.count) return;
    const u32 vector = index % VECTORS, first = vector * LANES;
    const Row row = row_of(t, index / VECTORS);
    const Element* x = t.x + row.x;
    Element* output = t.output + row.output;
    if (COPYING && vector >= TURNING) {
        const u32 at = TURNING * LANES + first;
        if (EARLY) wait_for_predecessor();
        Vector(x + at).store(output + at);
        return;
    }
    const u32 left = place_of(vector), right = left + DISTANCE;
#if OWN_ANGLES
    const Vector cosines[2] = {angles<COSINE_VECTORS>(p.cosines + row.cosines, left, p.cosine_step), angles<COSINE_VECTORS>(p.cosines + row.cosines, right, p.cosine_step)};
    const Vector sines[2] = {angles<SINE_VECTORS>(p.sines + row.sines, left, p.sine_step), angles<SINE_VECTORS>(p.sines + row.sines, right, p.sine_step)};
#else
    const Vector cosines = angles<COSINE_VECTORS>(p.cosines + row.cosines, first, p.cosine_step);
    const Vector sines = angles<SINE_VECTORS>(p.sines + row.sines, first, p.sine_step);
#endif
    if (EARLY) wait_for_predecessor();
    const Vector a(x + left), b(x + right);
    float feature[2 * LANES];
    #pragma unroll
    for (int j = 0; j < LANES; j++) feature[j] = widen(a.lane[j]), feature[LANES + j] = widen(b.lane[j]);
#if OWN_ANGLES
    turn_each(feature, cosines, sines);
#else
    turn(feature, cosines, sines);
#endif
    store_features(output + left, feature);
    store_features(output + right, feature + LANES);
}
