// Epilogue of chained_sm90.cu: accumulators -> results in rows of shared memory, which hold the added tensor before. Channels are wgmma's
// M: a lane has two of a warp's sixteen channels, and two neighboring pixels of each block of eight.
#pragma once
#include "narrow.cuh"

#if ITEM == 1
typedef int Acc;
typedef float2 Channel;                            // scale, bias

// Constants of a layer, as in conv_element.cuh.
struct Requantize {
    float residual_scale, residual_offset, low, high;
    int zero;
    float constants[12];
};

// The constants of two neighboring channels: the rows of weights are permuted so that one lane has both.
DEVICE void load_bias(const Channel* from, int channel, int lane, Channel (&bias)[2]) {
    const float4 two = __ldg(reinterpret_cast<const float4*>(from + channel + lane / 4 * 2));
    bias[0] = make_float2(two.x, two.y), bias[1] = make_float2(two.z, two.w);
}

// Two channels of a pixel are 16 bits, so the 16 channels of a warp are a row of 16 bytes. ``tile``: index of the 64 channels in the row.
template <int PIXELS, class Finish>
DEVICE void finish_rows(u32 buffer, int tile, const Acc (&sum)[PIXELS / 2], const Channel (&c)[2], int quarter, int lane, const Finish& finish) {
    const auto& q = finish.numbers;
    const u32 row = buffer + lane * 128 + (((tile * 4 + quarter) ^ (lane & 7)) << 4);
    auto scaled = [&](Acc v, const Channel& channel, float r) { return finish(__fmul_rn(float(v), channel.x), channel.y, r); };
    #pragma unroll
    for (int j = 0; j < PIXELS / 32; j++) {
        u32 r[4] = {}, y[4];
        if (Finish::WITH_ADDED) ldmatrix_x4_trans(row + j * 32 * 128, r[0], r[1], r[2], r[3]);
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const Acc* v = &sum[(j * 4 + i) * 4];
            float added[4] = {};
            if (Finish::WITH_ADDED) widen_four<Finish::UNSIGNED>(r[i], q.residual_offset, q.residual_scale, added);
            y[i] = narrow_four<false>(scaled(v[0], c[0], added[0]), scaled(v[2], c[1], added[1]), scaled(v[1], c[0], added[2]),
                                      scaled(v[3], c[1], added[3]), q.low, q.high, Finish::ZERO ? q.zero : 0);
        }
        stmatrix_x4_trans(row + j * 32 * 128, y[0], y[1], y[2], y[3]);
    }
}
#else
typedef float Acc;
typedef float Channel;                             // bias

DEVICE void load_bias(const Channel* from, int channel, int lane, Channel (&bias)[2]) {
    bias[0] = __ldg(from + channel + lane / 4), bias[1] = __ldg(from + channel + lane / 4 + 8);
}

template <int PIXELS, class Finish>
DEVICE void finish_rows(u32 buffer, int, const Acc (&sum)[PIXELS / 2], const Channel (&bias)[2], int quarter, int lane, const Finish& finish) {
    // Lane l addresses row l % 8 (a pixel) of matrix l / 8: matrices 0, 1 are channels 0-7, 8-15 of pixels 0-7; 2, 3 of pixels 8-15.
    const u32 row = buffer + ((lane >> 4) * 8 + (lane & 7)) * 128 + (((quarter * 2 + ((lane >> 3) & 1)) ^ (lane & 7)) << 4);
    constexpr int ALL = PIXELS / 16, TOGETHER = 4;             // TOGETHER loads are in flight at once
    #pragma unroll
    for (int begin = 0; begin < ALL; begin += TOGETHER) {
        u32 r[TOGETHER][4] = {};
        #pragma unroll
        for (int j = begin; Finish::WITH_ADDED && j < min(begin + TOGETHER, ALL); j++)
            ldmatrix_x4_trans(row + j * 16 * 128, r[j - begin][0], r[j - begin][1], r[j - begin][2], r[j - begin][3]);
        #pragma unroll
        for (int j = begin; j < min(begin + TOGETHER, ALL); j++) {
            u32 y[4];
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* v = &sum[j * 8 + i * 2];
                const u32 added = r[j - begin][i];
                y[i] = pack2(finish(v[0], bias[i % 2], low_float(added)), finish(v[1], bias[i % 2], high_float(added)));
            }
            stmatrix_x4_trans(row + j * 16 * 128, y[0], y[1], y[2], y[3]);
        }
    }
}
#endif
