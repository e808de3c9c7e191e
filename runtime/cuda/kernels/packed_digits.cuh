// Rows as integers of three digits, and their products with packed weights by mma.sync m16n8k32 on 8-bit integers.
//
// Operand A: register r of product q of a chunk holds four numbers of channel g (or g + 8) in the bytes of a word. Operand B: column
// 4 (m % 2) + d holds digit d of row m (column 3 and 7: nothing that is read). So lane 4 g + t has sums of channels g and g + 8: of digits
// 0 and 1 where t is even, of digit 2 where it is odd, of row t / 2 of a pair.
//
// generated.cuh defines ROWS, multiply() of 8-bit integers, and what packed.cuh says.
#pragma once

static_assert(!FLOAT_CODES, "numbers are integers");
constexpr int PRODUCTS = CHUNK_K / 32, GROUP_PRODUCTS = PRODUCTS / GROUPS, GROUP_K = CHUNK_K / GROUPS, ROW_PAIRS = (ROWS + 1) / 2;
static_assert(GROUP_PRODUCTS >= (BITS == 2 ? 2 : 1), "a scale is of whole products");
constexpr int ROW_BYTES = 3 * CHUNK_K, STAT_BYTES = 16 * GROUPS;       // of a row of a chunk

// A group of a row: sums of digits 0 and 1, or of digit 2, and what one of them is worth.
struct GroupSum {
    int sum;
    float unit;
};

// ``v`` (below 2^22 in magnitude, as the lowest bits of a float) as bytes: three digits from -128 to 127.
DEVICE u32 digits_of(float v) {
    return (__float_as_uint(v) + (0x00808080u - 0x4b400000u)) ^ 0x00808080u;
}

// Four integers' digits 0, 1 and 2, in the order of the operands.
DEVICE void across(u32 (&word)[3], u32 a, u32 b, u32 c, u32 d) {
    const u32 low = __byte_perm(a, b, 0x5140), high = __byte_perm(c, d, 0x5140);
    word[0] = __byte_perm(low, high, 0x5410), word[1] = __byte_perm(low, high, 0x7632);
    word[2] = __byte_perm(__byte_perm(a, b, 0x0062), __byte_perm(c, d, 0x0062), 0x5410);
}

// The rows' digits in shared memory, [chunk][row][pair of products][digit][lane of four][16 bytes], and their groups,
// [chunk][row][group][digits 0 and 1, or 2]. A warp puts those of its own chunks there, and reads no others.
struct Digits {
    u8 *rows, *stats;
    __device__ __forceinline__ Digits(u8* at, int chunks, int first)
        : rows(at + first * (ROWS * ROW_BYTES)), stats(at + chunks * (ROWS * ROW_BYTES) + first * (ROWS * STAT_BYTES)) {}

    // Of all rows, ``count`` chunks from number ``begin`` of K on, with zeros beyond ``k``. By a whole warp. SCALED: times ``scale``; then the
    // sums of the squares of the rows as they were go to ``squares``.
    template <bool SCALED>
    __device__ __forceinline__ void put(const u16* x, long long x_pitch, const float* scale, float* squares, int begin, int count, int k, int lane) const {
        const int vectors = count * (CHUNK_K / 8);
        float square[ROWS];
        uint4 part[ROWS], next[ROWS];
        auto load = [&](uint4 (&into)[ROWS], int v) {
            #pragma unroll
            for (int m = 0; m < ROWS; m++) {
                into[m] = make_uint4(0u, 0u, 0u, 0u);
                if (v < vectors && begin + v * 8 < k) into[m] = *reinterpret_cast<const uint4*>(x + m * x_pitch + begin + v * 8);
            }
        };
        load(part, lane);
        #pragma unroll
        for (int m = 0; m < ROWS; m++) square[m] = 0.0f;
        for (int v = lane; v - lane < vectors; v += 32) {
            load(next, v + 32);
            #pragma unroll
            for (int m = 0; m < ROWS; m++) {
                float value[8];
                values_of<SCALED>(value, square[m], part[m], scale, begin + v * 8, v < vectors ? k : 0);
                put_values(value, m, v, lane, v < vectors);
                part[m] = next[m];
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

    // Eight numbers from ``from`` of K on; those beyond ``k`` are zeros.
    template <bool SCALED>
    static __device__ __forceinline__ void values_of(float (&value)[8], float& squares, const uint4& part, const float* scale, int from, int k) {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 pair = word_of(part, i);
            value[2 * i] = from + 2 * i < k ? low_float(pair) : 0.0f, value[2 * i + 1] = from + 2 * i + 1 < k ? high_float(pair) : 0.0f;
        }
        if (!SCALED || from >= k) return;          // of scaled rows, K comes in eights
        #pragma unroll
        for (int i = 0; i < 8; i += 4) {
            const float4 s = __ldg(reinterpret_cast<const float4*>(scale + from + i));
            const float by[4] = {s.x, s.y, s.z, s.w};
            #pragma unroll
            for (int j = 0; j < 4; j++) squares = fmaf(value[i + j], value[i + j], squares), value[i + j] *= by[j];
        }
    }

    // Eight numbers of row m, the ``v``-th ones of the warp: as integers, with the power of two and the sums of their group.
    __device__ __forceinline__ void put_values(const float (&value)[8], int m, int v, int lane, bool inside) const {
        constexpr int GROUP_LANES = GROUP_K / 8;
        u32 most = 0;
        #pragma unroll
        for (int i = 0; i < 8; i++) most = max(most, __float_as_uint(value[i]) & 0x7fffffffu);
        #pragma unroll
        for (int step = 1; step < GROUP_LANES; step *= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, step));
        const u32 exponent = max(most >> 23, 40u);
        const float up = __uint_as_float((275u - min(exponent, 254u)) << 23);
        u32 digit[8];
        #pragma unroll
        for (int i = 0; i < 8; i++) digit[i] = digits_of(fmaf(value[i], up, 12582912.0f));
        int low = 0, high = 0;
        put_digits(digit, low, high, m, v, lane, inside);
        #pragma unroll
        for (int step = 1; step < GROUP_LANES; step *= 2) {
            low += __shfl_xor_sync(0xffffffffu, low, step);
            high += __shfl_xor_sync(0xffffffffu, high, step);
        }
        if (v % GROUP_LANES == 0 && inside) {
            // Of infinities and NaN, every product is NaN.
            const float unit = exponent == 255u ? __uint_as_float(0x7fffffffu) : __uint_as_float((exponent - 21u) << 23);
            u8* const group = stats + (v / (CHUNK_K / 8) * ROWS + m) * STAT_BYTES + v % (CHUNK_K / 8) / GROUP_LANES * 16;
            reinterpret_cast<GroupSum*>(group)[0] = GroupSum{low, unit}, reinterpret_cast<GroupSum*>(group)[1] = GroupSum{high, unit * 65536.0f};
        }
    }

    // Puts eight numbers' digits in their places, and adds them up. Of the four bytes of a word, this lane has two and a partner two:
    // each makes the words of two lanes of four.
    __device__ __forceinline__ void put_digits(const u32 (&digit)[8], int& low, int& high, int m, int v, int lane, bool inside) const {
        constexpr int PARTNER = BITS == 8 ? 1 : BITS == 4 ? 2 : 4;
        const bool second = lane & PARTNER;
        u32 own[4], theirs[4];
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            own[i] = digit[second ? i + 4 : i];
            theirs[i] = __shfl_xor_sync(0xffffffffu, digit[second ? i : i + 4], PARTNER);
        }
        const int chunk = v / (CHUNK_K / 8), step = v % (CHUNK_K / 8) / 2;
        const int product = BITS == 2 ? step / 4 * 2 + step % 2 : step / 2, reg = BITS == 8 ? step % 2 : v % 2;
        u8* const to = rows + (chunk * ROWS + m) * ROW_BYTES + product / 2 * 192 + (product % 2 * 2 + reg) * 4;
        int sum[3] = {0, 0, 0};
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 a0 = second ? theirs[2 * i] : own[2 * i], a1 = second ? theirs[2 * i + 1] : own[2 * i + 1];
            const u32 b0 = second ? own[2 * i] : theirs[2 * i], b1 = second ? own[2 * i + 1] : theirs[2 * i + 1];
            u32 word[3];
            if (BITS == 8)
                across(word, a0, a1, b0, b1);
            else
                across(word, a0, b0, a1, b1);
            #pragma unroll
            for (int d = 0; d < 3; d++) {
                sum[d] = __dp4a(int(word[d]), 0x01010101, sum[d]);
                if (inside) *reinterpret_cast<u32*>(to + d * 64 + (second * 2 + i) * 16) = word[d];
            }
        }
        low = sum[0] + 256 * sum[1], high = sum[2];
    }
};

// What lane 4 g + t reads: digits of column g, sums of the rows of its results.
struct LaneDigits {
    const u8 *row[ROW_PAIRS], *stat[ROW_PAIRS];
    int second;                                    // what the lane's second sum is worth
    __device__ __forceinline__ LaneDigits(const Digits& digits, int lane) : second(lane % 2 ? 0 : 256) {
        #pragma unroll
        for (int i = 0; i < ROW_PAIRS; i++) {
            const int column = lane / 4, own = min(2 * i + column / 4, ROWS - 1), result = min(2 * i + lane % 4 / 2, ROWS - 1);
            row[i] = digits.rows + own * ROW_BYTES + min(column % 4, 2) * 64 + lane % 4 * 16;
            stat[i] = digits.stats + result * STAT_BYTES + lane % 2 * 8;
        }
    }
};

// Four numbers of a word: those of register ``r`` of product ``q``.
DEVICE u32 operand_word(const uint4& weights, int q, int r) {
    if (BITS == 8) return word_of(weights, 2 * q + r);
    const int up = BITS == 4 ? 4 * r : q % 2 * 4 + r * 2;
    return (word_of(weights, BITS == 4 ? q : q / 2) >> up) & (0x01010101u * ((1u << BITS) - 1));
}

DEVICE void clear(float (&total)[ROW_PAIRS][2]) {
    #pragma unroll
    for (int i = 0; i < ROW_PAIRS; i++) total[i][0] = total[i][1] = 0.0f;
}

// Adds the products of a chunk, number ``at`` of the warp's, to the lane's sums.
DEVICE void add_chunk(float (&total)[ROW_PAIRS][2], const Chunk& chunk, const LaneDigits& rows, int at) {
    #pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        int sum[ROW_PAIRS][4];
        #pragma unroll
        for (int i = 0; i < ROW_PAIRS * 4; i++) sum[i / 4][i % 4] = 0;
        #pragma unroll
        for (int i = 0; i < ROW_PAIRS; i++) {
            uint4 b;
            #pragma unroll
            for (int q = group * GROUP_PRODUCTS; q < (group + 1) * GROUP_PRODUCTS; q++) {
                if (q == group * GROUP_PRODUCTS || q % 2 == 0) b = *reinterpret_cast<const uint4*>(rows.row[i] + at * (ROWS * ROW_BYTES) + q / 2 * 192);
                const u32 a[4] = {operand_word(chunk.weights[0], q, 0), operand_word(chunk.weights[1], q, 0),
                                  operand_word(chunk.weights[0], q, 1), operand_word(chunk.weights[1], q, 1)};
                multiply(sum[i], a, q % 2 ? b.z : b.x, q % 2 ? b.w : b.y);
            }
        }
        float scale[2];
        Zero zero[2];
        #pragma unroll
        for (int h = 0; h < 2; h++) scale[h] = scale_at(chunk.scales[h], group), zero[h] = zero_at(chunk, h, group);
        #pragma unroll
        for (int i = 0; i < ROW_PAIRS; i++) {
            const GroupSum own = *reinterpret_cast<const GroupSum*>(rows.stat[i] + at * (ROWS * STAT_BYTES) + group * 16);
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                const int all = sum[i][2 * h] + sum[i][2 * h + 1] * rows.second;
                const float v = ZEROS == 2 ? float(all) - zero[h].rest * float(own.sum) : float(all - int(zero[h].whole) * own.sum);
                total[i][h] = fmaf(scale[h] * own.unit, v, total[i][h]);
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
