// The softmax of attention_sm90.cu: a tile's scores become weights. Included behind the kernel's Params.
#pragma once

constexpr float LOG2_E = 1.4426950408889634f;
#include "attention_bias.cuh"

// With columns in registers, a row's maximum is kept until scores exceed it by this power of two: weights stay small, and results need
// no rescaling (each row of keys has an offset of its own, so that maxima often grow a little). Elsewhere the question costs what it saves.
constexpr float ENOUGH = 8.0f;
constexpr bool KEEPS_MAXIMUM = FACTORS == 1;

// With LAZY, a row's maximum is kept until a thread's weights of a tile sum up to more than this: fp16 holds them until then.
constexpr float MOST = 16384.0f;
#define NOTHING __int_as_float(0xff800000)         // the maximum of a row that has seen no key

// 2^(x - 126), x = 253 y for y of 0 to 1, without the unit of exponentials: a polynomial of the part behind the point, 1e-4 of the result at most.
DEVICE float exp2_polynomial(float y) {
    constexpr float whole = 12582912.0f;           // adding it rounds to an integer, in the lowest bits
    const float rounded = fmaf(y, 253.0f, whole - 126.0f), rest = fmaf(y, 253.0f, whole - 126.0f - rounded);
    const float part = fmaf(fmaf(fmaf(0.0551716685f, rest, 0.2426309735f), rest, 0.6932609677f), rest, 0.9999247789f);
    return __int_as_float(__float_as_int(part) + (__float_as_int(rounded) << 23));
}

// Scores of keys that a query does not see become -inf. s[4 j + i]: query row + 8 (i / 2), key column + 8 j + i % 2.
DEVICE void hide(const Params& p, int row, int tile, int key_count, int lane, float (&s)[BLOCK_KEYS / 2]) {
    const int column = tile * BLOCK_KEYS + lane % 4 * 2;
    const int first_row = row - lane / 4, ahead = seen_ahead(p, key_count);    // the row: of the warp
    const bool cut = (tile + 1) * BLOCK_KEYS > key_count || (CAUSAL && (tile + 1) * BLOCK_KEYS > first_row + ahead + 1) ||
                     (REACH && tile * BLOCK_KEYS < first_row + 15 + ahead - p.reach);
    if (!cut) return;
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        const int limit = (CAUSAL ? min(key_count, row + 8 * i + ahead + 1) : key_count) - column;
        const int least = row + 8 * i + ahead - p.reach - column;
        #pragma unroll
        for (int j = 0; j < BLOCK_KEYS / 8; j++) {
            if (8 * j >= limit || (REACH && 8 * j < least)) s[4 * j + 2 * i] = __int_as_float(0xff800000);
            if (8 * j + 1 >= limit || (REACH && 8 * j + 1 < least)) s[4 * j + 2 * i + 1] = __int_as_float(0xff800000);
        }
    }
}

DEVICE float factor_of(const Params& p) { return MASK || FACTORS ? 1.0f : p.scale_log2; }  // of scores that add_bias() has seen

// A row's scores become exp2(score * factor + offset); their sum.
template <int FIRST, int LAST> DEVICE float weigh(int i, float factor, float offset, float (&s)[BLOCK_KEYS / 2]) {
    const float narrow = factor / 253.0f, middle = fmaf(offset, 1.0f / 253.0f, 126.0f / 253.0f);
    float total = 0.0f;
    #pragma unroll
    for (int j = FIRST; j < LAST; j++) {
        #pragma unroll
        for (int k = 4 * j + 2 * i; k < 4 * j + 2 * i + 2; k++) {
            if (POLYNOMIAL && j % (8 / POLYNOMIAL_PAIRS) == 8 / POLYNOMIAL_PAIRS - 1)
                s[k] = exp2_polynomial(__saturatef(fmaf(s[k], narrow, middle)));
            else
                s[k] = exp2_fast(fmaf(s[k], factor, offset));
        }
        total += s[4 * j + 2 * i] + s[4 * j + 2 * i + 1];
    }
    return total;
}
// A row that has seen only -inf so far keeps zeros, and zeros they are at the end if it stays so.
DEVICE float shift_of(float maximum, float factor) { return maximum == NOTHING ? 0.0f : maximum * factor; }

// Turns a tile's scores into exp2(score - maximum). What was summed before is to be multiplied by rescale. Rows that are not new keep their maximum.
DEVICE void soften(const Params& p, const Bias& bias, const u32 (&pairs)[MASK_PAIRS], int row, int tile, int key_count, int lane, const bool (&grown)[2],
                   float (&s)[BLOCK_KEYS / 2], float (&maximum)[2], float (&sum)[2], float (&rescale)[2]) {
    const float factor = factor_of(p);
    float offset[2];
    add_bias(p, bias, pairs, tile, tile * BLOCK_KEYS + lane % 4 * 2, s, offset);
    hide(p, row, tile, key_count, lane, s);
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        float most = fmaxf(s[2 * i], s[2 * i + 1]);
        #pragma unroll
        for (int j = 1; j < BLOCK_KEYS / 8; j++) most = fmaxf(most, fmaxf(s[4 * j + 2 * i], s[4 * j + 2 * i + 1]));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        most = fmaxf(maximum[i], most + offset[i]);
        if (KEEPS_MAXIMUM && !((most - maximum[i]) * factor > ENOUGH)) most = maximum[i];
        if (LAZY && !grown[i]) most = maximum[i];
        const float shift = shift_of(most, factor);
        rescale[i] = exp2_fast(maximum[i] * factor - shift);
        maximum[i] = most;
        sum[i] = fmaf(sum[i], rescale[i], weigh<0, BLOCK_KEYS / 8>(i, factor, offset[i] - shift, s));
    }
}

// A tile's scores with what is added to them; of each row, what is added to them within the exponential.
DEVICE void prepare(const Params& p, const Bias& bias, const u32 (&pairs)[MASK_PAIRS], int row, int tile, int key_count, int lane,
                    const float (&maximum)[2], float (&s)[BLOCK_KEYS / 2], float (&offset)[2]) {
    add_bias(p, bias, pairs, tile, tile * BLOCK_KEYS + lane % 4 * 2, s, offset);
    hide(p, row, tile, key_count, lane, s);
    offset[0] -= shift_of(maximum[0], factor_of(p)), offset[1] -= shift_of(maximum[1], factor_of(p));
}
