// Rows as integers of three digits, and their products with packed weights by mma.sync m16n8k32 on 8-bit integers.
//
// Operand A: register r of product q of a chunk holds four packed bytes of channel g (or g + 8), without conversion. For 4-bit weights,
// a byte has two numbers: ``low + 16 high``. Register 0 holds these bytes, register 1 holds ``16 high``. So the row's value at the place of
// ``low`` is 16 x, and its value at the place of ``high`` is its own x' minus 16 times the x of ``low``: the products sum to
// 16 (low x + high x'). Operand B: column 4 (m % 2) + d holds digit d of row m (columns 3 and 7 are never read). So lane 4 g + t has
// accumulators of channels g and g + 8 for row t / 2 of a pair: of digits 0 and 1 where t is even, of digit 2 where t is odd.
//
// generated.cuh defines ROWS, NORM, SHARE (most chunks of a warp), EVEN (each warp has SHARE chunks, and K ends with a chunk), multiply() of
// 8-bit integers (operand A unsigned), and the macros of packed.cuh.
#pragma once

static_assert(!FLOAT_CODES && BITS >= 4, "numbers are integers of 4 or 8 bits");
constexpr int PRODUCTS = CHUNK_K / 32, GROUP_PRODUCTS = PRODUCTS / GROUPS, ROW_PAIRS = (ROWS + 1) / 2;
static_assert(GROUP_PRODUCTS >= 1, "a scale is of whole products");
// Bytes of a row in a chunk: its digits; then twice, for digits 0 and 1 and for digit 2: the value of one unit, and the factors of the
// groups' zero points.
constexpr int STATS_AT = 3 * CHUNK_K, STAT_BYTES = 4 + 4 * GROUPS, ROW_BYTES = (STATS_AT + 2 * STAT_BYTES + 15) / 16 * 16;
// A lane computes the digits of 8 elements of K. The warp computes the digits of a turn, which share a power of two.
constexpr int TURN_K = 256, CHUNK_LANES = CHUNK_K / 8, GROUP_LANES = CHUNK_LANES / GROUPS, TURN_BYTES = TURN_K / CHUNK_K * ROWS * ROW_BYTES;
constexpr int TURNS = (SHARE * CHUNK_K + TURN_K - 1) / TURN_K, MOST_SIDE = ROWS > 2 ? 1 : (NORM ? 2 : 4) / ROWS;
constexpr int SIDE = TURNS < MOST_SIDE ? TURNS : MOST_SIDE;            // turns whose rows are in flight together
constexpr u32 RANGE = BITS == 8 ? 22 : 18;         // bits of a row's integer; 16 times this integer, and a bit more, fits three digits
constexpr int TURN_CHUNKS = TURN_K / CHUNK_K;
// SIGNS is added before the digits are separated, and the same bits are flipped afterward: this makes digits signed. Adding ADDED[r] to a
// float of register r leaves its integer in the low bits, plus a constant: 2^22 for 8 bits. For 4 bits, a number minus 16 times the number of
// register 0 has SIGNS in its low 24 bits.
constexpr u32 SIGNS = 0x00808080u, OFFSETS[2] = {BITS == 8 ? 0x400000u : 0x3c0000u, BITS == 8 ? 0x400000u : 0x408080u};
constexpr float ADDED[2] = {8388608.0f + OFFSETS[0], 8388608.0f + OFFSETS[1]};
constexpr u32 ADDED_ALL = 4 * (2 * 0x4b000000u + OFFSETS[0] + OFFSETS[1]);
static_assert(BITS == 8 || ((OFFSETS[1] - 16 * OFFSETS[0] - SIGNS) & 0xffffffu) == 0, "of the last 24 bits, nothing else");

// The lane's own value, computed here and not at its use: the critical path after a wait then has fewer instructions.
DEVICE int now(int value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }

// Digits 0, 1 and 2 of four integers: one word per digit.
DEVICE void across(u32 (&word)[3], u32 a, u32 b, u32 c, u32 d) {
    const u32 low = __byte_perm(a, b, 0x5140), high = __byte_perm(c, d, 0x5140);
    word[0] = __byte_perm(low, high, 0x5410), word[1] = __byte_perm(low, high, 0x7632);
    word[2] = __byte_perm(__byte_perm(a, b, 0x0062), __byte_perm(c, d, 0x0062), 0x5410);
}

// The register of operand A for pair j of a lane's eight numbers: pair j begins 8 j elements of K further.
DEVICE constexpr int register_of(int j) { return BITS == 8 ? j / 2 : j % 2; }

// The digits of register r of a row's eight numbers, in words.
DEVICE void digit_words(u32 (&word)[3], const u32 (&number)[8], int r) {
    u32 digit[4];
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        const int at = (BITS == 8 ? 2 * r + i / 2 : i / 2 * 2 + r) * 2 + i % 2;
        if (BITS == 8)
            digit[i] = number[at] + (SIGNS - OFFSETS[0]);
        else
            digit[i] = r == 0 ? number[at] * 16 + (SIGNS - 16 * OFFSETS[0]) : number[at] - 16 * number[at - 2];
    }
    if (BITS == 8)
        across(word, digit[0], digit[1], digit[2], digit[3]);
    else
        across(word, digit[0], digit[2], digit[1], digit[3]);
    #pragma unroll
    for (int d = 0; d < 3; d++) word[d] ^= 0x80808080u;
}

// A warp's part of the rows, from element ``begin`` of K on: ``count`` chunks, with zeros beyond K.
struct RowPart {
    int lane, chunk, first;                        // the lane's chunk of a turn, and its first element of K
    int left, chunks;                              // elements of K, and chunks, from there on
    int place;                                     // offset of the lane's digits
    u32 pair[SIDE][ROWS][4];
    float2 scale[NORM ? SIDE : 1][4];
    float squares[ROWS];

    __device__ __forceinline__ RowPart(int begin, int count, int k, int lane) : lane(lane), chunk(lane / CHUNK_LANES) {
        const int product = lane % CHUNK_LANES / 4;
        first = begin + chunk * CHUNK_K + product * 32 + lane % 4 * 2;
        left = min(k, begin + count * CHUNK_K) - first, chunks = count - chunk;
        place = now(chunk * (ROWS * ROW_BYTES) + product / 2 * 192 + lane % 4 * 16 + product % 2 * 8, lane);
        #pragma unroll
        for (int m = 0; m < ROWS; m++) squares[m] = 0.0f;
    }
    // Whether the lane has a chunk in a turn, and whether its pair j begins before the end of K.
    __device__ __forceinline__ bool inside(int turn) const {
        if (EVEN) return SHARE % TURN_CHUNKS == 0 || turn * TURN_CHUNKS + chunk < SHARE;
        return turn * TURN_CHUNKS < chunks;
    }
    __device__ __forceinline__ bool inside(int turn, int j) const { return EVEN ? inside(turn) : turn * TURN_K + j * 8 < left; }
    // Whether K ends after the first element of pair j.
    __device__ __forceinline__ bool alone(int turn, int j) const { return !EVEN && left - (turn * TURN_K + j * 8) == 1; }
    // Loads the norm's scales of the next turns. No kernel writes them.
    __device__ __forceinline__ void load_scales(const float* scales, int turn) {
        #pragma unroll
        for (int i = 0; i < SIDE * 4; i++) {
            const int at = first + (turn + i / 4) * TURN_K + i % 4 * 8;
            float2& both = scale[i / 4][i % 4];
            if (!inside(turn + i / 4, i % 4)) both = make_float2(0.0f, 0.0f);
            else if (alone(turn + i / 4, i % 4)) both = make_float2(__ldg(scales + at), 0.0f);
            else both = __ldg(reinterpret_cast<const float2*>(scales + at));
        }
    }
    __device__ __forceinline__ void load_rows(const u16* x, long long x_pitch, int turn) {
        #pragma unroll
        for (int i = 0; i < SIDE * ROWS * 4; i++) {
            const int s = i / (ROWS * 4), m = i / 4 % ROWS, j = i % 4;
            const u16* at = x + m * x_pitch + first + (turn + s) * TURN_K + j * 8;
            if (!inside(turn + s, j)) pair[s][m][j] = 0u;
            else if (alone(turn + s, j)) pair[s][m][j] = *at;
            else pair[s][m][j] = *reinterpret_cast<const u32*>(at);
        }
    }
    // Stores the digits of the next turns: [chunk][row][pair of products][digit][lane of four][16 bytes], and after each row of a chunk its
    // units and zero-point factors.
    __device__ __forceinline__ void put(u8* digits, int turn) {
        #pragma unroll
        for (int s = 0; s < SIDE; s++) {
            if (s > 0 && turn + s >= TURNS) break;
            #pragma unroll
            for (int m = 0; m < ROWS; m++) put_row(digits + (turn + s) * TURN_BYTES + m * ROW_BYTES, s, m, turn + s);
        }
    }
    __device__ __forceinline__ void put_row(u8* row, int s, int m, int turn) {
        float value[8];
        float most = 0.0f;
        #pragma unroll
        for (int j = 0; j < 4; j++) {
            const u32 both = pair[s][m][j];
            value[2 * j] = low_float(both), value[2 * j + 1] = high_float(both);
            if (NORM) {
                squares[m] = fmaf(value[2 * j], value[2 * j], fmaf(value[2 * j + 1], value[2 * j + 1], squares[m]));
                value[2 * j] *= scale[s][j].x, value[2 * j + 1] *= scale[s][j].y;
            }
            const float more = max_or_nan(fabsf(value[2 * j]), fabsf(value[2 * j + 1]));
            most = j == 0 ? more : max_or_nan(most, more);
        }
        const u32 exponent = max(__reduce_max_sync(0xffffffffu, __float_as_uint(most) & 0x7fffffffu) >> 23, 40u);
        const float up = __uint_as_float((253u + RANGE - min(exponent, 254u)) << 23);
        u32 number[8], sum = 0u - ADDED_ALL;
        #pragma unroll
        for (int i = 0; i < 8; i++) number[i] = __float_as_uint(fmaf(value[i], up, ADDED[register_of(i / 2)])), sum += number[i];
        u32 low[3], high[3];
        digit_words(low, number, 0);
        digit_words(high, number, 1);
        const bool here = inside(turn);
        #pragma unroll
        for (int d = 0; d < 3; d++)
            if (here) *reinterpret_cast<uint2*>(row + place + d * 64) = make_uint2(low[d], high[d]);
        #pragma unroll
        for (int step = 1; step < GROUP_LANES; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (lane % GROUP_LANES > 1 || !here) return;
        // In two parts, like the digits. With an infinity or NaN in the turn, every product is NaN.
        const int whole = int(sum) * (BITS == 8 ? 1 : 16), below = int(u32(whole) << 16) >> 16, part = lane % 2 ? (whole - below) >> 16 : below;
        const float unit = exponent == 255u ? __uint_as_float(0x7fffffffu) : __uint_as_float((exponent - 21u) << 23);
        u8* const stat = row + chunk * (ROWS * ROW_BYTES) + STATS_AT + lane % 2 * STAT_BYTES;
        if (lane % CHUNK_LANES < 2) *reinterpret_cast<float*>(stat) = lane % 2 ? unit * 65536.0f : unit;
        reinterpret_cast<int*>(stat)[1 + lane % CHUNK_LANES / GROUP_LANES] = ZEROS ? part : part << (BITS - 1);
    }
    // Stores the sums of squares of the original rows.
    __device__ __forceinline__ void put_squares(float* to) {
        #pragma unroll
        for (int m = 0; m < ROWS; m++) {
            #pragma unroll
            for (int step = 16; step > 0; step /= 2) squares[m] += __shfl_xor_sync(0xffffffffu, squares[m], step);
            if (lane == 0) to[m] = squares[m];
        }
    }
};

// Read addresses of lane 4 g + t: the digits of column g, and the units and zero-point factors for the rows of its results.
struct LaneDigits {
    const u8* digits;
    int row[ROW_PAIRS], stat[ROW_PAIRS];           // offsets from there
    int second;                                    // the weight of the lane's second accumulator
    __device__ __forceinline__ LaneDigits(const u8* digits, int lane) : digits(digits), second(now(lane % 2 ? 0 : 256, lane)) {
        #pragma unroll
        for (int i = 0; i < ROW_PAIRS; i++) {
            const int column = lane / 4, own = min(2 * i + column / 4, ROWS - 1), result = min(2 * i + lane % 4 / 2, ROWS - 1);
            row[i] = now(own * ROW_BYTES + min(column % 4, 2) * 64 + lane % 4 * 16, lane);
            stat[i] = now(result * ROW_BYTES + STATS_AT + lane % 2 * STAT_BYTES, lane);
        }
    }
};

// Register ``r`` of product ``q``: four bytes.
DEVICE u32 operand_word(const uint4& weights, int q, int r) {
    if (BITS == 8) return word_of(weights, 2 * q + r);
    return r ? word_of(weights, q) & 0xf0f0f0f0u : word_of(weights, q);
}

// The lane's accumulators of COUNT tiles.
template <int COUNT> using Totals = float[COUNT][ROW_PAIRS][2];
template <int COUNT> DEVICE void clear(Totals<COUNT>& total) {
    #pragma unroll
    for (int i = 0; i < COUNT * ROW_PAIRS * 2; i++) total[i / (ROW_PAIRS * 2)][i / 2 % ROW_PAIRS][i % 2] = 0.0f;
}

// Adds a group's integer sums of a tile, times its scales, minus the term of its zero points.
DEVICE void add_group(float (&total)[ROW_PAIRS][2], const int (&sum)[ROW_PAIRS][4], const Chunk& chunk, const LaneDigits& rows, int from, int group) {
    #pragma unroll
    for (int i = 0; i < ROW_PAIRS; i++) {
        const u8* const stat = rows.digits + from + rows.stat[i];
        const float unit = *reinterpret_cast<const float*>(stat);
        const int digits = reinterpret_cast<const int*>(stat)[1 + group];
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const int all = sum[i][2 * h] + sum[i][2 * h + 1] * rows.second;
            const Zero zero = zero_at(chunk, h, group);
            const float v = ZEROS == 2 ? float(all) - zero.rest * float(digits) : float(all - (ZEROS ? int(zero.whole) * digits : digits));
            total[i][h] = fmaf(scale_at(chunk.scales[h], group) * unit, v, total[i][h]);
        }
    }
}

// Adds the products of a chunk of COUNT tiles with the rows whose digits begin at offset ``from``.
template <int COUNT> DEVICE void add_chunks(Totals<COUNT>& total, const Chunk (&chunk)[COUNT], const LaneDigits& rows, int from) {
    uint4 b[ROW_PAIRS];                            // for two products
    int sum[COUNT][ROW_PAIRS][4];
    #pragma unroll
    for (int q = 0; q < PRODUCTS; q++) {
        #pragma unroll
        for (int i = 0; i < ROW_PAIRS; i++) {
            if (q % 2 == 0) b[i] = *reinterpret_cast<const uint4*>(rows.digits + from + rows.row[i] + q / 2 * 192);
        }
        #pragma unroll
        for (int n = 0; n < COUNT; n++) {
            const uint4 &low = chunk[n].weights[0], &high = chunk[n].weights[1];
            const u32 a[4] = {operand_word(low, q, 0), operand_word(high, q, 0), operand_word(low, q, 1), operand_word(high, q, 1)};
            #pragma unroll
            for (int i = 0; i < ROW_PAIRS; i++) {
                if (q % GROUP_PRODUCTS == 0) sum[n][i][0] = sum[n][i][1] = sum[n][i][2] = sum[n][i][3] = 0;
                multiply(sum[n][i], a, q % 2 ? b[i].z : b[i].x, q % 2 ? b[i].w : b[i].y);
            }
            if ((q + 1) % GROUP_PRODUCTS == 0) add_group(total[n], sum[n], chunk[n], rows, from, q / GROUP_PRODUCTS);
        }
    }
}

// Stores the warp's accumulators of a tile: [row][16].
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
