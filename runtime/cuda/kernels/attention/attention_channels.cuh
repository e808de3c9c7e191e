// Shared by the kernels of attention between channels (attention_channels.cu in one launch; channel_sums.cu and channel_results.cu in two).
//
// generated.cuh defines WARPS, CHANNELS (of a head, padded to a multiple of 16 with zeros), ROWS (channels of the queries whose scores a warp
// sums up: all of them, or a band), SLOTS (a warp's ring: slots of sixteen tokens), WIDTH (bytes of a copy: 16 by cp.async, 4, or 2),
// NORMALIZE, LINEAR, RECTIFY and multiply().
//
// LINEAR: the same kernels compute normalized linear attention, (q (k^T v)) / (q (k^T 1) + epsilon). There, "queries" are its values, "keys"
// its keys, and "values" its queries. Scores are not passed through a softmax. Sums of squares are sums, and RECTIFY replaces negative
// elements of its keys and queries by 0.
#pragma once

constexpr int THREADS = WARPS * 32, TILES = CHANNELS / 16, ROW_TILES = ROWS / 16, BANDS = (CHANNELS + ROWS - 1) / ROWS;
constexpr int PITCH = CHANNELS + 8, ROWS_PITCH = ROWS + 8;   // of rows in shared memory: eight rows of an ldmatrix touch all banks
constexpr int TOKENS_BYTES = 16 * PITCH * 2, QUERIES_BYTES = 16 * ROWS_PITCH * 2, SLOT_BYTES = QUERIES_BYTES + TOKENS_BYTES;
constexpr int COLUMNS = (CHANNELS + 31) / 32;      // of a row of scores, for each lane
constexpr int WEIGHT_ROWS = CHANNELS + (LINEAR ? 16 : 0);   // LINEAR: with the sums of the keys, in two 16-bit parts
constexpr int WEIGHTS_BYTES = WEIGHT_ROWS * PITCH * 2 + (LINEAR ? WEIGHT_ROWS * 4 : 0);   // LINEAR: with the factor of each row
constexpr int SQUARES = 2 * CHANNELS, SUMS = ROWS * PITCH, PART = SQUARES + CHANNELS * CHANNELS;
constexpr int BLOCKS = WIDTH < 16 ? 1 : 0;            // per multiprocessor, where ptxas would spill otherwise (0: no limit)
static_assert(CHANNELS % 16 == 0 && ROWS % 16 == 0 && CHANNELS % WARPS == 0, "tiles of 16 channels, and whole rows for a warp");
static_assert(ROWS * CHANNELS <= 144 * 32, "the scores fit a warp's registers");

struct View {                                      // strides in elements; channels are contiguous
    long long batch, head;
    int position;
};

// Loads FILLED channels of sixteen tokens from ``first`` on, by one warp; zeros beyond the last token and the last channel.
template <int FILLED = CHANNELS>
DEVICE void load_tokens(u8* shared, u32 at, const u16* source, int position, int first, int tokens, int channels) {
    constexpr int EACH = WIDTH / 2, COPIES = FILLED / EACH, ALL = 16 * COPIES / 32;
    constexpr int AT_ONCE = WIDTH == 2 || WIDTH == 4 && BANDS > 1 ? 8 : ALL;   // more need too many registers
    #pragma unroll AT_ONCE
    for (int n = 0; n < ALL; n++) {
        const int i = n * 32 + threadIdx.x % 32, row = i / COPIES, channel = i % COPIES * EACH;
        const bool live = first + row < tokens && channel < channels;
        const u16* from = live ? source + (long long)(first + row) * position + channel : source;
        const u32 to = at + (row * (FILLED + 8) + channel) * 2;
        if (WIDTH == 16)
            copy_16_or_zeros(smem_address(shared + to), from, live ? 16 : 0);
        else if (WIDTH == 4)
            *reinterpret_cast<u32*>(shared + to) = live ? *reinterpret_cast<const u32*>(from) : 0u;
        else
            *reinterpret_cast<u16*>(shared + to) = live ? *from : u16(0);
    }
}

DEVICE float summand(u32 packed) {
    const float low = low_float(packed), high = high_float(packed);
    return LINEAR ? low + high : low * low + high * high;
}

DEVICE u32 rectified(u32 packed) { return RECTIFY ? relu2(packed) : packed; }

// The sum over the four lanes that share a row of a fragment.
DEVICE float sum_of_four(float v) {
    v += __shfl_xor_sync(0xffffffffu, v, 1);
    return v + __shfl_xor_sync(0xffffffffu, v, 2);
}

// The factor of a channel: 1 / norm, from its sums of squares in each copy.
template <int COPIES> DEVICE float reciprocal_norm(const float* sums, float least) {
    if (!NORMALIZE) return 1.0f;
    float total = 0.0f;
    #pragma unroll
    for (int w = 0; w < COPIES; w++) total += sums[w * SQUARES];
    const float norm = fmaxf(sqrtf(total), least);
    return norm == 0.0f ? 1.0f : 1.0f / norm;
}

struct Sums {
    float scores[ROW_TILES][2 * TILES][4];         // a fragment's row: a channel of the queries; column: of the keys
    float query[ROW_TILES][2], key[2 * TILES];     // squares (LINEAR: sums)

    inline __device__ void clear() {
        #pragma unroll
        for (int m = 0; m < ROW_TILES; m++) {
            query[m][0] = query[m][1] = 0.0f;
            #pragma unroll
            for (int n = 0; n < 2 * TILES; n++)
                #pragma unroll
                for (int i = 0; i < 4; i++) scores[m][n][i] = 0.0f;
        }
        #pragma unroll
        for (int n = 0; n < 2 * TILES; n++) key[n] = 0.0f;
    }

    // Adds sixteen tokens, which are in shared memory as [token][channel].
    inline __device__ void add(u32 queries, u32 keys) {
        const int lane = threadIdx.x % 32;
        const u32 rows = (lane % 8 + lane / 16 * 8) * ROWS_PITCH * 2 + lane / 8 % 2 * 16;   // for q^T: channels 0-7, 8-15 of tokens 0-7, then of tokens 8-15
        const u32 columns = lane % 16 * PITCH * 2 + lane / 16 * 16;                    // for k: tokens 0-7, 8-15 of channels 0-7, then of channels 8-15
        u32 a[ROW_TILES][4];
        #pragma unroll
        for (int m = 0; m < ROW_TILES; m++) {
            ldmatrix_x4_trans(queries + rows + m * 32, a[m][0], a[m][1], a[m][2], a[m][3]);
            query[m][0] += summand(a[m][0]) + summand(a[m][2]);
            query[m][1] += summand(a[m][1]) + summand(a[m][3]);
        }
        #pragma unroll
        for (int n = 0; n < TILES; n++) {
            u32 b[4];
            ldmatrix_x4_trans(keys + columns + n * 32, b[0], b[1], b[2], b[3]);
            #pragma unroll
            for (int i = 0; i < 4; i++) b[i] = rectified(b[i]);
            key[2 * n] += summand(b[0]) + summand(b[1]);
            key[2 * n + 1] += summand(b[2]) + summand(b[3]);
            #pragma unroll
            for (int m = 0; m < ROW_TILES; m++) {
                multiply(scores[m][2 * n], a[m], b[0], b[1]);
                multiply(scores[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }

    // Stores the warp's part of the scores [channel of the band][PITCH], and of the squares [queries, keys][channel].
    inline __device__ void store(float* sums, float* squared) const {
        const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
        #pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
            #pragma unroll
            for (int n = 0; n < 2 * TILES; n++)
                #pragma unroll
                for (int i = 0; i < 4; i++) sums[(m * 16 + row + i / 2 * 8) * PITCH + n * 8 + column + i % 2] = scores[m][n][i];
        #pragma unroll
        for (int n = 0; n < 2 * ROW_TILES; n++) {
            const float of_query = sum_of_four(query[n / 2][n % 2]);
            if (lane % 4 == 0) squared[n * 8 + row] = of_query;
        }
        #pragma unroll
        for (int n = 0; n < 2 * TILES; n++) {
            const float of_key = sum_of_four(key[n]);
            if (lane % 4 == 0) squared[CHANNELS + n * 8 + row] = of_key;
        }
    }
};

// Sums the warp's share of the groups of sixteen tokens before ``end``: every WARPS-th group from ``step`` on. ``last`` issues copies that
// are waited for together with the copies of the ring. Of the queries, ``band`` is the first channel.
template <class Last>
DEVICE void sum_tokens(Sums& sums, u8* shared, u32 ring, const u16* queries, const u16* keys, int query_position, int key_position,
                       int band, int step, int end, int tokens, int channels, Last last) {
    auto load_step = [&](int at, int slot) {
        if (at >= end) return;
        load_tokens<ROWS>(shared, ring + slot * SLOT_BYTES, queries + band, query_position, at * 16, tokens, channels - band);
        load_tokens(shared, ring + slot * SLOT_BYTES + QUERIES_BYTES, keys, key_position, at * 16, tokens, channels);
    };
    #pragma unroll
    for (int i = 0; i < SLOTS; i++) {
        load_step(step + i * WARPS, i);
        if (i == SLOTS - 1) last();
        copies_commit();
    }
    sums.clear();
    int slot = 0;
    for (; step < end; step += WARPS) {
        copies_wait_but<SLOTS - 1>();
        __syncwarp();
        const u32 found = smem_address(shared + ring + slot * SLOT_BYTES);
        sums.add(found, found + QUERIES_BYTES);
        __syncwarp();                              // all lanes have read the slot
        load_step(step + SLOTS * WARPS, slot);
        copies_commit();
        slot = slot + 1 == SLOTS ? 0 : slot + 1;
    }
    copies_wait_but<0>();
    __syncthreads();                               // the rings are empty
}

// Softmax of the warp's rows of scores (the sum of COPIES copies in shared memory), to [row][PITCH] in shared memory.
template <int COPIES>
DEVICE void softmax_rows(u16* weights, const float* sums, const float* squared, float factor, int channels, float least_query, float least_key) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float of_column[COLUMNS];
    #pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        const int column = min(lane + 32 * c, CHANNELS - 1);
        of_column[c] = factor * reciprocal_norm<COPIES>(squared + CHANNELS + column, least_key);
    }
    #pragma unroll
    for (int r = 0; r < CHANNELS / WARPS; r++) {
        const int row = r * WARPS + warp;
        const float of_row = reciprocal_norm<COPIES>(squared + row, least_query);
        float v[COLUMNS], most = __int_as_float(0xff800000);
        #pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            const int column = min(lane + 32 * c, CHANNELS - 1);
            float total = 0.0f;
            #pragma unroll
            for (int w = 0; w < COPIES; w++) total += sums[w * SUMS + row * PITCH + column];
            v[c] = lane + 32 * c < channels ? total * of_row * of_column[c] : __int_as_float(0xff800000);
            most = fmaxf(most, v[c]);
        }
        #pragma unroll
        for (int half = 16; half; half /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, half));
        float total = 0.0f;
        #pragma unroll
        for (int c = 0; c < COLUMNS; c++) total += v[c] = exp2_fast((v[c] - most) * LOG2_E);
        #pragma unroll
        for (int half = 16; half; half /= 2) total += __shfl_xor_sync(0xffffffffu, total, half);
        #pragma unroll
        for (int c = 0; c < COLUMNS; c++)
            if (lane + 32 * c < CHANNELS) weights[row * PITCH + lane + 32 * c] = pack1(__fdividef(v[c], total));
    }
}

// The inverse of a power of two, exactly.
DEVICE float inverse(float power) { return __int_as_float((254 << 23) - int(__float_as_uint(power))); }

// The power of two that brings the largest magnitude of a row near 2^13, so that 16-bit floats hold the row.
DEVICE float row_scale(float most) {
    #pragma unroll
    for (int half = 16; half; half /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, half));
    const int exponent = int(__float_as_uint(most) >> 23);
    return exponent == 0 ? 1.0f : __int_as_float(min(267 - exponent, 252) << 23);
}

// LINEAR: the warp's rows of k^T v (the sum of COPIES copies in shared memory), each times a power of two, to [row][PITCH] in shared memory.
// ``factors`` undo these. The first warp adds the sums of the keys, as two rows: one rounded to 16 bits, and one of what that leaves.
template <int COPIES>
DEVICE void scaled_rows(u16* weights, float* factors, const float* sums, const float* summed, float factor) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float v[COLUMNS];
    auto add_copies = [&](const float* from, int copy) {
        float most = 0.0f;
        #pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            v[c] = 0.0f;
            #pragma unroll
            for (int w = 0; w < COPIES; w++) v[c] += from[w * copy + min(lane + 32 * c, CHANNELS - 1)];
            most = fmaxf(most, fabsf(v[c]));
        }
        return row_scale(most);
    };
    #pragma unroll
    for (int r = 0; r < CHANNELS / WARPS; r++) {
        const int row = r * WARPS + warp;
        const float scale = add_copies(sums + row * PITCH, SUMS);
        #pragma unroll
        for (int c = 0; c < COLUMNS; c++)
            if (lane + 32 * c < CHANNELS) weights[row * PITCH + lane + 32 * c] = pack1(v[c] * scale);
        if (lane == 0) factors[row] = factor * inverse(scale);
    }
    if (warp != 0) return;
    const float scale = add_copies(summed + CHANNELS, SQUARES);
    #pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        if (lane + 32 * c >= CHANNELS) continue;
        u16* to = weights + CHANNELS * PITCH + lane + 32 * c;
        to[0] = pack1(v[c] * scale);
        to[PITCH] = pack1(v[c] * scale - low_float(to[0]));
    }
    if (lane == 0) factors[CHANNELS] = inverse(scale);
}

// The matrix by which values are multiplied, from the sums of scores. LINEAR: with the factors of its rows after it.
template <int COPIES>
DEVICE void make_weights(u16* weights, const float* sums, const float* squared, float factor, int channels, float least_query, float least_key) {
    if constexpr (LINEAR)
        scaled_rows<COPIES>(weights, reinterpret_cast<float*>(weights + WEIGHT_ROWS * PITCH), sums, squared, factor);
    else
        softmax_rows<COPIES>(weights, sums, squared, factor, channels, least_query, least_key);
}

// LINEAR: divides the results of sixteen tokens. Two columns of ``divisors`` add up to the divisor of a token.
DEVICE void divide_results(float (&out)[2 * TILES][4], const float (&divisors)[4], const float* factors, float epsilon) {
    const int lane = threadIdx.x % 32;
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        const float own = (divisors[2 * i] + divisors[2 * i + 1]) * factors[CHANNELS];
        const float divisor = __shfl_sync(0xffffffffu, own, lane & ~3) + epsilon;
        #pragma unroll
        for (int n = 0; n < 2 * TILES; n++)
            #pragma unroll
            for (int j = 0; j < 2; j++) out[n][2 * i + j] = out[n][2 * i + j] * factors[n * 8 + lane % 4 * 2 + j] / divisor;
    }
}

// Computes the results of the warp's sixteen tokens from ``first`` on. ``epsilon``: see LINEAR.
DEVICE void weighted_values(u32 values, const u16* all_weights, u16* output, int position, int first, int tokens, int channels, float epsilon) {
    const int lane = threadIdx.x % 32;
    const u32 weights = smem_address(all_weights);
    const u32 down = lane % 16 * PITCH * 2 + lane / 16 * 16, across = (lane % 8 + lane / 16 * 8) * PITCH * 2 + lane / 8 % 2 * 16;
    float out[2 * TILES][4], divisors[4] = {};
    #pragma unroll
    for (int n = 0; n < 2 * TILES; n++)
        #pragma unroll
        for (int i = 0; i < 4; i++) out[n][i] = 0.0f;
    #pragma unroll
    for (int k = 0; k < TILES; k++) {
        u32 a[4];
        ldmatrix_x4(values + down + k * 32, a[0], a[1], a[2], a[3]);
        #pragma unroll
        for (int i = 0; i < 4; i++) a[i] = rectified(a[i]);
        #pragma unroll
        for (int n = 0; n < WEIGHT_ROWS / 16; n++) {
            u32 b[4];
            ldmatrix_x4(weights + across + n * 16 * PITCH * 2 + k * 32, b[0], b[1], b[2], b[3]);
            if (n == TILES) {
                multiply(divisors, a, b[0], b[1]);
            } else {
                multiply(out[2 * n], a, b[0], b[1]);
                multiply(out[2 * n + 1], a, b[2], b[3]);
            }
        }
    }
    if constexpr (LINEAR) divide_results(out, divisors, reinterpret_cast<const float*>(all_weights + WEIGHT_ROWS * PITCH), epsilon);
    #pragma unroll
    for (int n = 0; n < 2 * TILES; n++) {
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const int token = first + lane / 4 + 8 * i, channel = n * 8 + lane % 4 * 2;
            if (token >= tokens || channel >= channels) continue;
            u16* to = output + (long long)token * position + channel;
            if (WIDTH != 2) {
                *reinterpret_cast<u32*>(to) = pack2(out[n][2 * i], out[n][2 * i + 1]);
            } else {
                to[0] = pack1(out[n][2 * i]);
                if (channel + 1 < channels) to[1] = pack1(out[n][2 * i + 1]);
            }
        }
    }
}
