// Normalization and softmax over the last axis of a matrix: [rows][length] in 16-bit floats or (WIDE) fp32, with fp32 statistics.
//
// GROUP threads take a row. Each thread holds VECTORS vectors of LANES elements in registers as fp32, so that a row is read once and
// written once: first the mean, then the squared deviations from it (no cancellation), then the result. GROUP <= 32 is part of a warp,
// and a block takes several rows; a larger GROUP is the whole block.
//
// generated.cuh defines OPERATION (0 layer norm, 1 RMS norm, or with L2 an L2 norm, 2 softmax, 3 log-softmax), WIDE, LANES, VECTORS, GROUP,
// THREADS, HAS_ADD (the normalized row is input + addend), ADD_LAST (the addend is added to the normalized row instead), PERIODIC
// (the addend's rows repeat), FIRST (1, 2: the input is normalized by operation 0 or 1 before an addend is added), HAS_FIRST_SCALE and
// HAS_FIRST_BIAS, WALKED (the input's rows are spread over up to four axes; other tensors are rows), HAS_SUM (input + addend is a second
// output), HAS_SCALE and HAS_BIAS; EPILOGUE (the result goes through epilogue(), which with RESIDUAL adds the addend); MODULATED (rows of
// an image share factors, and with HAS_SHIFT shifts, after the norm); ROOT (an epsilon is added to the deviation), UNCENTERED (layer norm:
// the mean is not subtracted); BYTES (the input is 8-bit integers, INPUT_UNSIGNED or not, which are dequantized first); NARROW (the result is stored as 1: 8-bit integers, 2: fp8, 3: fp16) and HAS_OUTPUT (it is stored in the
// input's type; WIDENED: in fp32).
#include "tile_vectors.cuh"
#include "narrow.cuh"

constexpr int WARPS = GROUP > 32 ? GROUP / 32 : 1;
constexpr int COUNT = VECTORS * LANES;
constexpr bool EARLY_PARAMETERS = COUNT <= 16;     // few enough to hold the parameters in registers while waiting for the predecessor

#if WIDENED
typedef float Result;
#else
typedef Element Result;
#endif

struct Params {
    const Element* input;
    const Element* addend;
    const float* scale;                            // [length]
    const float* bias;                             // [length]
    Result* output;
    Element* sum;
    u8* narrow;
    int rows, length;
    float epsilon, inverse_length, factor;         // factor multiplies softmax's input
    Narrow to;
    int period;                                    // rows of the addend, where it repeats
    int addend_pitch, pitch;                       // elements between rows of the addend; between rows of both results of the input's type
    int sizes[3];                                  // WALKED: sizes of the three inner axes over which the input's rows are spread
    long long strides[4];                          // WALKED: elements between rows along each axis
    const float* first_scale;                      // FIRST: [length]
    const float* first_bias;
    float first_epsilon;
#if MODULATED
    const Element* factors;
    const Element* shifts;
    int shared, factor_pitch, shift_pitch;         // rows that share factors and shifts; elements between those of two images
    float plus;                                    // added to each factor
#endif
#if ROOT
    float root_epsilon;
#endif
#if BYTES
    float offset, step;                            // of widen_four
#endif
};

// Accurate to the precision of the elements.
#if WIDE
DEVICE float exponential(float x) { return expf(x); }
DEVICE float logarithm(float x) { return logf(x); }
DEVICE float reciprocal(float x) { return 1.0f / x; }
#else
DEVICE float exponential(float x) { return __expf(x); }
DEVICE float logarithm(float x) { return __logf(x); }
DEVICE float reciprocal(float x) { return __fdividef(1.0f, x); }
#endif

// Offset of a row of the input.
DEVICE long long input_at(const Params& p, int row) {
    if (!WALKED) return (long long)row * p.length;
    const int middle = row / p.sizes[2], outer = middle / p.sizes[1];
    return outer / p.sizes[0] * p.strides[0] + outer % p.sizes[0] * p.strides[1] + middle % p.sizes[1] * p.strides[2] +
        row % p.sizes[2] * p.strides[3];
}

// A slot is whole vectors of 16 bytes: the compiler reads it in vectors, which would overlap the other slot.
__shared__ __align__(16) float exchange[2][(WARPS + 3) / 4 * 4];

// Reduces over the row's group. All its threads get the result, and add in the same order.
template <bool MAXIMUM> DEVICE float reduce(float x, int slot) {
    #pragma unroll
    for (int distance = (GROUP < 32 ? GROUP : 32) / 2; distance > 0; distance /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, x, distance);
        x = MAXIMUM ? fmaxf(x, other) : x + other;
    }
    if (GROUP > 32) {
        if (threadIdx.x % 32 == 0) exchange[slot][threadIdx.x / 32] = x;
        __syncthreads();
        x = exchange[slot][0];
        #pragma unroll
        for (int i = 1; i < WARPS; i++) x = MAXIMUM ? fmaxf(x, exchange[slot][i]) : x + exchange[slot][i];
    }
    return x;
}

// Computes the normalization of a row of the input: its mean (MEAN) and the reciprocal of its deviation. `inside`: columns of the row. The
// last sum is exchanged through slot 1, since the row's next reduction uses slot 0.
template <bool MEAN>
DEVICE void moments(const Vector (&raw)[VECTORS], int first, int inside, float inverse_length, float epsilon, float& shift, float& factor) {
    #pragma unroll
    for (int pass = MEAN ? 0 : 1; pass < 2; pass++) {
        float total = 0.0f;
        #pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            if (first + v * GROUP * LANES >= inside) continue;
            #pragma unroll
            for (int i = 0; i < LANES; i++) {
                const float d = lane_of(raw[v], i) - shift;
                total += pass == 0 ? d : d * d;
            }
        }
        total = reduce<false>(total, pass) * inverse_length;
        if (pass == 0) shift = total;
        else factor = rsqrtf(total + epsilon);
    }
}

// The factor of a row whose mean square is `square`. ROOT: a second epsilon is added to the root.
DEVICE float divided(const Params& p, float square) {
#if ROOT
    return 1.0f / (sqrtf(square + p.epsilon) + p.root_epsilon);
#else
    return rsqrtf(square + p.epsilon);
#endif
}

#if WIDENED
DEVICE void store_floats(float* at, const float (&x)[LANES]) {
    if constexpr (LANES % 4 == 0) {
        #pragma unroll
        for (int i = 0; i < LANES; i += 4) reinterpret_cast<float4*>(at)[i / 4] = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
    } else {
        #pragma unroll
        for (int i = 0; i < LANES; i++) at[i] = x[i];
    }
}
#endif

// A vector of the input from an element on.
DEVICE Vector input_vector(const Params& p, long long at) {
#if BYTES
    const u8* from = reinterpret_cast<const u8*>(p.input) + at;
    u32 word[(LANES + 3) / 4];
    if constexpr (LANES == 8) {
        const uint2 x = *reinterpret_cast<const uint2*>(from);
        word[0] = x.x, word[LANES / 8] = x.y;
    } else if constexpr (LANES == 4) {
        word[0] = *reinterpret_cast<const u32*>(from);
    } else if constexpr (LANES == 2) {
        word[0] = *reinterpret_cast<const u16*>(from);
    } else {
        word[0] = *from;
    }
    float x[LANES];
    #pragma unroll
    for (int i = 0; i < LANES; i += 4) {
        float four[4];
        widen_four<INPUT_UNSIGNED>(word[i / 4], p.offset, p.step, four);
        #pragma unroll
        for (int j = 0; j < 4 && i + j < LANES; j++) x[i + j] = four[j];
    }
    return vector_of(x);
#else
    return get_vector(p.input + at);
#endif
}

#if NARROW == 3
// Stores LANES fp32 results as fp16.
DEVICE void store_narrow(const Params& p, long long at, const float (&x)[LANES]) {
    u16* const to = reinterpret_cast<u16*>(p.narrow) + at;
    u32 word[(LANES + 1) / 2];
    #pragma unroll
    for (int i = 0; i < LANES; i += 2) word[i / 2] = pack2(x[i], i + 1 < LANES ? x[i + 1] : 0.0f);
    if constexpr (LANES == 4) *reinterpret_cast<uint2*>(to) = make_uint2(word[0], word[LANES / 4]);
    else if constexpr (LANES == 2) *reinterpret_cast<u32*>(to) = word[0];
    else *to = u16(word[0]);
}
#else
// Stores LANES bytes of the result, equal to the quantized result of the input's type.
DEVICE void store_narrow(const Params& p, long long offset, const float (&floats)[LANES]) {
    u8* const at = p.narrow + offset;
    const Vector x = vector_of(floats);
    u32 word[(LANES + 3) / 4];
    #pragma unroll
    for (int i = 0; i < LANES; i += 4) {
        float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        #pragma unroll
        for (int j = 0; j < 4 && i + j < LANES; j++) v[j] = lane_of(x, i + j);
        word[i / 4] = narrow_four<NARROW == 2>(p.to, v[0], v[1], v[2], v[3]);
    }
    if constexpr (LANES == 8)
        *reinterpret_cast<uint2*>(at) = make_uint2(word[0], word[LANES / 8]);
    else if constexpr (LANES == 4)
        *reinterpret_cast<u32*>(at) = word[0];
    else if constexpr (LANES == 2)
        *reinterpret_cast<u16*>(at) = u16(word[0]);
    else
        *at = u8(word[0]);
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS) rows(const __grid_constant__ Params p) {
    grid_launch_dependents();
    const int row = blockIdx.x * (THREADS / GROUP) + threadIdx.x / GROUP, first = threadIdx.x % GROUP * LANES;
    const long long start = (long long)row * p.pitch;
    float scale[EARLY_PARAMETERS ? COUNT : LANES], bias[EARLY_PARAMETERS ? COUNT : LANES];
    float first_scale[FIRST && EARLY_PARAMETERS ? COUNT : LANES], first_bias[FIRST && EARLY_PARAMETERS ? COUNT : LANES];
    if (EARLY_PARAMETERS && OPERATION < 2) {
        #pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            const int column = first + v * GROUP * LANES, at = EARLY_PARAMETERS ? v * LANES : 0;
            if (column >= p.length) continue;
            if (HAS_SCALE) load_floats<LANES>(scale + at, p.scale + column);
            if (HAS_BIAS) load_floats<LANES>(bias + at, p.bias + column);
            if (FIRST && HAS_FIRST_SCALE) load_floats<LANES>(first_scale + at, p.first_scale + column);
            if (FIRST && HAS_FIRST_BIAS) load_floats<LANES>(first_bias + at, p.first_bias + column);
        }
    }
    const long long from = input_at(p, row);       // before the wait, since both may take divisions
    const long long addend = (long long)(PERIODIC ? row % p.period : row) * p.addend_pitch;
    grid_dependency_wait();

    Vector raw[VECTORS], other[HAS_ADD ? VECTORS : 1];
    #pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int column = first + v * GROUP * LANES;
        if (row >= p.rows || column >= p.length) continue;
        raw[v] = input_vector(p, from + column);
        if (HAS_ADD) other[HAS_ADD ? v : 0] = get_vector(p.addend + addend + column);
    }
    float x[COUNT], shift, factor;
    float first_shift = 0.0f, first_factor = 1.0f;
    if (FIRST) moments<FIRST == 1>(raw, first, row < p.rows ? p.length : 0, p.inverse_length, p.first_epsilon, first_shift, first_factor);
    float total = OPERATION < 2 ? 0.0f : __int_as_float(0xff800000);
    bool nan = false;                          // fmaxf drops NaN; softmax must propagate it
    #pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int column = first + v * GROUP * LANES;
        const bool inside = row < p.rows && column < p.length;
        const int at = FIRST && EARLY_PARAMETERS ? v * LANES : 0;
        if (FIRST && !EARLY_PARAMETERS && inside) {
            if (HAS_FIRST_SCALE) load_floats<LANES>(first_scale, p.first_scale + column);
            if (HAS_FIRST_BIAS) load_floats<LANES>(first_bias, p.first_bias + column);
        }
        #pragma unroll
        for (int i = 0; i < LANES; i++) {
            float value = 0.0f;
            if (inside) value = lane_of(raw[v], i);
            if (FIRST && inside) {
                value = (value - first_shift) * first_factor;
                if (HAS_FIRST_SCALE) value *= first_scale[at + i];
                if (HAS_FIRST_BIAS) value += first_bias[at + i];
            }
            if (HAS_ADD && !ADD_LAST && inside) value += lane_of(other[HAS_ADD ? v : 0], i);
            if (OPERATION >= 2) {
                value *= p.factor;
                if (inside) total = fmaxf(total, value), nan |= value != value;
            } else {
                total += OPERATION == 0 ? value : value * value;
            }
            x[v * LANES + i] = value;
        }
        if (HAS_SUM && inside) put_vector(p.sum + start + column, vector_of(x + v * LANES));
    }
    if (OPERATION >= 2) {
        shift = reduce<true>(total, 0);
        float sum = nan ? __int_as_float(0x7fc00000) : 0.0f;
        #pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            if (first + v * GROUP * LANES >= p.length) continue;
            #pragma unroll
            for (int i = 0; i < LANES; i++) {
                const float e = exponential(x[v * LANES + i] - shift);
                if (OPERATION == 2) x[v * LANES + i] = e;
                sum += e;
            }
        }
        sum = reduce<false>(sum, 1);
        if (OPERATION == 2) shift = 0.0f, factor = reciprocal(sum);
        else shift += logarithm(sum), factor = 1.0f;
    } else if (OPERATION == 0) {
        shift = reduce<false>(total, 0) * p.inverse_length;
        float squares = 0.0f;
        #pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            if (first + v * GROUP * LANES >= p.length) continue;
            #pragma unroll
            for (int i = 0; i < LANES; i++) {
                const float d = x[v * LANES + i] - shift;
                squares = fmaf(d, d, squares);
            }
        }
        factor = divided(p, reduce<false>(squares, 1) * p.inverse_length);
#if UNCENTERED
        shift = 0.0f;
#endif
    } else {
        shift = 0.0f;
        const float squares = reduce<false>(total, 0);
        if (L2) {
            const float length = sqrtf(squares), divisor = length < p.epsilon ? p.epsilon : length;   // NaN stays
            factor = divisor == 0.0f ? 1.0f : 1.0f / divisor;
        } else {
            factor = divided(p, squares * p.inverse_length);
        }
    }
    #pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int column = first + v * GROUP * LANES, at = EARLY_PARAMETERS ? v * LANES : 0;
        if (column >= p.length) continue;
        if (!EARLY_PARAMETERS && OPERATION < 2) {
            if (HAS_SCALE) load_floats<LANES>(scale, p.scale + column);
            if (HAS_BIAS) load_floats<LANES>(bias, p.bias + column);
        }
        if (row >= p.rows) continue;
        float y[LANES];
#if MODULATED
        const long long image = row / p.shared;
        const Vector factors = get_vector(p.factors + image * p.factor_pitch + column);
        Vector shifts;
        if (HAS_SHIFT) shifts = get_vector(p.shifts + image * p.shift_pitch + column);
#endif
        #pragma unroll
        for (int i = 0; i < LANES; i++) {
            float value = (x[v * LANES + i] - shift) * factor;
            if (OPERATION < 2 && HAS_SCALE) value *= scale[at + i];
            if (OPERATION < 2 && HAS_BIAS) value += bias[at + i];
#if MODULATED
            value *= lane_of(factors, i) + p.plus;
            if (HAS_SHIFT) value += lane_of(shifts, i);
#endif
            const float added = ADD_LAST ? lane_of(other[HAS_ADD ? v : 0], i) : 0.0f;
            if (ADD_LAST && !RESIDUAL) value += added;
#if EPILOGUE
            value = epilogue(value, 0.0f, added);
#endif
            y[i] = value;
        }
#if WIDENED
        store_floats(p.output + start + column, y);
#else
        if (HAS_OUTPUT) put_vector(p.output + start + column, vector_of(y));
#endif
        if (NARROW) store_narrow(p, (long long)row * p.length + column, y);
    }
}
