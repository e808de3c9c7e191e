// Element types of the Hopper convolution kernels: the accumulator, the constants of an output channel in its epilogue, and the storage
// of results and residuals.
//
// generated.cuh defines OPERAND_ITEM and OUT_ITEM (bytes of an operand, and of a result or residual; 4: fp32, for DIRECT stores alone),
// INTEGER (accumulators are int, else float), and for results of one byte OUT_FLOAT8, OUT_ZERO (whether a zero point is added),
// RESIDUAL_UNSIGNED. 16-bit types: see pack2() in ptx.cuh.
// SCALED: epilogue() multiplies 16-bit accumulators and residuals by the channel's factor, then adds a shift.
// IMAGE_SCALED: another launch computes the factors, one per image and channel. A channel has its factor and its bias.
// CHANNEL_STAGES: stages read further constants of the channel, besides its bias.
// ROW_SCALED: RowScales has converted integer accumulators to floats, in place.
// DYNAMIC: another launch computes the scale and zero point of the pixels. The channel's sum of weights, times the zero point, is
// subtracted from the accumulator while it is an integer.
// PAIRED: a channel and the next one become one result, so OUT_ITEM is half the bytes of a result. In place of a residual, epilogue() of
// the first channel gets the result of epilogue_beside() for the second.
#pragma once
#include "narrow.cuh"

#if INTEGER
typedef int Acc;
typedef int4 Acc4;
#else
typedef float Acc;
typedef float4 Acc4;
#endif

// Constants that turn accumulators of 8-bit products into results. They are parameters of a layer, so that layers share kernels.
// widen_residual() subtracts residual_offset; low and high bound the result before its zero point is added.
struct Requantize {
    float residual_scale, residual_offset, low, high;
    int zero;
    float constants[12];                            // of the stages
};

#ifndef DYNAMIC
#define DYNAMIC 0
#endif
#ifndef IMAGE_SCALED
#define IMAGE_SCALED 0
#endif

#if DYNAMIC
static_assert(INTEGER, "a zero point is of integers");
typedef float4 StoredChannel;                      // the weights' scale, bias, sum of weights
struct Channel {
    float scale, bias;
    int shift;
};
DEVICE Channel no_channel() { return {0.0f, 0.0f, 0}; }
DEVICE float finished(const Requantize& q, Acc sum, const Channel& c, float r) {
    return epilogue(__fmul_rn(float(sum - c.shift), c.scale), c.bias, r, q.constants);
}
template <class Params> DEVICE Channel channel_at(const Params& p, int at) {
    const float4 c = __ldg(p.channel + at);
    return {__fmul_rn(*p.data_scale, c.x), c.y, int(*p.data_zero) * int(c.z)};
}
template <class Params> DEVICE void load_four(const Params& p, int at, int count, Channel (&c)[4]) {
    grid_dependency_wait();                        // the scale is another kernel's result
    #pragma unroll
    for (int i = 0; i < 4; i++) c[i] = at < count ? channel_at(p, at + i) : no_channel();
}
#else
#if OPERAND_ITEM == 1
#if ROW_SCALED
DEVICE float widened(Acc sum) { return __int_as_float(sum); }
#else
DEVICE float widened(Acc sum) { return float(sum); }
#endif
#endif
#if CHANNEL_STAGES
typedef float4 Channel;                            // bias, and constants that stages read; of 8 bits: first the scale
DEVICE Channel no_channel() { return make_float4(0.0f, 0.0f, 0.0f, 0.0f); }
#if OPERAND_ITEM == 1
DEVICE float finished(const Requantize& q, Acc sum, Channel c, float r) {
    return epilogue(__fmul_rn(widened(sum), c.x), make_float4(c.y, c.z, c.w, 0.0f), r, q.constants);
}
#else
DEVICE float finished(const Requantize&, Acc sum, Channel c, float r) { return epilogue(sum, c, r); }
#endif
DEVICE void load_four(const Channel* from, int at, int count, Channel (&c)[4]) {
    #pragma unroll
    for (int i = 0; i < 4; i++) c[i] = at < count ? __ldg(from + at + i) : no_channel();
}
#elif OPERAND_ITEM == 1 || SCALED || IMAGE_SCALED
typedef float2 Channel;                            // scale, bias
DEVICE Channel no_channel() { return make_float2(0.0f, 0.0f); }
#if SCALED || IMAGE_SCALED
DEVICE float finished(const Requantize&, Acc sum, Channel c, float r) { return epilogue(sum, c, r); }
#else
DEVICE float finished(const Requantize& q, Acc sum, Channel c, float r) {
    return epilogue(__fmul_rn(widened(sum), c.x), c.y, r, q.constants);
}
#endif
DEVICE void load_four(const Channel* from, int at, int count, Channel (&c)[4]) {
    #pragma unroll
    for (int i = 0; i < 4; i++) c[i] = no_channel();
    if (at >= count) return;
    const float4 a = __ldg(reinterpret_cast<const float4*>(from + at)), b = __ldg(reinterpret_cast<const float4*>(from + at + 2));
    c[0] = make_float2(a.x, a.y), c[1] = make_float2(a.z, a.w), c[2] = make_float2(b.x, b.y), c[3] = make_float2(b.z, b.w);
}
#else
typedef float Channel;                             // bias
DEVICE Channel no_channel() { return 0.0f; }
DEVICE float finished(const Requantize&, Acc sum, Channel c, float r) { return epilogue(sum, c, r); }
DEVICE void load_four(const Channel* from, int at, int count, Channel (&c)[4]) {
    const float4 v = at < count ? __ldg(reinterpret_cast<const float4*>(from + at)) : make_float4(0, 0, 0, 0);
    c[0] = v.x, c[1] = v.y, c[2] = v.z, c[3] = v.w;
}
#endif
#if IMAGE_SCALED
typedef float StoredChannel;                       // bias; load_factor() adds the factor
template <class Params> DEVICE Channel channel_at(const Params& p, int at) { return make_float2(0.0f, p.channel[at]); }
template <class Params> DEVICE void load_four(const Params& p, int at, int count, Channel (&c)[4]) {
    #pragma unroll
    for (int i = 0; i < 4; i++) c[i] = at < count ? channel_at(p, at + i) : no_channel();
}
// After griddepcontrol.wait.
template <class Params> DEVICE void load_factor(const Params& p, int at, int image, Channel& c) {
    c.x = at < p.gate_channels ? low_float(p.gate[(long long)image * p.gate_pitch + at]) : 0.0f;
}
#else
typedef Channel StoredChannel;
template <class Params> DEVICE Channel channel_at(const Params& p, int at) { return p.channel[at]; }
template <class Params> DEVICE void load_four(const Params& p, int at, int count, Channel (&c)[4]) { load_four(p.channel, at, count, c); }
#endif
#endif

// Two results of one pixel. FINAL_SILU: epilogue() omits the last stage, which is applied to both together.
DEVICE void finish_two(const Requantize& q, Acc a, Acc b, Channel first, Channel second, float r, float s, float& x, float& y) {
    x = finished(q, a, first, r), y = finished(q, b, second, s);
#if FINAL_SILU
    silu_pair(x, y);
#endif
}
DEVICE u32 finish_pair(const Requantize& q, Acc a, Acc b, Channel first, Channel second, float r, float s) {
    float x, y;
    finish_two(q, a, b, first, second, r, s, x, y);
    return pack2(x, y);
}

#if PAIRED
static_assert(OPERAND_ITEM == 2 * OUT_ITEM && !HAS_RESIDUAL, "pairs are of floats, whose stages read no other tensor");

DEVICE float of_pair(Acc a, Channel first, Acc b, Channel second) { return epilogue(a, first, epilogue_beside(b, second, 0.0f)); }
#endif

#if PAIRED && OUT_ITEM == 2
typedef uint2 Four;
DEVICE Four finish_four(const Requantize&, Acc4 v, const Channel (&c)[4], Four) {
    return make_uint2(__float_as_uint(of_pair(v.x, c[0], v.y, c[1])), __float_as_uint(of_pair(v.z, c[2], v.w, c[3])));
}
#elif OUT_ITEM == 2
typedef uint2 Four;
DEVICE Four finish_four(const Requantize& q, Acc4 v, const Channel (&c)[4], const float (&r)[4]) {
    return make_uint2(finish_pair(q, v.x, v.y, c[0], c[1], r[0], r[1]), finish_pair(q, v.z, v.w, c[2], c[3], r[2], r[3]));
}
DEVICE Four finish_four(const Requantize& q, Acc4 v, const Channel (&c)[4], Four r) {
    return finish_four(q, v, c, {low_float(r.x), high_float(r.x), low_float(r.y), high_float(r.y)});
}
#elif OUT_ITEM == 4
typedef float4 Four;
DEVICE Four finish_four(const Requantize& q, Acc4 v, const Channel (&c)[4], Four r) {
    float4 y;
    finish_two(q, v.x, v.y, c[0], c[1], r.x, r.y, y.x, y.y);
    finish_two(q, v.z, v.w, c[2], c[3], r.z, r.w, y.z, y.w);
    return y;
}
#else
typedef u32 Four;

// The four residuals of a word, times their scale.
DEVICE void widen_residual(const Requantize& q, u32 word, float (&r)[4]) {
    if (!HAS_RESIDUAL) {
        r[0] = r[1] = r[2] = r[3] = 0.0f;
        return;
    }
#if OUT_FLOAT8
    u32 low, high;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}" : "=r"(low), "=r"(high) : "r"(word));
    r[0] = low_half(low), r[1] = high_half(low), r[2] = low_half(high), r[3] = high_half(high);
    #pragma unroll
    for (int i = 0; i < 4; i++) r[i] = __fmul_rn(r[i], q.residual_scale);
#else
    widen_four<RESIDUAL_UNSIGNED>(word, q.residual_offset, q.residual_scale, r);
#endif
}

#if PAIRED
// Two pairs of accumulators, each with the constants of its channels -> two 16-bit results in one word.
DEVICE u32 finish_pairs(const Acc (&a)[2], const Channel (&first)[2], const Acc (&b)[2], const Channel (&second)[2]) {
    return pack2(of_pair(a[0], first[0], a[1], first[1]), of_pair(b[0], second[0], b[1], second[1]));
}

DEVICE Four finish_four(const Requantize&, Acc4 v, const Channel (&c)[4], Four) {
    return finish_pairs({v.x, v.y}, {c[0], c[1]}, {v.z, v.w}, {c[2], c[3]});
}
#else
// Four results in one word.
DEVICE u32 narrow4(const Requantize& q, float a, float b, float c, float d) {
    return narrow_four<OUT_FLOAT8>(a, b, c, d, q.low, q.high, OUT_ZERO ? q.zero : 0);
}

DEVICE Four finish_four(const Requantize& q, Acc4 v, const Channel (&c)[4], Four residual) {
    float r[4];
    widen_residual(q, residual, r);
    return narrow4(q, finished(q, v.x, c[0], r[0]), finished(q, v.y, c[1], r[1]), finished(q, v.z, c[2], r[2]), finished(q, v.w, c[3], r[3]));
}
#endif
#endif
