// The register part of both depthwise kernels, for fp32, 16-bit and 8-bit images: TILE_H x TILE_W output pixels of LANES channels per
// thread, from rows of input vectors.
#pragma once
#include "vectors.cuh"
#include "generated.cuh"
#include "conv_element.cuh"

// One axis of the filter. Result t of a tile reads, of the tile's inputs from the first one on, input ``t * stride + tap * dilation``. If
// the convolution is transposed, it reads input ``(t + phase - tap) / stride - first``, where this is whole. (A tile begins at a multiple
// of ``stride``; ``phase``: the begin of the pads modulo ``stride``.)
struct Axis {
    int kernel, stride, dilation, phase;

    // Inputs under a tile of this many results.
    constexpr __device__ int reach(int results) const {
        return TRANSPOSED ? (results - 1 + phase) / stride - first() + 1 : (results - 1) * stride + (kernel - 1) * dilation + 1;
    }
    constexpr __device__ int first() const { return -((kernel - 1 - phase) / stride); }
    // The input that result t reads with a tap, or -1.
    constexpr __device__ int input(int t, int tap) const {
        return !TRANSPOSED ? t * stride + tap * dilation : (t + phase - tap + kernel * stride) % stride ? -1 : (t + phase - tap) / stride - first();
    }
    // The tap with which result t reads input i, or -1.
    constexpr __device__ int tap(int t, int i) const {
        const int tap = TRANSPOSED ? t + phase - (i + first()) * stride : i - t * stride;
        return tap < 0 || tap % dilation || tap / dilation >= kernel ? -1 : tap / dilation;
    }
};

constexpr Axis DOWN = {KERNEL_H, STRIDE_H, DILATION_H, PHASE_H}, ALONG = {KERNEL_W, STRIDE_W, DILATION_W, PHASE_W};
constexpr int TAPS = KERNEL_H * KERNEL_W;          // of a step
constexpr int FILTERS = 1 + BESIDE;                // convolutions of a launch
constexpr bool STEPWISE = KERNEL_D > 0 || BANDS > 1;  // whether a thread adds frames of volumes, or bands of the filter's rows, one after another
constexpr int ROWS = DOWN.reach(TILE_H), COLUMNS = ALONG.reach(TILE_W);
// Few weights stay in registers. Where a thread takes steps, it needs each weight only once and reads it from L1.
constexpr bool WEIGHTS_IN_SHARED = !STEPWISE && TAPS > 9, WEIGHTS_IN_REGISTERS = !STEPWISE && TAPS <= 9;

constexpr int SUMS = TILE_H * TILE_W * LANES;      // accumulators of a thread
typedef float Tile[TILE_H][TILE_W][LANES];

#if OPERAND_ITEM == 4
static_assert(LANES == 4, "one access");
typedef float Weight;
struct Vector { u32 word[LANES]; };
DEVICE float element(const Vector& v, int i) { return __uint_as_float(v.word[i]); }
DEVICE Vector load_weights(const Weight* at) {
    const uint4 x = *reinterpret_cast<const uint4*>(at);
    return {x.x, x.y, x.z, x.w};
}
#else
typedef u16 Weight;                                // 8-bit weights are exact in fp16
typedef Packed<LANES> Vector;                      // of weights, and of 16-bit results
DEVICE Vector load_weights(const Weight* at) { return load_packed<LANES>(at); }
#endif

#if OPERAND_ITEM == 4
typedef float Element;
typedef Vector Input;
DEVICE Input load_input(const Element* at) {
    Input v = load_weights(at);
    #pragma unroll
    for (int i = 0; RELU_BEFORE && i < LANES; i++)  // a NaN stays NaN
        v.word[i] = v.word[i] >> 31 && (v.word[i] & 0x7fffffffu) <= 0x7f800000u ? 0u : v.word[i];
    return v;
}
DEVICE float value(const Input& v, int i) { return element(v, i); }
#elif OPERAND_ITEM == 1
typedef u8 Element;
struct Input { u32 word[LANES / 4]; };             // LANES bytes

DEVICE Input load_input(const Element* at) {
    Input v;
    if constexpr (LANES == 8) {
        const uint2 x = *reinterpret_cast<const uint2*>(at);
        v.word[0] = x.x, v.word[1] = x.y;
    } else {
        v.word[0] = *reinterpret_cast<const u32*>(at);
    }
    return v;
}
// A byte in the low mantissa of 2^23 makes a float. Products, and sums of 49 products, are exact in fp32.
DEVICE float value(const Input& v, int i) {
    const u32 word = INPUT_UNSIGNED ? v.word[i / 4] : v.word[i / 4] ^ 0x80808080u;
    return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 + i % 4)) - (INPUT_UNSIGNED ? 8388608.0f : 8388736.0f);
}
#else
typedef u16 Element;
typedef Vector Input;
DEVICE Input load_input(const Element* at) {
    Input v = load_packed<LANES>(at);
    #pragma unroll
    for (int i = 0; RELU_BEFORE && i < LANES / 2; i++) v.word[i] = relu2(v.word[i]);
    return v;
}
DEVICE float value(const Input& v, int i) { return element(v, i); }
#endif

// A vector outside the image: ``word`` is the 8-bit zero point in each byte, else 0.
DEVICE Input no_input(u32 word) {
    Input v;
    #pragma unroll
    for (int i = 0; i < LANES * OPERAND_ITEM / 4; i++) v.word[i] = word;
    return v;
}

DEVICE Vector zeros() {
    Vector v;
    #pragma unroll
    for (int i = 0; i < int(sizeof(Vector)) / 4; i++) v.word[i] = 0u;
    return v;
}

DEVICE void clear(Tile& acc) {
    #pragma unroll
    for (int i = 0; i < SUMS; i++) (&acc[0][0][0])[i] = 0.0f;
}

// load(r, in) fills a row of COLUMNS vectors; weight(tap) gives the weights of a tap. Each row is loaded once.
template <class Load, class Weight> DEVICE void accumulate(Tile& acc, const Load& load, const Weight& weight) {
    #pragma unroll
    for (int r = 0; r < ROWS; r++) {
        bool used = false;                         // with a dilation or a stride some rows meet no tap
        #pragma unroll
        for (int t = 0; t < TILE_H; t++) used |= DOWN.tap(t, r) >= 0;
        if (!used) continue;
        Input in[COLUMNS];
        load(r, in);
        #pragma unroll
        for (int t = 0; t < TILE_H; t++) {
            if (DOWN.tap(t, r) < 0) continue;
            #pragma unroll
            for (int s = 0; s < KERNEL_W; s++) {
                const Vector w = weight(DOWN.tap(t, r) * KERNEL_W + s);
                #pragma unroll
                for (int i = 0; i < LANES; i++) {
                    const float factor = element(w, i);
                    #pragma unroll
                    for (int x = 0; x < TILE_W; x++)
                        if (ALONG.input(x, s) >= 0) acc[t][x][i] = fmaf(value(in[ALONG.input(x, s)], i), factor, acc[t][x][i]);
                }
            }
        }
    }
}

// Elements from a pixel to the next, and from an image to the next. Volumes have so many frames; between the last frame of a volume and the
// first one of the next there are ``gap`` elements more (or less).
struct Places {
    int pitch, image;
#if KERNEL_D
    int frames, gap;
#endif

    __device__ __forceinline__ long long at(int n, int pixel) const {
        long long from = (long long)n * image + (long long)pixel * pitch;
#if KERNEL_D
        from += (long long)(n / frames) * gap;
#endif
        return from;
    }
};

struct Output {
    u8* output;                                    // only the channels of each pixel are written
    const u8* residual;
    int out_h, out_w;
    Places out, added;
    const Requantize* requantize;
};

// The residual of a thread's pixels. It is loaded as a whole: a load after a store would wait for it.
constexpr int ADDED_WORDS = LANES * OUT_ITEM / 4;  // of a pixel
struct Addends { u32 word[HAS_RESIDUAL ? TILE_H * TILE_W : 1][ADDED_WORDS]; };

DEVICE void load_addends(const Output& p, Addends& added, bool live, int n, int out_y, int out_x, int vector) {
#if HAS_RESIDUAL
    #pragma unroll
    for (int t = 0; t < TILE_H; t++) {
        #pragma unroll
        for (int x = 0; x < TILE_W; x++) {
            u32 (&word)[ADDED_WORDS] = added.word[t * TILE_W + x];
            #pragma unroll
            for (int i = 0; i < ADDED_WORDS; i++) word[i] = 0u;
            if (!live || out_y + t >= p.out_h || out_x + x >= p.out_w) continue;
            const u8* at = p.residual + (p.added.at(n, (out_y + t) * p.out_w + out_x + x) + vector * LANES) * OUT_ITEM;
            if constexpr (ADDED_WORDS == 4) {
                const uint4 v = *reinterpret_cast<const uint4*>(at);
                word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
            } else if constexpr (ADDED_WORDS == 2) {
                const uint2 v = *reinterpret_cast<const uint2*>(at);
                word[0] = v.x, word[1] = v.y;
            } else {
                word[0] = *reinterpret_cast<const u32*>(at);
            }
        }
    }
#endif
}

// LANES results of one pixel from their accumulators. ``at``: offset of the output; ``added``: the pixel's residual; ``beside``: with
// BESIDE, the results of the other convolution.
DEVICE void finish_vector(const Output& p, long long at, const u32 (&added)[ADDED_WORDS], const float (&acc)[LANES], const Channel (&c)[LANES],
                          const float* beside, float (&y)[LANES]) {
#if BESIDE
    #pragma unroll
    for (int i = 0; i < LANES; i++) y[i] = finished(*p.requantize, acc[i], c[i], beside[i]);
#if OUT_ITEM == 4
    reinterpret_cast<float4*>(p.output)[at / 4] = make_float4(y[0], y[1], y[2], y[3]);
#else
    store_packed(reinterpret_cast<u16*>(p.output) + at, pack<LANES>(y));
#endif
#elif OUT_ITEM == 1
    u32 words[LANES / 4];
    #pragma unroll
    for (int i = 0; i < LANES; i += 4) {
        float r[4];
        widen_residual(*p.requantize, HAS_RESIDUAL ? added[i / 4] : 0u, r);
        #pragma unroll
        for (int j = 0; j < 4; j++) y[i + j] = finished(*p.requantize, acc[i + j], c[i + j], r[j]);
        words[i / 4] = narrow4(*p.requantize, y[i], y[i + 1], y[i + 2], y[i + 3]);
        #pragma unroll
        for (int j = i; SQUEEZE && j < i + 4; j++)  // the value of the integer, in whole steps
            y[j] = __fsub_rn(__fadd_rn(bounded(y[j], p.requantize->low, p.requantize->high), 12582912.0f), 12582912.0f);
    }
    if constexpr (LANES == 8)
        *reinterpret_cast<uint2*>(p.output + at) = make_uint2(words[0], words[1]);
    else
        *reinterpret_cast<u32*>(p.output + at) = words[0];
#elif OUT_ITEM == 4
    #pragma unroll
    for (int i = 0; i < LANES; i += 4) {
        #pragma unroll
        for (int j = i; j < i + 4; j++) y[j] = finished(*p.requantize, acc[j], c[j], HAS_RESIDUAL ? __uint_as_float(added[j]) : 0.0f);
        reinterpret_cast<float4*>(p.output)[(at + i) / 4] = make_float4(y[i], y[i + 1], y[i + 2], y[i + 3]);
    }
#else
    Vector r = zeros();
    #pragma unroll
    for (int i = 0; HAS_RESIDUAL && i < ADDED_WORDS; i++) r.word[i] = added[i];
    #pragma unroll
    for (int i = 0; i < LANES; i++) y[i] = finished(*p.requantize, acc[i], c[i], element(r, i));
    store_packed(reinterpret_cast<u16*>(p.output) + at, pack<LANES>(y));
#endif
}

DEVICE void store_mean(u8* means, long long at, float total, const Narrow& to) {
#if OUT_ITEM == 1
    means[at] = u8(narrow_four<false>(to, total, 0.0f, 0.0f, 0.0f));
#elif OUT_ITEM == 4
    reinterpret_cast<float*>(means)[at] = total * to.factor;
#else
    reinterpret_cast<u16*>(means)[at] = pack1(total * to.factor);
#endif
}

DEVICE void load_constants(const Channel* at, Channel (&c)[LANES]) {
    #pragma unroll
    for (int i = 0; i < LANES; i += 4) load_four(at, i, LANES, *reinterpret_cast<Channel(*)[4]>(&c[i]));
}

// Epilogue and store of the pixels inside the image; sums each channel for the squeeze. ``beside``: the accumulators for BESIDE.
DEVICE void finish(const Output& p, const Tile& acc, const Addends& added, const Channel (&constants)[LANES], float (&sum)[LANES], bool live, int n,
                   int out_y, int out_x, int vector, const Tile* beside = nullptr) {
    #pragma unroll
    for (int i = 0; i < LANES; i++) sum[i] = 0.0f;
    #pragma unroll
    for (int t = 0; t < TILE_H; t++) {
        #pragma unroll
        for (int x = 0; x < TILE_W; x++) {
            if (!live || out_y + t >= p.out_h || out_x + x >= p.out_w) continue;
            float y[LANES];
            finish_vector(p, p.out.at(n, (out_y + t) * p.out_w + out_x + x) + vector * LANES, added.word[HAS_RESIDUAL ? t * TILE_W + x : 0], acc[t][x], constants,
                          BESIDE ? (*beside)[t][x] : nullptr, y);
            #pragma unroll
            for (int i = 0; i < LANES; i++) sum[i] += y[i];
        }
    }
}
