// Shared by the attention kernels of fp32: their parameters, and the online softmax of a thread's scores. Included after generated.cuh.
#pragma once

#include "attention_mma.cuh"

struct Params : Operands<float, float> {
    float scale;
    float cap_in, cap;                             // of a softcap: 2 log2(e) scale / cap, and cap
#if SINKS
    const float* sinks;                            // of each head
#endif
};

constexpr float LEAST_NORMAL = 1.17549435e-38f;

// Base-2 exponents of a score, of a kernel without masks and softcaps; with them, the scale has been applied before.
DEVICE float factor_of(const Params& p) { return MASK || SOFTCAP ? LOG2_E : p.scale * LOG2_E; }

// Two queries of a thread, ``row`` and eight rows further: their statistics.
struct Rows {
    const float* mask[2];
    float maximum[2], sum[2], rescale[2];          // rescale: of the results so far, after a tile of scores
    int row, head;

    __device__ __forceinline__ Rows(const Params& p, int batch, int head, int row) : row(row), head(head) {
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            maximum[i] = -infinity(), sum[i] = 0.0f, rescale[i] = 1.0f;
            mask[i] = MASK ? p.mask + batch % p.mask_period * p.mask_batch + head * p.mask_head + min(row + 8 * i, p.query_count - 1) * p.mask_query : nullptr;
        }
    }

    // Sets scores of keys that a query does not see to -inf.
    template <int EIGHTS> __device__ __forceinline__ void hide(const Params& p, const Seen& seen, int own, int column, int end, float (&s)[EIGHTS][4]) const {
        const int begin = end - 8 * EIGHTS, offset = seen.offset;
        if (end <= seen.key_count && (!CAUSAL || end <= own + offset + 1) && (!WINDOW || begin >= own + 15 + offset - p.reach)) return;
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const int limit = (CAUSAL ? min(seen.key_count, row + 8 * i + offset + 1) : seen.key_count) - column;
            const int least = WINDOW ? row + 8 * i + offset - p.reach - column : -(1 << 30);
            #pragma unroll
            for (int j = 0; j < EIGHTS; j++) {
                if (8 * j >= limit || 8 * j < least) s[j][2 * i] = -infinity();
                if (8 * j + 1 >= limit || 8 * j + 1 < least) s[j][2 * i + 1] = -infinity();
            }
        }
    }

    // Turns a tile of scores into weights, 2^START exp2(score - maximum). s[j][i]: of query row + 8 (i / 2) and key column + 8 j + i % 2, in
    // units of ``unit``. end: of the tile's keys; own: the warp's first query.
    template <int START, int EIGHTS>
    __device__ __forceinline__ void weigh(const Params& p, const Seen& seen, int own, int column, int end, const float (&unit)[2], float (&s)[EIGHTS][4]) {
        const float factor = factor_of(p);
        #pragma unroll
        for (int j = 0; j < EIGHTS; j++) {
            if (SOFTCAP)                           // cap tanh(x / cap), by an exponential
                #pragma unroll
                for (int i = 0; i < 4; i++) s[j][i] = fmaf(__fdividef(-2.0f, 1.0f + exp2_fast(s[j][i] * (unit[i / 2] * p.cap_in))), p.cap, p.cap);
            if (MASK)
                #pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int at = column + 8 * j;
                    const float scale = SOFTCAP ? 1.0f : unit[i] * p.scale;
                    float2 own_mask = {0.0f, 0.0f};
                    if (MASK == 2) {
                        if (at < p.key_count) own_mask = *reinterpret_cast<const float2*>(mask[i] + at);
                    } else {
                        if (at < p.key_count) own_mask.x = mask[i][at];
                        if (at + 1 < p.key_count) own_mask.y = mask[i][at + 1];
                    }
                    s[j][2 * i] = fmaf(s[j][2 * i], scale, own_mask.x);
                    s[j][2 * i + 1] = fmaf(s[j][2 * i + 1], scale, own_mask.y);
                }
        }
        hide(p, seen, own, column, end, s);
        float most[2][2] = {{-infinity(), -infinity()}, {-infinity(), -infinity()}}, total[2][2] = {};     // of even and of odd j: two short chains
        #pragma unroll
        for (int j = 0; j < EIGHTS; j++)
            #pragma unroll
            for (int i = 0; i < 2; i++) most[i][j % 2] = fmaxf(most[i][j % 2], fmaxf(s[j][2 * i], s[j][2 * i + 1]));
        #pragma unroll
        for (int i = 0; i < 2; i++) most[i][0] = fmaxf(most[i][0], most[i][1]);
        #pragma unroll
        for (int lanes = 1; lanes < 4; lanes *= 2)
            #pragma unroll
            for (int i = 0; i < 2; i++) most[i][0] = fmaxf(most[i][0], __shfl_xor_sync(0xffffffffu, most[i][0], lanes));
        float shift[2], own_factor[2], start[2];
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const float now = fmaxf(maximum[i], MASK || SOFTCAP ? most[i][0] : most[i][0] * unit[i]);
            // While a row has seen only -inf, its accumulators stay zero; they are zero at the end if nothing else follows.
            shift[i] = now == -infinity() ? 0.0f : now;
            rescale[i] = exp2_fast((maximum[i] - shift[i]) * factor);
            maximum[i] = now;
            // Of zeros, ``unit`` may underflow. The factor must not be 0, which would make a hidden score of -inf NaN.
            own_factor[i] = fmaxf(unit[i] * factor, LEAST_NORMAL), start[i] = fmaf(-shift[i], factor, float(START));
        }
        #pragma unroll
        for (int j = 0; j < EIGHTS; j++)
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                #pragma unroll
                for (int k = 2 * i; k < 2 * i + 2; k++) {
                    // A mask may be the lowest finite number: then the difference comes before the factor.
                    const float x = MASK || SOFTCAP ? fmaf(s[j][k] - shift[i], factor, float(START)) : fmaf(s[j][k], own_factor[i], start[i]);
                    s[j][k] = exp2_fast(x);
                }
                total[i][j % 2] += s[j][2 * i] + s[j][2 * i + 1];
            }
        #pragma unroll
        for (int i = 0; i < 2; i++) sum[i] = fmaf(sum[i], rescale[i], total[i][0] + total[i][1]);
    }

    // The inverse of the sum of all weights of row i. No key at all: zeros, as in ONNX's Attention.
    template <int START> __device__ __forceinline__ float inverse(const Params& p, int i) const {
        float whole = sum[i];
        whole += __shfl_xor_sync(0xffffffffu, whole, 1);
        whole += __shfl_xor_sync(0xffffffffu, whole, 2);
#if SINKS
        if (whole != 0.0f) whole += exp2_fast(fmaf(-maximum[i], factor_of(p), fmaf(LOG2_E, p.sinks[head], float(START))));
#endif
        return whole == 0.0f ? 0.0f : 1.0f / whole;
    }
};
