// Norms of the queries' and keys' heads, and rotary position embeddings of the normalized heads: one launch instead of three. fp32 arithmetic.
//
// SHARE threads (a power of two) share a head's row: each rotates LANES pairs, two vectors of features, or copies one vector of the features
// that are not rotated. A norm covers each head (added within a warp), or all heads of a token together (added within a block). Scales,
// biases and constant angles are loaded before the preceding launches end.
//
// generated.cuh defines LANES (elements per access), WIDE (fp32 elements), BFLOAT (bf16 elements), TURNING and COPYING (vectors of pairs, and
// of other features, in a row), PARTS (parts of a head, each with its own pairs), INTERLEAVED (neighbors are pairs), EARLY (the angles are constant), COSINE_VECTORS and SINE_VECTORS (the
// angles of a thread are one aligned vector), SHARE, THREADS (of a block), TOKENS (a norm covers all heads of a token), CENTERED (layer norms,
// otherwise RMS norms) and BIASED.
#include "rotary.cuh"

constexpr u32 VECTORS = TURNING + COPYING, SIZE = (2 * TURNING + COPYING) * LANES, WARPS = THREADS / 32;

struct Tensor {                                    // x and the result (batch, heads, length), with their strides and the strides of the angles
    const Element* x;
    Element* output;
    const float* scale;                            // [features of a norm]
    const float* bias;
    u32 rows, length, heads;                       // rows: number of norms
    i64 x_strides[3], output_strides[3], cosine_strides[2], sine_strides[2];
};

struct Params {
    const Element* cosines;
    const Element* sines;
    i64 cosine_step, sine_step;                    // elements between the angles of consecutive pairs
    float epsilon;
    Tensor tensor[2];
};

// The sum over the threads of a norm, in a fixed order.
DEVICE float total(float v, float (&partial)[WARPS]) {
    #pragma unroll
    for (int m = TOKENS ? 16 : SHARE / 2; m; m /= 2) v += __shfl_xor_sync(0xffffffffu, v, m);
    if (!TOKENS) return v;
    __syncthreads();                               // the previous sums have been read
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0.0f;
    #pragma unroll
    for (int i = 0; i < WARPS; i++) v += partial[i];
    return v;
}

DEVICE void load_floats(float* to, const float* from) {
    #pragma unroll
    for (int j = 0; j < LANES; j++) to[j] = from[j];
}

extern "C" __global__ void __launch_bounds__(THREADS) rotary_norm(const __grid_constant__ Params p) {
    __shared__ float partial[WARPS];
    launch_dependents();
    u32 row = TOKENS ? blockIdx.x : blockIdx.x * (THREADS / SHARE) + threadIdx.x / SHARE;
    const bool second = row >= p.tensor[0].rows;
    if (second) row -= p.tensor[0].rows;
    const Tensor& t = p.tensor[second];
    const u32 vector = threadIdx.x % SHARE, head = TOKENS ? threadIdx.x / SHARE : row % t.heads, token = TOKENS ? row : row / t.heads;
    const u32 position = token % t.length, image = token / t.length;
    const bool live = vector < VECTORS && head < t.heads && row < t.rows, turns = vector < TURNING;
    const u32 left = turns ? place_of(vector) : (TURNING + vector) * LANES;
    const u32 right = turns ? left + DISTANCE : left;  // the same vector where nothing is rotated

    float scale[2 * LANES] = {}, bias[2 * LANES] = {}, feature[2 * LANES] = {};
    Vector cosines, sines;
    if (!EARLY) wait_for_predecessor();
    if (live) {
        const u32 first = TOKENS ? head * SIZE : 0;
        load_floats(scale, t.scale + first + left);
        load_floats(scale + LANES, t.scale + first + right);
        if (BIASED) load_floats(bias, t.bias + first + left), load_floats(bias + LANES, t.bias + first + right);
        if (turns) {
            cosines = angles<COSINE_VECTORS>(p.cosines + image * t.cosine_strides[0] + position * t.cosine_strides[1], vector * LANES, p.cosine_step);
            sines = angles<SINE_VECTORS>(p.sines + image * t.sine_strides[0] + position * t.sine_strides[1], vector * LANES, p.sine_step);
        }
    }
    if (EARLY) wait_for_predecessor();
    if (live) {
        const Element* x = t.x + image * t.x_strides[0] + head * t.x_strides[1] + position * t.x_strides[2];
        const Vector a(x + left), b(x + right);
        #pragma unroll
        for (int j = 0; j < LANES; j++) feature[j] = widen(a.lane[j]), feature[LANES + j] = turns ? widen(b.lane[j]) : 0.0f;
    }
    const float length = float(TOKENS ? SIZE * t.heads : SIZE);
    float sum = 0.0f, squares = 0.0f, mean = 0.0f;
    if (CENTERED) {
        #pragma unroll
        for (int j = 0; j < 2 * LANES; j++) sum += feature[j];
        mean = total(sum, partial) / length;
    }
    #pragma unroll
    for (int j = 0; j < 2 * LANES; j++)
        if (live && (turns || j < LANES)) squares += (feature[j] - mean) * (feature[j] - mean);
    const float factor = 1.0f / sqrtf(total(squares, partial) / length + p.epsilon);
    if (!live) return;
    #pragma unroll
    for (int j = 0; j < 2 * LANES; j++) feature[j] = (feature[j] - mean) * factor * scale[j] + bias[j];
    Element* output = t.output + image * t.output_strides[0] + head * t.output_strides[1] + position * t.output_strides[2];
    if (turns) {
        turn(feature, cosines, sines);
        store_features(output + right, feature + LANES);
    }
    store_features(output + left, feature);
}
