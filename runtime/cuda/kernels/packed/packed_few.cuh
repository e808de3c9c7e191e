// The products of packed weights with a few rows, in few instructions: the reads of the weights should set the time.
//
// A 4-bit or 2-bit number alone in the lowest bits of a 16-bit float is that number times 2^-24 (a subnormal, exact; so is an 8-bit number).
// Each bit further up doubles the factor. So one LOP3 makes two operands. Numbers at different bit positions have different accumulators. The
// zero point is the same for a group, so it multiplies the sum of the group's rows, and this term is subtracted from the sum of products.
// bfloat16 has no room for such numbers: there they are 128 plus the number.
//
// Rows are stored in shared memory in the order in which lanes read them: for each pair of products, 16 bytes for each lane of four. The sums
// of their groups follow.
//
// generated.cuh defines ROWS (up to eight), multiply(), and the macros of packed.cuh.
#pragma once

#if defined(DTYPE_BF16)
#define HAS_BF16 1
#else
#define HAS_BF16 0
#endif

constexpr int WORD_STEPS = STEPS / 4;              // products per word
// Distance between the pairs of a word at the same bit position, which share an accumulator.
constexpr int UNITS = HAS_BF16 ? 1 : 8 / BITS;
// Whether unconverted numbers are multiplied, and the sum is corrected once per group. Not where a word holds several groups: a pair of
// products would then belong to two groups.
constexpr bool RAW = !FLOAT_CODES && !(BITS == 8 && HAS_BF16) && (UNITS == 1 || GROUP_STEPS >= WORD_STEPS);
constexpr int SUMS = RAW ? UNITS : 2, ORDER = RAW ? UNITS : 1;
constexpr int GROUP_LANES = GROUP_STEPS * 2;       // lanes that hold 16 bytes each of a group's row

// Pair i of a word, as floats of a known exponent.
DEVICE u32 raw_pair(u32 word, u32 next, int i) {
#if HAS_BF16
    return (word >> (BITS * i) & 0x00010001u * ((1 << BITS) - 1)) | 0x43004300u;
#elif BITS == 8
    return __byte_perm(word, 0u, i ? 0x4342 : 0x4140);
#else
    return (BITS * i < 8 ? word : next) & (0x00010001u * ((1 << BITS) - 1)) << BITS * i % 8;
#endif
}
// The unit of a raw accumulator, and the constant that is added to each number.
DEVICE float raw_unit(int unit) { return HAS_BF16 ? 1.0f : float(1 << (24 - BITS * unit)); }
constexpr float RAW_OFFSET = HAS_BF16 ? 128.0f : 0.0f;

// ---- rows in shared memory ----------------------------------------------------------------------------------------------------

// Rows of ``chunks`` chunks of K, in the lanes' read order: row m begins at m * pitch, and its sums at m * chunks * GROUPS.
struct RowsHere {
    u8* rows;
    int chunks, pitch;
    float* sums;
    __device__ __forceinline__ RowsHere(u8* at, int chunks)
        : rows(at), chunks(chunks), pitch(chunks * CHUNK_K * 2 + 64), sums(reinterpret_cast<float*>(at + ROWS * pitch)) {}
};

// Offset of the pairs of half h of product s, for the first of four lanes. The 16 bytes of these lanes are contiguous.
DEVICE int place_of(int s, int h) {
    if (ORDER == 4) return (s / 4 * 2 + s % 2) * 64 + (h * 2 + s / 2 % 2) * 4;
    if (ORDER == 2) return s / 2 * 64 + (h * 2 + s % 2) * 4;
    return s / 2 * 64 + (s % 2 * 2 + h) * 4;
}

// Stores the rows from element ``first`` of K on, with zeros beyond ``k``; by all threads of the block. Whole warps.
template <int THREADS> DEVICE void put_rows(const RowsHere& here, const u16* x, long long x_pitch, int first, int k) {
    const int vectors = here.chunks * (CHUNK_K / 8), lane = threadIdx.x % 32;
    for (int base = threadIdx.x - lane; base < ROWS * vectors; base += THREADS) {
        const int i = base + lane, m = ROWS == 1 ? 0 : i / vectors, v = i - m * vectors, at = first + v * 8;
        const bool inside = i < ROWS * vectors;
        const u16* const from = x + m * x_pitch + at;
        u32 word[4] = {};
        if (inside && at + 8 <= k) {
            const uint4 part = *reinterpret_cast<const uint4*>(from);
            word[0] = part.x, word[1] = part.y, word[2] = part.z, word[3] = part.w;
        } else if (inside && at < k) {             // the end of a row: memory after it may be unmapped
            #pragma unroll
            for (int j = 0; j < 8; j++)
                if (at + j < k) word[j / 2] |= u32(from[j]) << j % 2 * 16;
        }
        float sum = 0.0f;
        #pragma unroll
        for (int j = 0; j < 4; j++) sum += low_float(word[j]) + high_float(word[j]);
        #pragma unroll
        for (int step = 1; step < GROUP_LANES; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        const int turned = v / 8 % 4;              // so that lanes write to different banks
        if (turned & 1) {
            const u32 w = word[0];
            word[0] = word[1], word[1] = word[2], word[2] = word[3], word[3] = w;
        }
        if (turned & 2) {
            const u32 w = word[0], y = word[1];
            word[0] = word[2], word[1] = word[3], word[2] = w, word[3] = y;
        }
        if (!inside) continue;
        u8* const to = here.rows + m * here.pitch + place_of(v / 2, v % 2);
        #pragma unroll
        for (int j = 0; j < 4; j++) *reinterpret_cast<u32*>(to + (j + turned) % 4 * 16) = word[j];
        if (v % GROUP_LANES == 0) here.sums[m * here.chunks * GROUPS + v / GROUP_LANES] = sum;
    }
}

// ---- products -------------------------------------------------------------------------------------------------------------------

// The lane's accumulators: for each tile of 16 channels, columns g and g + 8 of rows 2 t and 2 t + 1.
template <int COUNT> using Sums = float[COUNT][4];

// Read addresses of lane 4 g + t: its part of row g (of the last row, where there are fewer), and the sums of rows 2 t and 2 t + 1.
struct LaneRows {
    const u8* row;
    const float* sum[2];
    __device__ __forceinline__ LaneRows(const RowsHere& here, int lane) : row(here.rows + min(lane / 4, ROWS - 1) * here.pitch + lane % 4 * 16) {
        #pragma unroll
        for (int i = 0; i < 2; i++) sum[i] = here.sums + min(lane % 4 * 2 + i, ROWS - 1) * here.chunks * GROUPS;
    }
};

DEVICE uint4 words_of_rows(const u8* at) { return *reinterpret_cast<const uint4*>(at); }

// Adds the products of a group of chunk ``at``, with unconverted numbers.
template <int COUNT> DEVICE void add_raw(Sums<COUNT> (&sum)[SUMS], const Chunk (&chunk)[COUNT], const LaneRows& rows, int at, int group) {
    constexpr int LOADED = ORDER > 2 ? ORDER : 2;  // products whose rows are loaded at once
    #pragma unroll
    for (int s = 0; s < GROUP_STEPS; s += LOADED) {
        const int step = group * GROUP_STEPS + s, count = GROUP_STEPS == 1 ? 1 : LOADED;
        uint4 b[LOADED / 2];
        #pragma unroll
        for (int i = 0; i < LOADED / 2; i++) b[i] = words_of_rows(rows.row + at * (CHUNK_K * 2) + (step / 2 + i) * 64);
        #pragma unroll
        for (int i = 0; i < count; i++) {
            const int own = count == 1 ? step % 2 : i;
            #pragma unroll
            for (int n = 0; n < COUNT; n++) {
                const int word = UNITS == 1 ? (step + i) / WORD_STEPS : step / WORD_STEPS;
                const int first = UNITS == 1 ? (step + i) % WORD_STEPS * 2 : i, second = UNITS == 1 ? first + 1 : i + UNITS;
                const u32 low = word_of(chunk[n].weights[0], word), high = word_of(chunk[n].weights[1], word);
                const u32 a[4] = {raw_pair(low, low >> 8, first), raw_pair(high, high >> 8, first), raw_pair(low, low >> 8, second),
                                  raw_pair(high, high >> 8, second)};
                multiply(sum[UNITS == 1 ? (step + i) % SUMS : i][n], a, word_of(b[own / 2], own % 2 * 2), word_of(b[own / 2], own % 2 * 2 + 1));
            }
        }
    }
}

// The same, with numbers minus their zero points.
template <int COUNT> DEVICE void add_exact(Sums<COUNT> (&sum)[SUMS], const Chunk (&chunk)[COUNT], const LaneRows& rows, int at, int group) {
    uint4 b;                                       // for two products
    Zero zero[COUNT][2];
    #pragma unroll
    for (int n = 0; n < COUNT; n++) zero[n][0] = zero_at(chunk[n], 0, group), zero[n][1] = zero_at(chunk[n], 1, group);
    #pragma unroll
    for (int s = 0; s < GROUP_STEPS; s++) {
        const int step = group * GROUP_STEPS + s, word = step / WORD_STEPS, pair = step % WORD_STEPS * 2;
        if (s == 0 || step % 2 == 0) b = words_of_rows(rows.row + at * (CHUNK_K * 2) + step / 2 * 64);
        #pragma unroll
        for (int n = 0; n < COUNT; n++) {
            u32 low[PAIRS], high[PAIRS];
            unpack_word(low, word_of(chunk[n].weights[0], word), zero[n][0]);
            unpack_word(high, word_of(chunk[n].weights[1], word), zero[n][1]);
            const u32 a[4] = {low[pair], high[pair], low[pair + 1], high[pair + 1]};
            multiply(sum[s % 2][n], a, word_of(b, step % 2 * 2), word_of(b, step % 2 * 2 + 1));
        }
    }
}

// The zero point of a group, as a float.
DEVICE float zero_value(const Chunk& c, int h, int group) {
    const Zero z = zero_at(c, h, group);
    return ZEROS == 2 ? z.rest : float(z.whole);
}

// Adds the products of a chunk of each tile to the lane's accumulators. ``at``: index of the chunk among those of the stored rows.
template <int COUNT> DEVICE void add_chunk(Sums<COUNT>& total, const Chunk (&chunk)[COUNT], const LaneRows& rows, int at) {
    #pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        Sums<COUNT> sum[SUMS];
        #pragma unroll
        for (int i = 0; i < SUMS * COUNT * 4; i++) sum[i / (COUNT * 4)][i / 4 % COUNT][i % 4] = 0.0f;
        if constexpr (RAW)
            add_raw<COUNT>(sum, chunk, rows, at, group);
        else
            add_exact<COUNT>(sum, chunk, rows, at, group);
        #pragma unroll
        for (int i = 0; i < 4; i += ROWS == 1 ? 2 : 1) {   // with one row, the second accumulator is unused
            const float here = RAW ? rows.sum[i % 2][at * GROUPS + group] : 0.0f;
            #pragma unroll
            for (int n = 0; n < COUNT; n++) {
                float v;
                if (RAW) {
                    v = -(zero_value(chunk[n], i / 2, group) + RAW_OFFSET) * here;
                    #pragma unroll
                    for (int u = 0; u < SUMS; u++) v = fmaf(raw_unit(u), sum[u][n][i], v);
                } else {
                    v = sum[0][n][i] + sum[1 % SUMS][n][i];
                }
                total[n][i] = fmaf(scale_at(chunk[n].scales[i / 2], group), v, total[n][i]);
            }
        }
    }
}
