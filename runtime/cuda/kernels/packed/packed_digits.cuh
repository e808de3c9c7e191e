// Rows as integers of three digits, and their products with packed weights by mma.sync m16n8k32 on 8-bit integers.
//
// Operand A: register r of product q of a chunk holds four numbers of channel g (or g + 8) in the bytes of a word. Without zero points they
// are signed: numbers less half of their range, 4 bits times 16. Operand B: column 4 (m % 2) + d holds digit d of row m (column 3 and 7:
// nothing that is read). So lane 4 g + t has sums of channels g and g + 8: of digits 0 and 1 where t is even, of digit 2 where it is odd, of
// row t / 2 of a pair.
//
// generated.cuh defines ROWS, multiply() of 8-bit integers (operand A unsigned with zero points), and what packed.cuh says.
#pragma once

static_assert(!FLOAT_CODES && BITS >= 4, "numbers are integers of 4 or 8 bits");
constexpr int PRODUCTS = CHUNK_K / 32, GROUP_PRODUCTS = PRODUCTS / GROUPS, GROUP_LANES = CHUNK_K / GROUPS / 4, ROW_PAIRS = (ROWS + 1) / 2;
static_assert(GROUP_PRODUCTS >= 1, "a scale is of whole products");
// Of a row of a chunk: its digits; what one of digits 0 and 1 is worth, and of digit 2; with zero points, their sums in each group.
constexpr int UNITS_AT = 3 * CHUNK_K, SUMS_AT = UNITS_AT + 8, ROW_BYTES = (SUMS_AT + (ZEROS ? 8 * GROUPS : 0) + 15) / 16 * 16;
constexpr int WORDS = CHUNK_K / 4;
constexpr float NUMBER = !ZEROS && BITS == 4 ? 1.0f / 16 : 1.0f;       // what operand A counts

// ``v`` (at most 2^22 in magnitude) plus 1.5 * 2^23, as bytes: three digits from -128 to 127.
DEVICE u32 digits_of(float v) { return (__float_as_uint(v) + (0x00808080u - 0x4b400000u)) ^ 0x00808080u; }

// Digits 0, 1 and 2 of four integers, each in a word.
DEVICE void across(u32 (&word)[3], u32 a, u32 b, u32 c, u32 d) {
    const u32 low = __byte_perm(a, b, 0x5140), high = __byte_perm(c, d, 0x5140);
    word[0] = __byte_perm(low, high, 0x5410), word[1] = __byte_perm(low, high, 0x7632);
    word[2] = __byte_perm(__byte_perm(a, b, 0x0062), __byte_perm(c, d, 0x0062), 0x5410);
}

// A lane's word of operand B in each turn of TURN_K numbers of K: two numbers from ``first`` on and two SECOND further on, and where its
// digits and its chunk's row lie. In bytes but for K.
constexpr int TURN_K = 128, TURN_BYTES = TURN_K / CHUNK_K * ROWS * ROW_BYTES, SECOND = BITS == 8 ? 8 : 16;
struct Word {
    int first, row, to;
    __device__ __forceinline__ explicit Word(int lane) {
        const int in_chunk = lane % WORDS, product = in_chunk / 8, reg = in_chunk / 4 % 2;
        first = lane / WORDS * CHUNK_K + product * 32 + reg * (BITS == 8 ? 16 : 8) + lane % 4 * 2;
        row = lane / WORDS * (ROWS * ROW_BYTES);
        to = row + product / 2 * 192 + lane % 4 * 16 + (product % 2 * 2 + reg) * 4;
    }
};

// A word's four numbers as they are loaded: pairs, and the scales of a norm.
template <bool SCALED> struct Loaded {
    u32 pair[2];
    float2 scale[2];
    __device__ __forceinline__ void load(const u16* x, const float* by, int k, int last) {
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const int at = k + i * SECOND;
            pair[i] = at < last ? *reinterpret_cast<const u32*>(x + at) : 0u;
            if (at + 1 == last) pair[i] &= 0xffffu;
            if (SCALED) scale[i] = at < last ? __ldg(reinterpret_cast<const float2*>(by + at)) : make_float2(0.0f, 0.0f);
        }
    }
};

// Of row m, a turn's words, one of each lane, to ``digits``. SCALED: times the scales of a norm; the squares of the numbers as they were are
// added to ``squares``.
template <bool SCALED> DEVICE void put_words(u8* digits, const Loaded<SCALED>& in, float& squares, int m, const Word& own, bool inside, int lane) {
    float value[4] = {low_float(in.pair[0]), high_float(in.pair[0]), low_float(in.pair[1]), high_float(in.pair[1])};
    if (SCALED) {
        #pragma unroll
        for (int j = 0; j < 4; j++) squares = fmaf(value[j], value[j], squares), value[j] *= j % 2 ? in.scale[j / 2].y : in.scale[j / 2].x;
    }
    const float most = max_or_nan(max_or_nan(fabsf(value[0]), fabsf(value[1])), max_or_nan(fabsf(value[2]), fabsf(value[3])));
    const u32 exponent = max(__reduce_max_sync(0xffffffffu, __float_as_uint(most) & 0x7fffffffu) >> 23, 40u);
    const float up = __uint_as_float((275u - min(exponent, 254u)) << 23);
    u32 digit[4], word[3];
    #pragma unroll
    for (int j = 0; j < 4; j++) digit[j] = digits_of(fmaf(value[j], up, 12582912.0f));
    if (BITS == 8)
        across(word, digit[0], digit[1], digit[2], digit[3]);
    else
        across(word, digit[0], digit[2], digit[1], digit[3]);
    u8* const row = digits + own.row + m * ROW_BYTES;
    u8* const to = digits + own.to + m * ROW_BYTES;
    if (inside) {
        #pragma unroll
        for (int d = 0; d < 3; d++) *reinterpret_cast<u32*>(to + d * 64) = word[d];
    }
    if (inside && lane % WORDS < 2) {
        // Of infinities and NaN, every product is NaN.
        const float unit = exponent == 255u ? __uint_as_float(0x7fffffffu) : __uint_as_float((exponent - 21u) << 23) * NUMBER;
        reinterpret_cast<float*>(row + UNITS_AT)[lane % 2] = lane % 2 ? unit * 65536.0f : unit;
    }
#if ZEROS
    int low = __dp4a(int(word[0]), 0x01010101, 256 * __dp4a(int(word[1]), 0x01010101, 0)), high = __dp4a(int(word[2]), 0x01010101, 0);
    #pragma unroll
    for (int step = 1; step < GROUP_LANES; step *= 2) {
        low += __shfl_xor_sync(0xffffffffu, low, step);
        high += __shfl_xor_sync(0xffffffffu, high, step);
    }
    if (inside && lane % GROUP_LANES < 2) reinterpret_cast<int*>(row + SUMS_AT)[lane % WORDS / GROUP_LANES * 2 + lane % 2] = lane % 2 ? high : low;
#endif
}

// Puts the digits of all rows, of ``count`` chunks from number ``begin`` of K on, with zeros beyond ``k``, by a whole warp:
// [chunk][row][pair of products][digit][lane of four][16 bytes], and behind each row of a chunk what its digits count. SCALED: times
// ``scale``; then the sums of the squares of the rows as they were go to ``squares``.
template <bool SCALED>
DEVICE void put_rows(u8* digits, const u16* x, long long x_pitch, const float* scale, float* squares, int begin, int count, int k, int lane) {
    constexpr int SIDE = ROWS <= 2 ? (SCALED ? 2 : 4) / ROWS : 1;      // turns that are under way together
    const Word own(lane);
    const int all = count * CHUNK_K - own.first, last = k - begin - own.first;     // of K, as the lane counts
    x += begin + own.first;
    if (SCALED) scale += begin + own.first;
    float square[ROWS];
    #pragma unroll
    for (int m = 0; m < ROWS; m++) square[m] = 0.0f;
    for (int i = 0; i < count * CHUNK_K; i += TURN_K * SIDE, x += TURN_K * SIDE, scale += TURN_K * SIDE, digits += TURN_BYTES * SIDE) {
        Loaded<SCALED> in[SIDE][ROWS];
        #pragma unroll
        for (int s = 0; s < SIDE; s++) {
            #pragma unroll
            for (int m = 0; m < ROWS; m++) in[s][m].load(x + m * x_pitch, scale, s * TURN_K, i + s * TURN_K < all ? last - i : 0);
        }
        #pragma unroll
        for (int s = 0; s < SIDE; s++) {
            if (i + s * TURN_K >= count * CHUNK_K) break;
            #pragma unroll
            for (int m = 0; m < ROWS; m++) put_words(digits + s * TURN_BYTES, in[s][m], square[m], m, own, i + s * TURN_K < all, lane);
        }
    }
    if (!SCALED) return;
    #pragma unroll
    for (int m = 0; m < ROWS; m++) {
        #pragma unroll
        for (int step = 16; step > 0; step /= 2) square[m] += __shfl_xor_sync(0xffffffffu, square[m], step);
        if (lane == 0) squares[m] = square[m];
    }
}

// What lane 4 g + t reads: digits of column g, and what counts of the rows of its results.
struct LaneDigits {
    const u8 *row[ROW_PAIRS], *stat[ROW_PAIRS];
    int second;                                    // what the lane's second sum is worth
    u32 mask;                                      // of numbers of 4 bits, in a register: an instruction has room for one constant
    __device__ __forceinline__ LaneDigits(const u8* digits, int lane)
        : second(lane % 2 ? 0 : 256), mask(__shfl_sync(0xffffffffu, ZEROS ? 0x0f0f0f0fu : 0xf0f0f0f0u, 0)) {
        #pragma unroll
        for (int i = 0; i < ROW_PAIRS; i++) {
            const int column = lane / 4, own = min(2 * i + column / 4, ROWS - 1), result = min(2 * i + lane % 4 / 2, ROWS - 1);
            row[i] = digits + own * ROW_BYTES + min(column % 4, 2) * 64 + lane % 4 * 16;
            stat[i] = digits + result * ROW_BYTES + lane % 2 * 4;
        }
    }
};

// Four numbers of a word: those of register ``r`` of product ``q``.
DEVICE u32 operand_word(const uint4& weights, int q, int r, u32 mask) {
    if (BITS == 8) return word_of(weights, 2 * q + r) ^ (ZEROS ? 0u : 0x80808080u);
    const u32 word = word_of(weights, q);
    if (ZEROS) return (r ? word >> 4 : word) & mask;
    return ((r ? word : word << 4) & mask) ^ 0x80808080u;
}

DEVICE void clear(float (&total)[ROW_PAIRS][2]) {
    #pragma unroll
    for (int i = 0; i < ROW_PAIRS; i++) total[i][0] = total[i][1] = 0.0f;
}

// Of a chunk, in each group: the lane's sums of digits.
typedef int ChunkSums[GROUPS][ROW_PAIRS][4];

// The sums of COUNT chunks side by side, whose digits begin ``from`` bytes on.
template <int COUNT> DEVICE void multiply_chunks(ChunkSums (&sum)[COUNT], const Chunk* chunk, const LaneDigits& rows, const int (&from)[COUNT]) {
    #pragma unroll
    for (int i = 0; i < COUNT * GROUPS * ROW_PAIRS * 4; i++) sum[i / (GROUPS * ROW_PAIRS * 4)][i / (ROW_PAIRS * 4) % GROUPS][i / 4 % ROW_PAIRS][i % 4] = 0;
    #pragma unroll
    for (int q = 0; q < PRODUCTS; q += 2) {
        #pragma unroll
        for (int i = 0; i < ROW_PAIRS; i++) {
            uint4 b[COUNT];
            #pragma unroll
            for (int n = 0; n < COUNT; n++) b[n] = *reinterpret_cast<const uint4*>(rows.row[i] + from[n] + q / 2 * 192);
            #pragma unroll
            for (int r = q; r < q + 2; r++) {
                #pragma unroll
                for (int n = 0; n < COUNT; n++) {
                    const uint4 &low = chunk[n].weights[0], &high = chunk[n].weights[1];
                    const u32 a[4] = {operand_word(low, r, 0, rows.mask), operand_word(high, r, 0, rows.mask), operand_word(low, r, 1, rows.mask),
                                      operand_word(high, r, 1, rows.mask)};
                    multiply(sum[n][r / GROUP_PRODUCTS][i], a, r % 2 ? b[n].z : b[n].x, r % 2 ? b[n].w : b[n].y);
                }
            }
        }
    }
}

// Adds a chunk's sums, times its scales, to those of the tile.
DEVICE void add_chunk(float (&total)[ROW_PAIRS][2], const ChunkSums& sum, const Chunk& chunk, const LaneDigits& rows, int from) {
    #pragma unroll
    for (int i = 0; i < ROW_PAIRS; i++) {
        const u8* const stat = rows.stat[i] + from;
        const float unit = *reinterpret_cast<const float*>(stat + UNITS_AT);
        #pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                const int all = sum[group][i][2 * h] + sum[group][i][2 * h + 1] * rows.second;
                float v = float(all);
#if ZEROS
                const Zero zero = zero_at(chunk, h, group);
                const int digits = *reinterpret_cast<const int*>(stat + SUMS_AT + group * 8);
                v = ZEROS == 2 ? v - zero.rest * float(digits) : float(all - int(zero.whole) * digits);
#endif
                total[i][h] = fmaf(scale_at(chunk.scales[h], group) * unit, v, total[i][h]);
            }
        }
    }
}

// The warp's sums of a tile: [row][16].
DEVICE void store_sums(float* to, const float (&total)[ROW_PAIRS][2], int lane) {
    #pragma unroll
    for (int i = 0; i < ROW_PAIRS; i++) {
        const int m = 2 * i + lane % 4 / 2;
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const float whole = total[i][h] + __shfl_xor_sync(0xffffffffu, total[i][h], 1);
            if (lane % 2 == 0 && m < ROWS) to[m * 16 + lane / 4 + h * 8] = whole;
        }
    }
}
