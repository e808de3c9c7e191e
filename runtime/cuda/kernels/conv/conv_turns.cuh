// Rotary position embeddings in the epilogue of a product (TURNED): the launch rotates the pairs of a head's features while its results
// are in shared memory before their store. Part of the implicit-GEMM kernel, for 16-bit rows.
//
// A head has HEAD features. The first TURNED of them form pairs: features i and i + TURNED / 2, or (INTERLEAVED) two neighbors. A pair lies
// in one tile of 64 channels; with 128 features, in two tiles of one warpgroup (FAR). Channels below p.turned_channels belong to heads.
// The layout of the angles is [position][part][eight pairs][eight cosines, eight sines]; positions restart after p.positions rows. Heads
// take the angles of the HEAD_PARTS parts in turn.
#pragma once

#if TURNED
#ifndef HEAD_PARTS
#define HEAD_PARTS 1
#endif
constexpr bool FAR = TURNED == 128 && !INTERLEAVED;
constexpr int TURNED_TILES = FAR ? 2 : 1;          // tiles that are rotated together
static_assert(TURNED % 16 == 0 && TURNED <= HEAD && (HEAD < 64 ? 64 % HEAD == 0 : HEAD % 64 == 0), "tiles of 64 channels hold whole heads, or heads whole tiles");
static_assert(TURNED <= 64 || (TURNED % 64 == 0 && INTERLEAVED) || FAR, "pairs lie in one tile of 64 channels, or in two");
static_assert(OUT_ITEM == 2 && !DIRECT && !STREAM && !SCATTER && !BATCHED, "whole tiles of 16-bit rows");

DEVICE float half_of(u32 word, int k) { return k % 2 ? high_float(word) : low_float(word); }

// The pairs of one or two tiles of 64 channels x ROWS rows, in rows of 128 bytes with TMA's swizzle. An item is eight pairs, which one
// thread of the warpgroup rotates. A thread handles up to MOST items together.
template <int ROWS, int MOST> struct TurnedTile {
    static constexpr int IN_TILE = HEAD < 64 ? 64 / HEAD : 1, VECTORS = (TURNED < 64 || FAR ? TURNED : 64) / 16;
    static constexpr int ITEMS = ROWS * IN_TILE * VECTORS, TOGETHER = ITEMS < MOST * 128 ? (ITEMS + 127) / 128 : MOST;

    u32 cosines[TOGETHER][4], sines[TOGETHER][4];

    // The items of the tile from ``channel`` on. Where a tile holds several heads, the last ones may not turn.
    __device__ __forceinline__ static int items(const Params& p, int channel) {
        return HEAD < 64 ? min(ITEMS, (p.turned_channels - channel) / HEAD * ROWS * VECTORS) : ITEMS;
    }

    // Loads the angles of the items from ``begin`` to ``end``, in the tile of channels from ``channel`` on. No launch writes angles.
    __device__ __forceinline__ void load(const Params& p, int channel, int inside, int first_row, int begin, int end, int thread) {
        #pragma unroll
        for (int i = 0; i < TOGETHER; i++) {
            const int item = begin + i * 128 + thread, row = item % ROWS, vector = item / ROWS % VECTORS + inside / 16;
            if (item >= end) continue;
            const u32 position = u32(first_row + row) % u32(p.positions);
            const int part = HEAD_PARTS > 1 ? (channel / HEAD + item / ROWS / VECTORS) % HEAD_PARTS : 0;
            const uint4* from = p.angles + ((size_t(position) * HEAD_PARTS + part) * (TURNED / 16) + vector) * 2;
            const uint4 c = __ldg(from), s = __ldg(from + 1);
            cosines[i][0] = c.x, cosines[i][1] = c.y, cosines[i][2] = c.z, cosines[i][3] = c.w;
            sines[i][0] = s.x, sines[i][1] = s.y, sines[i][2] = s.z, sines[i][3] = s.w;
        }
    }

    // Rotates the pairs of these items in place.
    __device__ __forceinline__ void turn(u32 tile, int begin, int end, int thread) const {
        #pragma unroll
        for (int i = 0; i < TOGETHER; i++) {
            const int item = begin + i * 128 + thread, row = item % ROWS, vector = item / ROWS % VECTORS, head = item / ROWS / VECTORS;
            if (item >= end) continue;
            const int left = head * (HEAD / 8) + (INTERLEAVED ? 2 * vector : vector), right = left + (INTERLEAVED ? 1 : FAR ? 0 : TURNED / 16);
            const u32 row_at = tile + row * 128, at[2] = {row_at + ((left ^ (row & 7)) << 4), row_at + (FAR ? ROWS * 128 : 0) + ((right ^ (row & 7)) << 4)};
            const uint4 a = shared_load16(at[0]), b = shared_load16(at[1]);
            u32 words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
            float one[8], other[8];
            #pragma unroll
            for (int k = 0; k < 8; k++) {
                const float u = INTERLEAVED ? low_float(words[k]) : half_of(words[k / 2], k);
                const float v = INTERLEAVED ? high_float(words[k]) : half_of(words[4 + k / 2], k);
                const float cosine = half_of(cosines[i][k / 2], k), sine = half_of(sines[i][k / 2], k);
                one[k] = cosine * u - sine * v;
                other[k] = sine * u + cosine * v;
            }
            #pragma unroll
            for (int k = 0; k < 8; k++)
                words[k] = INTERLEAVED ? pack2(one[k], other[k]) : k < 4 ? pack2(one[2 * k], one[2 * k + 1]) : pack2(other[2 * k - 8], other[2 * k - 7]);
            shared_store16(at[0], make_uint4(words[0], words[1], words[2], words[3]));
            shared_store16(at[1], make_uint4(words[4], words[5], words[6], words[7]));
        }
    }
};

// Rotates the heads of M_TILES tiles from ``tile`` on; ``channel`` and ``first_row`` are their first. All threads of a warpgroup take part;
// ``wait()`` returns when the tiles are complete. With few accumulators, the angles are loaded before that.
template <int M_TILES, int ROWS, class Wait>
DEVICE void turn_heads(const Params& p, u32 tile, int channel, int first_row, int thread, const Wait& wait) {
    constexpr bool FEW = M_TILES * ROWS <= 128;
    typedef TurnedTile<ROWS, FEW ? 4 : 2> Tile;
    constexpr bool AHEAD = FEW && Tile::ITEMS <= Tile::TOGETHER * 128;
    #pragma unroll
    for (int m = 0; m < M_TILES; m += TURNED_TILES) {
        const int inside = HEAD > 64 ? (channel + m * 64) % HEAD : 0;
        const bool turns = channel + m * 64 < p.turned_channels && inside < TURNED;
        const int end = Tile::items(p, channel + m * 64);
        Tile heads;
        if (AHEAD && turns) heads.load(p, channel + m * 64, inside, first_row, 0, end, thread);
        if (m == 0) wait();
        #pragma unroll 1
        for (int begin = 0; turns && begin < end; begin += Tile::TOGETHER * 128) {
            if (!AHEAD) heads.load(p, channel + m * 64, inside, first_row, begin, end, thread);
            heads.turn(tile + m * ROWS * 128, begin, end, thread);
        }
    }
}
#endif
