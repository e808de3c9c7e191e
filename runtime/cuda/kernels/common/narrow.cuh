// fp32 values in units of a quantized result -> bytes: bounded, rounded half to even, shifted by the zero point.
#pragma once

DEVICE float bounded(float x, float low, float high) { return fminf(fmaxf(x, low), high); }

// NaN stays NaN, which fp8 can represent.
DEVICE float bounded_or_nan(float x, float low, float high) {
    asm("max.NaN.f32 %0, %0, %1; min.NaN.f32 %0, %0, %2;" : "+f"(x) : "f"(low), "f"(high));
    return x;
}

template <bool FLOAT8> DEVICE u32 narrow_four(float a, float b, float c, float d, float low, float high, int zero) {
    if constexpr (FLOAT8) {
        u32 word;
        asm("{.reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %2, %1; cvt.rn.satfinite.e4m3x2.f32 h, %4, %3; mov.b32 %0, {l, h};}"
            : "=r"(word) : "f"(bounded_or_nan(a, low, high)), "f"(bounded_or_nan(b, low, high)),
              "f"(bounded_or_nan(c, low, high)), "f"(bounded_or_nan(d, low, high)));
        return word;
    } else {
        const float v[4] = {a, b, c, d};
        u32 bits[4];
        #pragma unroll
        for (int i = 0; i < 4; i++)                // added to 1.5 * 2^23, a float is rounded to an integer in its low bits
            bits[i] = __float_as_uint(__fadd_rn(bounded(v[i], low, high), 12582912.0f)) + zero;
        return __byte_perm(__byte_perm(bits[0], bits[1], 0x0040), __byte_perm(bits[2], bits[3], 0x0040), 0x5410);
    }
}

// The reverse, for integers: the four bytes of a word, minus ``offset`` (the bias of signed bytes plus the zero point), times ``scale``.
template <bool UNSIGNED> DEVICE void widen_four(u32 word, float offset, float scale, float (&r)[4]) {
    if (!UNSIGNED) word ^= 0x80808080u;
    #pragma unroll
    for (int i = 0; i < 4; i++)                    // a byte in the low mantissa of 2^23 makes a float
        r[i] = __fmul_rn(__fsub_rn(__uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 + i)), offset), scale);
}

// Constants for an additional 8-bit result of a floating-point kernel: the reciprocal of the scale, bounds before the zero point is added.
struct Narrow {
    float factor, low, high;
    int zero;
};

// The values, as rounded to 16 bits, times the factor.
template <bool FLOAT8> DEVICE u32 narrow_four(const Narrow& n, float a, float b, float c, float d) {
    return narrow_four<FLOAT8>(__fmul_rn(a, n.factor), __fmul_rn(b, n.factor), __fmul_rn(c, n.factor), __fmul_rn(d, n.factor),
                               n.low, n.high, n.zero);
}
