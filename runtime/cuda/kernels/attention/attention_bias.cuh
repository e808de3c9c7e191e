// The masks and biases that attention_sm90.cu adds to scores. Included after the kernel's Params.
#pragma once

// The addends of the scores of a thread's queries, row and row + 8.
struct Bias {
    const u16* mask[2];
    u32 tile;                                      // with TILED_MASK, the address of the warp's rows in shared memory
#if FACTORS
    const u16* factors[2][2];                      // rows and columns
#endif
#if FACTORS == 1
    float columns[BLOCK_KEYS / 2];                 // times log2(e), in the order of the scores
#endif

    __device__ __forceinline__ Bias(const Params& p, const Item& item, int row, int lane) {
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const int query = min(row + 8 * i, p.query_count - 1);
            mask[i] = MASK && MASK != TILED_MASK ? p.mask + item.batch % p.mask_period * p.mask_batch + item.head * p.mask_head + query * p.mask_query : nullptr;
#if FACTORS
            const int line = query / p.query_width;
            #pragma unroll
            for (int f = 0; f < 2; f++) {
                const long long* s = p.factor_strides[f];
                factors[f][i] =
                    p.factors[f] + item.batch * s[0] + item.head * s[1] + line * s[2] + (query - line * p.query_width) * s[3];
            }
#endif
        }
#if FACTORS == 1
        #pragma unroll
        for (int j = 0; j < BLOCK_KEYS / 8; j++) {
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                const u32 pair = *reinterpret_cast<const u32*>(factors[1][i] + lane % 4 * 2 + 8 * j);
                columns[4 * j + 2 * i] = low_float(pair) * LOG2_E;
                columns[4 * j + 2 * i + 1] = high_float(pair) * LOG2_E;
            }
        }
#endif
    }
};

// A thread's part of a tile's mask, in pairs. It is loaded while the tile's scores are computed.
constexpr int MASK_PAIRS = MASK && MASK != TILED_MASK ? BLOCK_KEYS / 8 * MASK_ROWS : 1;

DEVICE void load_mask(const Params& p, const Bias& bias, int tile, int lane, u32 (&pairs)[MASK_PAIRS]) {
#if MASK && MASK != TILED_MASK
    #pragma unroll
    for (int j = 0; j < BLOCK_KEYS / 8; j++) {
        const int at = tile * BLOCK_KEYS + lane % 4 * 2 + 8 * j;
        #pragma unroll
        for (int i = 0; i < MASK_ROWS; i++) {
            u32& pair = pairs[j * MASK_ROWS + i];
            pair = 0;
            if (MASK == 2) {
                if (at < p.key_count) pair = *reinterpret_cast<const u32*>(bias.mask[i] + at);
            } else {
                if (at < p.key_count) pair = bias.mask[i][at];
                if (at + 1 < p.key_count) pair |= u32(bias.mask[i][at + 1]) << 16;
            }
        }
    }
#endif
}

// Caps and scales a tile's scores and adds the bias, except for an offset per query.
DEVICE void add_bias(const Params& p, const Bias& bias, const u32 (&pairs)[MASK_PAIRS], int tile, int column, float (&s)[BLOCK_KEYS / 2],
                     float (&offset)[2]) {
    offset[0] = offset[1] = 0.0f;
    [[maybe_unused]] const float scale_log2 = SOFTCAP ? 1.0f : p.scale_log2;
#if SOFTCAP
    #pragma unroll
    for (int i = 0; i < BLOCK_KEYS / 2; i++)           // tanh(x) = 1 - 2 / (1 + exp(2 x))
        s[i] = fmaf(-2.0f * p.cap_out, __fdividef(1.0f, 1.0f + exp2_fast(s[i] * p.cap_in)), p.cap_out);
#endif
#if MASK == TILED_MASK
    const u32 lane = threadIdx.x % 32, line = bias.tile + lane % 16 * MASK_SPAN;
    const u32 turned = (lane % 16 * MASK_SPAN / 8 & (MASK_SPAN - 16)) ^ lane / 16 * 16;        // the row under TMA's swizzle, and the group of keys
    #pragma unroll
    for (int j = 0; j < BLOCK_KEYS / 8; j += 2) {      // two groups of eight keys, of rows row and row + 8
        u32 pair[4];
        ldmatrix_x4(line + j * 16 / MASK_SPAN * MASK_SUBTILE + (j * 16 % MASK_SPAN ^ turned), pair[0], pair[1], pair[2], pair[3]);
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            s[4 * j + 2 * i] = fmaf(s[4 * j + 2 * i], scale_log2, low_float(pair[i]) * LOG2_E);
            s[4 * j + 2 * i + 1] = fmaf(s[4 * j + 2 * i + 1], scale_log2, high_float(pair[i]) * LOG2_E);
        }
    }
#elif MASK
    #pragma unroll
    for (int j = 0; j < BLOCK_KEYS / 8; j++) {
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 pair = pairs[j * MASK_ROWS + i % MASK_ROWS];
            s[4 * j + 2 * i] = fmaf(s[4 * j + 2 * i], scale_log2, low_float(pair) * LOG2_E);
            s[4 * j + 2 * i + 1] = fmaf(s[4 * j + 2 * i + 1], scale_log2, high_float(pair) * LOG2_E);
        }
    }
#elif FACTORS == 1
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        offset[i] = unpack1(bias.factors[0][i][tile]) * LOG2_E;
        #pragma unroll
        for (int j = 0; j < BLOCK_KEYS / 8; j++) {
            #pragma unroll
            for (int k = 4 * j + 2 * i; k < 4 * j + 2 * i + 2; k++) s[k] = fmaf(s[k], scale_log2, bias.columns[k]);
        }
    }
#elif FACTORS == 2
    #pragma unroll
    for (int j = 0; j < BLOCK_KEYS / 8; j++) {
        const int at = min(column + 8 * j, p.key_count - 2), line = at / KEY_WIDTH;
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 pair = *reinterpret_cast<const u32*>(bias.factors[1][i] + (at - line * KEY_WIDTH));
            const float of_row = unpack1(bias.factors[0][i][line]);
            s[4 * j + 2 * i] = fmaf(s[4 * j + 2 * i], scale_log2, (of_row + low_float(pair)) * LOG2_E);
            s[4 * j + 2 * i + 1] = fmaf(s[4 * j + 2 * i + 1], scale_log2, (of_row + high_float(pair)) * LOG2_E);
        }
    }
#endif
}
