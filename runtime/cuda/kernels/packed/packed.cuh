// Packed weights in tiles: from memory straight to the fragments of mma.sync m16n8k16 (operand A: rows are output channels).
//
// A chunk is 1024 bytes: 16 channels x CHUNK_K numbers of K. Lane 4 g + t reads 16 bytes of channel g and, 512 bytes further, 16 bytes of
// channel g + 8. Of each 16 elements of K, it holds the pairs from 2 t and from 2 t + 8 on: the register order of operand A.
// Pairs of numbers are at bit BITS * i of both halves of a word, so that one LOP3 turns them into 16-bit floats of a known exponent.
// optdnn/kernels/packed/tiles.py builds the tiles.
//
// generated.cuh defines BITS (2, 4, 8), FLOAT_CODES (e4m3), GROUPS (scales of a chunk's row), SCALE_FLOAT (scales are fp32), SCALE_BF16 (bf16;
// otherwise fp16), ZEROS (0: none, the zero point is half of the range; 1: a byte for each scale; 2: a value of the scales' type), and
// multiply().
#pragma once

constexpr int CHUNK_BYTES = 1024, CHUNK_K = 512 / BITS, STEPS = CHUNK_K / 16, GROUP_STEPS = STEPS / GROUPS, PAIRS = 16 / BITS;
constexpr int SCALE_BYTES = SCALE_FLOAT ? 4 : 2, ZERO_BYTES = ZEROS == 1 ? 1 : ZEROS == 2 ? SCALE_BYTES : 0;
static_assert(STEPS % GROUPS == 0, "a scale is of whole products");

struct PackedWeights {
    const u8 *tiles;                               // [tile of 16 channels][chunk][1024]
    const u8 *scales, *zeros;                      // [tile][set][16 channels][GROUPS]
    int chunks, sets, set_shift;                   // per tile; chunk c has the scales of set c >> set_shift
};

// Loads BYTES (a power of two) as words; the address is aligned to BYTES, at most to 16.
template <int BYTES> struct Words { u32 word[(BYTES + 3) / 4]; };
template <int BYTES> DEVICE Words<BYTES> load_words(const u8* at) {
    Words<BYTES> v;
    if constexpr (BYTES == 1) {
        v.word[0] = __ldg(at);
    } else if constexpr (BYTES == 2) {
        v.word[0] = __ldg(reinterpret_cast<const u16*>(at));
    } else if constexpr (BYTES == 4) {
        v.word[0] = __ldg(reinterpret_cast<const u32*>(at));
    } else if constexpr (BYTES == 8) {
        const uint2 x = __ldg(reinterpret_cast<const uint2*>(at));
        v.word[0] = x.x, v.word[1] = x.y;
    } else {
        #pragma unroll
        for (int i = 0; i < BYTES / 16; i++) {
            const uint4 x = __ldg(reinterpret_cast<const uint4*>(at) + i);
            v.word[4 * i] = x.x, v.word[4 * i + 1] = x.y, v.word[4 * i + 2] = x.z, v.word[4 * i + 3] = x.w;
        }
    }
    return v;
}
// The same from shared memory.
template <int BYTES> DEVICE Words<BYTES> shared_words(const u8* at) {
    Words<BYTES> v;
    if constexpr (BYTES == 1) {
        v.word[0] = *at;
    } else if constexpr (BYTES == 2) {
        v.word[0] = *reinterpret_cast<const u16*>(at);
    } else {
        #pragma unroll
        for (int i = 0; i < BYTES / 4; i++) v.word[i] = reinterpret_cast<const u32*>(at)[i];
    }
    return v;
}

DEVICE float scale_of(u32 bits) {                  // from the low 16 bits, unless scales are fp32
#if SCALE_FLOAT
    return __uint_as_float(bits);
#elif SCALE_BF16
    return __uint_as_float(bits << 16);
#else
    return low_half(bits);
#endif
}
DEVICE float scale_at(const Words<GROUPS * SCALE_BYTES>& v, int i) {
#if SCALE_FLOAT
    return scale_of(v.word[i]);
#else
    return scale_of(v.word[i / 2] >> (i % 2 * 16));
#endif
}

// A lane's part of a chunk, in memory order: channels g and g + 8.
struct Chunk {
    uint4 weights[2];
    Words<GROUPS * SCALE_BYTES> scales[2];
#if ZEROS
    Words<GROUPS * ZERO_BYTES> zeros[2];
#endif
};

DEVICE Chunk load_chunk(const PackedWeights& p, const Stream& stream, int tile, int chunk, int lane) {
    Chunk c;
    const u8* at = p.tiles + ((long long)tile * p.chunks + chunk) * CHUNK_BYTES + lane * 16;
    const long long set = ((long long)tile * p.sets + (chunk >> p.set_shift)) * 16 + lane / 4;
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        c.weights[h] = stream(at + h * 512);
        c.scales[h] = load_words<GROUPS * SCALE_BYTES>(p.scales + (set + h * 8) * (GROUPS * SCALE_BYTES));
#if ZEROS
        c.zeros[h] = load_words<GROUPS * ZERO_BYTES>(p.zeros + (set + h * 8) * (GROUPS * ZERO_BYTES));
#endif
    }
    return c;
}

DEVICE u32 twice(u32 bits16) { return bits16 | bits16 << 16; }

#if defined(DTYPE_BF16)
constexpr u32 ONE2 = 0x3f803f80;
#else
constexpr u32 ONE2 = 0x3c003c00;
#endif

// The zero point of a group: its integer part, and the rest of a floating-point zero point.
struct Zero {
    u32 whole;
    float rest;
};
DEVICE Zero zero_at(const Chunk& c, int h, int group) {
    Zero z;
#if ZEROS == 1
    z.whole = c.zeros[h].word[group / 4] >> (group % 4 * 8) & 255u;
#elif ZEROS == 2
    z.whole = 0;
    z.rest = scale_at(c.zeros[h], group);
#else
    z.whole = 1u << (BITS - 1);
#endif
    return z;
}

// Masks of the numbers in a word, by bit position. LOP3 takes one constant: of two, the compiler moves one into a register each time, unless
// it cannot know the value. ``zero`` is 0, read from memory.
struct Masks {
    u32 numbers[8 / BITS];
    __device__ __forceinline__ Masks(int zero = 0) {
        #pragma unroll
        for (int i = 0; i < 8 / BITS; i++) numbers[i] = (0x00010001u * ((1 << BITS) - 1) << (BITS * i)) + zero;
    }
};

// The PAIRS pairs of a word minus the zero point; two pairs for each 16 elements of K. Integers are exact.
DEVICE void unpack_word(u32 (&pair)[PAIRS], u32 word, const Zero& z, const Masks& masks = {}) {
#if FLOAT_CODES
    const u32 low = float8_to_half(word), high = float8_to_half(word >> 16);
#if defined(DTYPE_BF16)
    pair[0] = pack2(low_half(low), high_half(low)), pair[1] = pack2(low_half(high), high_half(high));
#else
    pair[0] = low, pair[1] = high;
#endif
#elif BITS == 8 && defined(DTYPE_BF16)             // 2^23 + number, as fp32
    const float offset = __uint_as_float(0x4b000000u + z.whole);
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        float low = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 + 2 * i)) - offset;
        float high = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7441 + 2 * i)) - offset;
        if (ZEROS == 2) low -= z.rest, high -= z.rest;     // a bfloat's eight bits are too few for a zero point
        pair[i] = pack2(low, high);
    }
#elif BITS == 8                                    // 1024 + number
    const u32 offset = twice(0xe400u + z.whole);
    pair[0] = fma2(__byte_perm(word, 0x64646464u, 0x4140), ONE2, offset);
    pair[1] = fma2(__byte_perm(word, 0x64646464u, 0x4342), ONE2, offset);
#elif defined(DTYPE_BF16)                          // 128 + number
    const u32 offset = twice(0xc300u + z.whole);
    #pragma unroll
    for (int i = 0; i < PAIRS; i++)
        pair[i] = fma2((word >> (BITS * i) & masks.numbers[0]) | 0x43004300u, ONE2, offset);
#else                                              // 1024 + number * 2^up: fp16 has ten bits after the leading one
    const u32 next = word >> 8;
    #pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const int up = BITS * i % 8;
        const u32 number = ((BITS * i < 8 ? word : next) & masks.numbers[up / BITS]) | 0x64006400u;
        pair[i] = fma2(number, twice(0x3c00u - 0x400u * up), twice(0xe400u - 0x400u * up + (z.whole << up)));
    }
#endif
#if ZEROS == 2 && !(BITS == 8 && defined(DTYPE_BF16))
    #pragma unroll
    for (int i = 0; i < PAIRS; i++) pair[i] = fma2(pair[i], ONE2, pack2(-z.rest, -z.rest));
#endif
}

// Word i of 16 bytes.
DEVICE u32 word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// The registers of operand A for a product of 16 elements of K: numbers minus their zero points; SCALED: times their scales.
template <bool SCALED = true> DEVICE void unpack_operand(u32 (&a)[4], const Chunk& chunk, int step, const Masks& masks = {}) {
    const int word = step * 4 / STEPS, at = step % (STEPS / 4) * 2, group = step / GROUP_STEPS;
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        u32 pair[PAIRS];
        unpack_word(pair, word_of(chunk.weights[h], word), zero_at(chunk, h, group), masks);
        a[h] = pair[at], a[h + 2] = pair[at + 1];
        if (!SCALED) continue;
        const float scale = scale_at(chunk.scales[h], group);
        const u32 both = pack2(scale, scale);
        a[h] = fma2(a[h], both, 0u), a[h + 2] = fma2(a[h + 2], both, 0u);
    }
}
