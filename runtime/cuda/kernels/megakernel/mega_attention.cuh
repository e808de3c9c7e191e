// A job of a megakernel: attention of one new position over a cache, as attention_cached.cu computes it.
//
// A block takes the GROUP queries that share a key head, and every SPLITS-th tile of 64 keys that they see. Its keys, then its values, come
// through the ring. A warp takes 16 keys and 64 features of the values; further warps only release the slots. Blocks that share a key head
// exchange their results as packets, and each adds a part of the features.
//
// The row that this launch writes is read from shared memory, since the slot may hold older data in its place.
//
// generated.cuh defines SPLITS, HEADS (key heads of the whole batch), SOFTCAP, and the macros of attention_cached.cu, with SINKS.
#pragma once

constexpr int KEY_WARPS = 4, TILE_KEYS = KEY_WARPS * 16, WARP_PARTS = 1, VALUE_PARTS = (HEAD + 63) / 64;
#include "attention_cached.cuh"
static_assert(SLOT_BYTES >= TILE_KEYS * HEAD * 2, "a slot has the keys of a tile");
static_assert(KEY_WARPS * VALUE_PARTS <= WARPS && SPLITS <= 32 && HEADS * SPLITS <= LEAST_BLOCKS, "a warp, a lane, a block for each");

struct AttentionJob {
    Source queries, new_keys, new_values;          // pitch: between heads
    Target out;                                    // pitch: between heads
    const u16 *cosines, *sines;
    const int *starts, *lengths;                   // as in attention_cached.cu
    u16 *keys, *values;
    uint2* partial;                                // [key head][SPLITS][SENT] packets of a float
    long long keys_head, values_head;              // elements between heads; positions are contiguous
    int capacity, reach;
    float scale_log2, cap_in, cap_out;
#if SINKS
    const u16* sinks;                              // of each query head
#endif
};
constexpr int SENT = GROUP * (HEAD + 2);           // accumulators; for each query the largest score and the sum of weights

struct SeenKeys {
    int begin, end, first, last, active;           // keys, tiles, and the number of blocks that have a tile
    __device__ __forceinline__ SeenKeys(const AttentionJob& p) {
        end = max(0, min(*p.lengths, p.capacity)), begin = p.reach < 0 ? 0 : max(0, end - 1 - p.reach);
        first = begin / TILE_KEYS, last = (end + TILE_KEYS - 1) / TILE_KEYS;
        active = max(1, min(SPLITS, last - first));
    }
    __device__ __forceinline__ bool holds(int key) const { return key >= begin && key < end; }
};

struct Attention {
    static __device__ __forceinline__ void produce(const AttentionJob& p, Producer& me, int) {
        const int split = blockIdx.x / HEADS, head = blockIdx.x % HEADS;
        if (split >= SPLITS) return;
        const SeenKeys seen(p);
        me.job(0);
        #pragma unroll 1
        for (int tile = seen.first + split; tile < seen.last; tile += SPLITS) {
            const u32 bytes = min(TILE_KEYS, p.capacity - tile * TILE_KEYS) * (HEAD * 2);
            #pragma unroll 1
            for (int m = 0; m < 2; m++) {
                const u16* const from = (m ? p.values + head * p.values_head : p.keys + head * p.keys_head) + (long long)tile * (TILE_KEYS * HEAD);
                me.begin(me.part ? 0 : bytes);
                if (me.part == 0) me.cached(0, from, bytes);
                me.end();
            }
        }
    }

    static __device__ __forceinline__ void consume(const AttentionJob& p, Ring& ring, u8* shared, int warp, int lane, const Now& now, int number) {
        const int split = blockIdx.x / HEADS, head = blockIdx.x % HEADS;
        if (split >= SPLITS) return;
        const SeenKeys seen(p);
        if (split >= seen.active) return;
        const int start = p.starts ? *p.starts : 0;
        u16* const queries = reinterpret_cast<u16*>(shared);               // [8 TILES][ROW], then the new key and the new value
        u16* const new_key = queries + 8 * TILES * ROW;
        u16* const new_value = new_key + ROW;
        float* const found_at = reinterpret_cast<float*>(new_value + ROW); // [KEY_WARPS][FOUND]
#if SINKS
        float* const sinks = found_at + KEY_WARPS * FOUND;                 // [GROUP], times log2(e)
        if (threadIdx.x < GROUP) sinks[threadIdx.x] = LOG2_E * unpack1(p.sinks[head * GROUP + threadIdx.x]);
#endif
        bring(p, queries, head, now);
        sync_warps();
        if (split == 0 && start >= 0 && start < p.capacity && warp == WARPS - 1) write_row(p, new_key, new_value, head, start, lane);

        const float factor = SOFTCAP ? 1.0f : p.scale_log2;
        Found found;
        found.clear();
        #pragma unroll 1
        for (int tile = seen.first + split; tile < seen.last; tile += SPLITS) attend(found, p, ring, queries, tile, start, seen, factor, warp, lane);
        if (warp < KEY_WARPS * VALUE_PARTS) found.put(found_at + warp % KEY_WARPS * FOUND, lane, warp / KEY_WARPS);
        sync_warps();

        const u32 tag = now.tag(number);
        auto write = [&](int query, int feature, const float4& sum, float weight, float most) {
#if SINKS
            if (weight != 0.0f) weight += exp2_fast(fmaf(-most, factor, sinks[query]));
#endif
            const float whole = weight == 0.0f ? 0.0f : 1.0f / weight;     // no key at all: zeros
            const u32 a = pack2(sum.x * whole, sum.y * whole), b = pack2(sum.z * whole, sum.w * whole);
            const int at = (head * GROUP + query) * p.out.pitch + feature;
            *reinterpret_cast<uint2*>(p.out.plain + at) = make_uint2(a, b);
            write_packets(p.out.packets + at / 2, a, b, tag);
        };
        if (seen.active == 1) return add_up<false>(found_at, KEY_WARPS, factor, write);
        uint2* const parts = p.partial + head * (SPLITS * SENT);
        add_up<false>(found_at, KEY_WARPS, factor, [&](int query, int feature, const float4& sum, float weight, float most) {
            uint2* const to = parts + split * SENT + query * HEAD + feature;
            write_packets(to, __float_as_uint(sum.x), __float_as_uint(sum.y), tag), write_packets(to + 2, __float_as_uint(sum.z), __float_as_uint(sum.w), tag);
            if (feature == 0) write_packets(parts + split * SENT + GROUP * HEAD + 2 * query, __float_as_uint(most), __float_as_uint(weight), tag);
        });
        join(parts, split, seen.active, factor, tag, warp, lane, write);
    }

    // Loads queries, the new key (both rotated) and the new value.
    static __device__ __forceinline__ void bring(const AttentionJob& p, u16* queries, int head, const Now& now) {
        constexpr int UNITS = HEAD / 4;
        for (int e = threadIdx.x; e < (GROUP + 2) * UNITS; e += THREADS) {
            const int row = e / UNITS, unit = e % UNITS;
            const Source& source = row < GROUP ? p.queries : row == GROUP ? p.new_keys : p.new_values;
            const long long at = (row < GROUP ? head * GROUP + row : head) * source.pitch;
            auto read = [&](u32& a, u32& b, int left, int right) { a = receive_word(source, at + left, now), b = receive_word(source, at + right, now); };
            u16* const to = queries + (row < GROUP ? row : 8 * TILES + row - GROUP) * ROW;
            if (row <= GROUP) {
                turn_unit(to, read, p.cosines, p.sines, unit);
            } else {
                u32 a, b;
                read(a, b, 4 * unit, 4 * unit + 2);
                put_word(to + 4 * unit, a), put_word(to + 4 * unit + 2, b);
            }
        }
        for (int e = threadIdx.x; e < (8 * TILES - GROUP) * ROW / 2; e += THREADS) put_word(queries + GROUP * ROW + 2 * e, 0u);
    }
    static __device__ __forceinline__ void write_row(const AttentionJob& p, const u16* new_key, const u16* new_value, int head, int start, int lane) {
        for (int e = lane; e < HEAD; e += 32) {                            // pairs of features, of the key and of the value
            const int at = e % (HEAD / 2) * 2;
            if (e < HEAD / 2) put_word(p.keys + head * p.keys_head + (long long)start * HEAD + at, word_at(new_key + at));
            else put_word(p.values + head * p.values_head + (long long)start * HEAD + at, word_at(new_value + at));
        }
    }
    // Computes a tile: two slots.
    static __device__ __forceinline__ void attend(Found& found, const AttentionJob& p, Ring& ring, const u16* queries, int tile, int start, const SeenKeys& seen, float factor, int warp, int lane) {
        const u16 *const new_key = queries + 8 * TILES * ROW, *const new_value = new_key + ROW;
        const int origin = tile * TILE_KEYS, first = origin + warp % KEY_WARPS * 16, part = warp / KEY_WARPS;
        const bool works = warp < KEY_WARPS * VALUE_PARTS;
        u32 packed[TILES][2];
        ring.wait_full();
        if (works) {
            const u16* const keys = reinterpret_cast<const u16*>(__cvta_shared_to_generic(ring.at()));
            Fragment q[TILES], k[2];
            #pragma unroll
            for (int m = 0; m < TILES; m++) q[m].load(queries + (8 * m + lane / 4) * ROW, lane % 4);
            #pragma unroll
            for (int j = 0; j < 2; j++) {
                const int at = first + 8 * j + lane / 4;
                if (seen.holds(at)) k[j].load(at == start ? new_key : keys + (at - origin) * HEAD, lane % 4);
                else k[j].clear();
            }
            float s[2][4];
            score(s, q, k);
            #pragma unroll
            for (int i = 0; i < 8; i++) {
                float& v = s[i / 4][i % 4];
                if (SOFTCAP) v = fmaf(__fdividef(-2.0f, 1.0f + exp2_fast(v * p.cap_in)), p.cap_out, p.cap_out);
                if (!seen.holds(first + 8 * (i / 4) + lane % 4 * 2 + i % 2)) v = -infinity();
            }
            found.weigh(packed, s, factor, lane);
        }
        ring.release(lane);
        ring.next();
        ring.wait_full();
        if (works) {
            const u16* const values = reinterpret_cast<const u16*>(__cvta_shared_to_generic(ring.at()));
            const int feature = 64 * part + lane / 4 * 8;
            uint4 v[WARP_PARTS][4];
            #pragma unroll
            for (int j = 0; j < 4; j++) {
                const int at = first + lane % 4 * 2 + j % 2 + j / 2 * 8;
                const bool live = seen.holds(at) && (HEAD % 64 == 0 || feature < HEAD);
                const u16* const row = at == start ? new_value : values + (at - origin) * HEAD;
                v[0][j] = live ? *reinterpret_cast<const uint4*>(row + feature) : make_uint4(0u, 0u, 0u, 0u);
            }
            found.add(packed, v);
        }
        ring.release(lane);
        ring.next();
    }
    // Adds the results of a head's blocks. This block adds its part of the features, four per warp; each lane reads one block's result.
    template <class Write> static __device__ __forceinline__ void join(const uint2* parts, int split, int active, float factor, u32 tag, int warp, int lane, const Write& write) {
        constexpr int FOURS = GROUP * HEAD / 4;
        const int begin = FOURS * split / active, end = FOURS * (split + 1) / active;
        const bool mine = lane < active;
        const uint2* const own = parts + min(lane, active - 1) * SENT;
        for (int f = begin + warp; f < end; f += WARPS) {
            const int query = f * 4 / HEAD, feature = f * 4 % HEAD;
            const uint2* const at[3] = {own + query * HEAD + feature, own + query * HEAD + feature + 2, own + GROUP * HEAD + 2 * query};
            const bool live[3] = {mine, mine, mine};
            uint2 v[3] = {};
            receive(v, at, live, tag);
            const float most = mine ? __uint_as_float(v[2].x) : -infinity();
            float all = most;
            #pragma unroll
            for (int step = 16; step > 0; step /= 2) all = fmaxf(all, __shfl_xor_sync(0xffffffffu, all, step));
            const float rescale = mine ? exp2_fast(fmaf(most, factor, all == -infinity() ? 0.0f : -all * factor)) : 0.0f;
            float sum[5] = {__uint_as_float(v[0].x), __uint_as_float(v[0].y), __uint_as_float(v[1].x), __uint_as_float(v[1].y), __uint_as_float(v[2].y)};
            #pragma unroll
            for (int i = 0; i < 5; i++) {
                sum[i] *= rescale;
                #pragma unroll
                for (int step = 16; step > 0; step /= 2) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], step);
            }
            if (lane == 0) write(query, feature, make_float4(sum[0], sum[1], sum[2], sum[3]), sum[4], all);
        }
    }
};
