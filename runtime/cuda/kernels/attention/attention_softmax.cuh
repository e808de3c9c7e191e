// The online softmax of attention_sm90.cu. Included after the kernel's Params.
//
// Weights are exp2(score - a maximum of the row). The first tile sets this maximum. It is kept as long as later weights are small enough for
// 16 bits, which the sums of the weights show. Such a tile needs neither its own maximum nor a rescaling of the results. Where a row has grown
// too far, the warpgroup multiplies the tile's keys again and updates the maxima of these rows. A bias whose columns are read with each tile,
// or a mask per query that is loaded to registers, leaves no registers for that: then each tile computes its maximum.
#pragma once

#include "attention_bias.cuh"

constexpr bool KEEPS_MAXIMA = FACTORS != 2 && !(MASK && MASK != TILED_MASK && MASK_ROWS == 2);
constexpr float MOST = 16384.0f;                   // bound of a thread's sum of weights for a row and tile
constexpr float ROOM = KEEPS_MAXIMA && !ONE_TILE ? 6.0f : 0.0f;    // weights begin at 2^-ROOM, so that a row may grow by 2^20; smaller ones stay exact enough
#define NOTHING __int_as_float(0xff800000)         // the maximum of a row that has seen no key
constexpr int EIGHTS = BLOCK_KEYS / 8;             // of keys
constexpr int MIDDLE = EIGHTS / 2;                 // groups before it are packed while the exponentials of the others are computed

// The factor of scores after add_bias().
DEVICE float factor_of(const Params& p) { return MASK || FACTORS || SOFTCAP ? 1.0f : p.scale_log2; }
// The subtrahend of scores. While a row has seen only -inf, its accumulators stay zero; they are zero at the end if nothing else follows.
DEVICE float shift_of(float maximum, float factor) { return maximum == NOTHING ? 0.0f : fmaf(maximum, factor, ROOM); }

// Whether ``own`` is true in any of the four lanes that share a row.
DEVICE bool quad_any(bool own, int lane) { return __ballot_sync(0xffffffffu, own) >> (lane & 28) & 15; }

// Sets scores of invisible keys to -inf. s[4 j + i]: query row + 8 (i / 2), key column + 8 j + i % 2.
DEVICE void hide(const Params& p, int row, int tile, int key_count, int lane, float (&s)[BLOCK_KEYS / 2]) {
    const int column = tile * BLOCK_KEYS + lane % 4 * 2;
    const int first_row = row - lane / 4, ahead = seen_ahead(p, key_count);    // the warp's first row
    const bool cut = (tile + 1) * BLOCK_KEYS > key_count || (CAUSAL && (tile + 1) * BLOCK_KEYS > first_row + ahead + 1) ||
                     (REACH && tile * BLOCK_KEYS < first_row + 15 + ahead - p.reach);
    if (!cut) return;
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        const int limit = (CAUSAL ? min(key_count, row + 8 * i + ahead + 1) : key_count) - column;
        const int least = row + 8 * i + ahead - p.reach - column;
        #pragma unroll
        for (int j = 0; j < EIGHTS; j++) {
            if (8 * j >= limit || (REACH && 8 * j < least)) s[4 * j + 2 * i] = NOTHING;
            if (8 * j + 1 >= limit || (REACH && 8 * j + 1 < least)) s[4 * j + 2 * i + 1] = NOTHING;
        }
    }
}

// Replaces a row's scores of groups FIRST to LAST - 1 (of eight keys) by exp2(score * factor + offset); returns their sum.
template <int FIRST, int LAST> DEVICE float weigh(int i, float factor, float offset, float (&s)[BLOCK_KEYS / 2]) {
    float total = 0.0f;
    #pragma unroll
    for (int j = FIRST; j < LAST; j++) {
        s[4 * j + 2 * i] = exp2_fast(fmaf(s[4 * j + 2 * i], factor, offset));
        s[4 * j + 2 * i + 1] = exp2_fast(fmaf(s[4 * j + 2 * i + 1], factor, offset));
        total += s[4 * j + 2 * i] + s[4 * j + 2 * i + 1];
    }
    return total;
}

// Prepares a tile's scores for weigh(), which takes ``offset`` for each row.
DEVICE void prepare(const Params& p, const Bias& bias, const u32 (&pairs)[MASK_PAIRS], int row, int tile, int key_count, int lane,
                    const float (&maximum)[2], float (&s)[BLOCK_KEYS / 2], float (&offset)[2]) {
    add_bias(p, bias, pairs, tile, tile * BLOCK_KEYS + lane % 4 * 2, s, offset);
    hide(p, row, tile, key_count, lane, s);
    offset[0] -= shift_of(maximum[0], factor_of(p)), offset[1] -= shift_of(maximum[1], factor_of(p));
}

// Turns a tile's scores into weights, with new maxima for the rows that have grown. Earlier sums must then be multiplied by rescale.
DEVICE void soften(const Params& p, const Bias& bias, const u32 (&pairs)[MASK_PAIRS], int row, int tile, int key_count, int lane,
                   const bool (&grown)[2], float (&s)[BLOCK_KEYS / 2], float (&maximum)[2], float (&sum)[2], float (&rescale)[2]) {
    const float factor = factor_of(p);
    float offset[2];
    add_bias(p, bias, pairs, tile, tile * BLOCK_KEYS + lane % 4 * 2, s, offset);
    hide(p, row, tile, key_count, lane, s);
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        float most = fmaxf(s[2 * i], s[2 * i + 1]);
        #pragma unroll
        for (int j = 1; j < EIGHTS; j++) most = fmaxf(most, fmaxf(s[4 * j + 2 * i], s[4 * j + 2 * i + 1]));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        most = grown[i] ? fmaxf(maximum[i], most + offset[i]) : maximum[i];
        const float shift = shift_of(most, factor);
        rescale[i] = exp2_fast(fmaf(maximum[i], factor, ROOM) - shift);
        maximum[i] = most;
        sum[i] = fmaf(sum[i], rescale[i], weigh<0, EIGHTS>(i, factor, offset[i] - shift, s));
    }
}

#if ROUNDED
// Rounds a number within 2^22 to the nearest integer, halves to even.
DEVICE float nearest(float x) { return __fadd_rn(__fadd_rn(x, 12582912.0f), -12582912.0f); }

#if ROUNDED == 2
// Replaces a tile's scores by the exponentials of their rounded values, relative to the largest one on their grid: no row needs a maximum.
DEVICE void weigh_on_grid(const Params& p, int tile, int key_count, int lane, float (&s)[BLOCK_KEYS / 2]) {
    const float offset = -p.high * p.step_log2;
    #pragma unroll
    for (int i = 0; i < BLOCK_KEYS / 2; i++)
        s[i] = exp2_fast(fmaf(nearest(fminf(fmaxf(s[i] * p.to_grid, p.low), p.high)), p.step_log2, offset));
    if ((tile + 1) * BLOCK_KEYS <= key_count) return;
    const int limit = key_count - tile * BLOCK_KEYS - lane % 4 * 2;
    #pragma unroll
    for (int i = 0; i < BLOCK_KEYS / 2; i++) s[i] = i / 4 * 8 + i % 2 < limit ? s[i] : 0.0f;
}
#endif

// Replaces exponentials by rounded weights, in steps: ``factor`` is the steps in 1 over the row's sum. 16 bits hold up to 256 steps exactly.
DEVICE void round_weights(const Params& p, const float (&factor)[2], float (&s)[BLOCK_KEYS / 2]) {
    #pragma unroll
    for (int i = 0; i < BLOCK_KEYS / 2; i++) s[i] = nearest(fminf(s[i] * factor[i / 2 % 2], p.weight_high));
}
#endif
