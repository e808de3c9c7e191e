// The products of a chunk of packed weights with a few rows, as few instructions as there are: bytes of weights should be what takes time.
//
// A number of 4 or 2 bits that stands alone in the lowest bits of a 16-bit float is that number times 2^-24 (a subnormal, exact; so is one
// of 8 bits), some bits up a power of two more: one LOP3 makes two operands. Numbers that lie equally far up are summed apart, and the
// zero point is subtracted from the sum: it is the same for a group, so it multiplies the sum of the group's rows, which mma.sync
// gives for a matrix of ones. bfloat has no room for such numbers: there they are 128 and the number.
//
// generated.cuh defines ROWS, ROW_TILES (eights of them), multiply(), and what packed.cuh says.
#pragma once

#if defined(DTYPE_BF16)
#define HAS_BF16 1
#else
#define HAS_BF16 0
#endif

constexpr int WORD_STEPS = STEPS / 4;              // products of a word
// Pairs of a word that are equally far up, and with that have one sum, are so many apart.
constexpr int UNITS = HAS_BF16 ? 1 : 8 / BITS;
// Whether numbers are summed with what a float of theirs has beside them. Not where a word has several groups, so that pairs of
// products would belong to two of them.
constexpr bool RAW = !FLOAT_CODES && !(BITS == 8 && HAS_BF16) && (UNITS == 1 || GROUP_STEPS >= WORD_STEPS);
constexpr int SUMS = RAW ? UNITS : 2;

// Pair i of a word, as a float of a known exponent.
DEVICE u32 raw_pair(u32 word, u32 next, int i) {
#if HAS_BF16
    return (word >> (BITS * i) & 0x00010001u * ((1 << BITS) - 1)) | 0x43004300u;
#elif BITS == 8
    return __byte_perm(word, 0u, i ? 0x4342 : 0x4140);
#else
    return (BITS * i < 8 ? word : next) & (0x00010001u * ((1 << BITS) - 1)) << BITS * i % 8;
#endif
}
// What a raw sum is multiplied by, and what stands beside each number.
DEVICE float raw_unit(int unit) { return HAS_BF16 ? 1.0f : float(1 << (24 - BITS * unit)); }
constexpr float RAW_OFFSET = HAS_BF16 ? 128.0f : 0.0f;

// Where a lane's 16 bytes of ldmatrix begin in a row, from the first of a chunk on. A register and the next one are what one product multiplies:
// pairs that are equally far up, or else pairs 2 t and 2 t + 8 of 16 of K.
DEVICE int place_in_row(int lane) {
    const int matrix = lane / 8;
    return RAW && UNITS > 1 ? matrix % 2 * (16 * WORD_STEPS) + matrix / 2 * 16 : matrix * 16;
}

// The sums of the lane: of each tile of 16 channels and of each eight rows, columns g and g + 8 of rows 2 t and 2 t + 1.
template <int COUNT> using Sums = float[COUNT][ROW_TILES][4];

// Adds the products of a group of a chunk: numbers as they lie, and the rows (times ones). ``rows``: where the lane's 16 bytes of ldmatrix
// begin, in the first eight rows; others are ``eight`` bytes apart.
template <int COUNT>
DEVICE void add_raw(Sums<COUNT> (&sum)[SUMS], float (&ones)[ROW_TILES][4], const Chunk (&chunk)[COUNT], u32 rows, u32 eight, int group) {
    constexpr int LOADED = UNITS > 2 ? UNITS : 2;      // products whose rows are loaded at once
    const u32 one[4] = {ONE2, ONE2, ONE2, ONE2};
    #pragma unroll
    for (int s = 0; s < GROUP_STEPS; s += LOADED) {
        const int step = group * GROUP_STEPS + s, count = GROUP_STEPS == 1 ? 1 : LOADED;
        u32 b[ROW_TILES][LOADED][2];
        #pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
            #pragma unroll
            for (int i = 0; i < LOADED; i += 2)
                ldmatrix_x4(rows + m * eight + step / 2 * 64 + i * 16, b[m][i][0], b[m][i][1], b[m][i + 1][0], b[m][i + 1][1]);
        #pragma unroll
        for (int i = 0; i < count; i++) {
            const int own = count == 1 ? step % 2 : i;
            #pragma unroll
            for (int m = 0; m < ROW_TILES; m++) multiply(ones[m], one, b[m][own][0], b[m][own][1]);
            #pragma unroll
            for (int n = 0; n < COUNT; n++) {
                const int word = UNITS == 1 ? (step + i) / WORD_STEPS : step / WORD_STEPS;
                const int first = UNITS == 1 ? (step + i) % WORD_STEPS * 2 : i, second = UNITS == 1 ? first + 1 : i + UNITS;
                const u32 low = word_of(chunk[n].weights[0], word), high = word_of(chunk[n].weights[1], word);
                const u32 a[4] = {raw_pair(low, low >> 8, first), raw_pair(high, high >> 8, first), raw_pair(low, low >> 8, second),
                                  raw_pair(high, high >> 8, second)};
                #pragma unroll
                for (int m = 0; m < ROW_TILES; m++) multiply(sum[UNITS == 1 ? 0 : i][n][m], a, b[m][own][0], b[m][own][1]);
            }
        }
    }
}

// The same with numbers less their zero points.
template <int COUNT>
DEVICE void add_exact(Sums<COUNT> (&sum)[SUMS], const Chunk (&chunk)[COUNT], u32 rows, u32 eight, int group) {
    u32 b[ROW_TILES][4];                           // of two products
    Zero zero[COUNT][2];
    #pragma unroll
    for (int n = 0; n < COUNT; n++) zero[n][0] = zero_at(chunk[n], 0, group), zero[n][1] = zero_at(chunk[n], 1, group);
    #pragma unroll
    for (int s = 0; s < GROUP_STEPS; s++) {
        const int step = group * GROUP_STEPS + s, word = step / WORD_STEPS, at = step % WORD_STEPS * 2;
        if (s == 0 || step % 2 == 0) {
            #pragma unroll
            for (int m = 0; m < ROW_TILES; m++) ldmatrix_x4(rows + m * eight + step / 2 * 64, b[m][0], b[m][1], b[m][2], b[m][3]);
        }
        #pragma unroll
        for (int n = 0; n < COUNT; n++) {
            u32 low[PAIRS], high[PAIRS];
            unpack_word(low, word_of(chunk[n].weights[0], word), zero[n][0]);
            unpack_word(high, word_of(chunk[n].weights[1], word), zero[n][1]);
            const u32 a[4] = {low[at], high[at], low[at + 1], high[at + 1]};
            #pragma unroll
            for (int m = 0; m < ROW_TILES; m++) multiply(sum[s % 2][n][m], a, b[m][step % 2 * 2], b[m][step % 2 * 2 + 1]);
        }
    }
}

// The zero point of a group, as a float.
DEVICE float zero_value(const Chunk& c, int h, int group) {
    const Zero z = zero_at(c, h, group);
    return ZEROS == 2 ? z.rest : float(z.whole);
}

// Adds the products of a chunk of each tile to the lane's sums.
template <int COUNT> DEVICE void add_chunk(Sums<COUNT>& total, const Chunk (&chunk)[COUNT], u32 rows, u32 eight) {
    #pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        Sums<COUNT> sum[SUMS];
        float ones[ROW_TILES][4];
        #pragma unroll
        for (int i = 0; i < SUMS * COUNT * ROW_TILES * 4; i++) sum[i / (COUNT * ROW_TILES * 4)][i / (ROW_TILES * 4) % COUNT][i / 4 % ROW_TILES][i % 4] = 0.0f;
        #pragma unroll
        for (int i = 0; i < ROW_TILES * 4; i++) ones[i / 4][i % 4] = 0.0f;
        if constexpr (RAW)
            add_raw<COUNT>(sum, ones, chunk, rows, eight, group);
        else
            add_exact<COUNT>(sum, chunk, rows, eight, group);
        #pragma unroll
        for (int n = 0; n < COUNT; n++) {
            #pragma unroll
            for (int m = 0; m < ROW_TILES; m++) {
                #pragma unroll
                for (int i = 0; i < 4; i += ROWS == 1 ? 2 : 1) {   // of one row, the second has no sums
                    float v;
                    if (RAW) {
                        v = -(zero_value(chunk[n], i / 2, group) + RAW_OFFSET) * ones[m][i % 2];
                        #pragma unroll
                        for (int u = 0; u < SUMS; u++) v = fmaf(raw_unit(u), sum[u][n][m][i], v);
                    } else {
                        v = sum[0][n][m][i] + sum[1 % SUMS][n][m][i];
                    }
                    total[n][m][i] = fmaf(scale_at(chunk[n].scales[i / 2], group), v, total[n][m][i]);
                }
            }
        }
    }
}
