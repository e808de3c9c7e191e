// top_rows.cu: a line whose keys are in the registers of its threads.
//
// With few kept elements (FEW), the KEEP-th largest of the lanes' largest keys in a warp is a bound: at least KEEP keys reach it. Mostly few
// keys do. Each of them finds its rank by a comparison with all of them. Otherwise, or if many keys reach the bound, the threshold is found bit
// by bit, by the number of keys that reach a candidate.
#pragma once

constexpr bool FEW = KEEP <= 32;
constexpr u32 CANDIDATES = 128 * WARPS < 512 ? 128 * WARPS : 512;      // places for the keys that reach the bound

struct Counts {
    u32 of_warp[2][WARPS];                         // alternating: a late warp still reads the previous counts
    Key bounds[WARPS];
};

DEVICE constexpr u32 floor_power(u32 n) { return n < 2 ? n : 2 * floor_power(n / 2); }

struct Line {
    Key keys[KEYS];                                // 0 beyond the line, which reaches no candidate
    const u32 thread;
    u32 turn;

    DEVICE Line(const Element* x, const Params& p, u32 thread) : thread(thread), turn(0) {
        Element found[KEYS];                       // without a branch, so that all loads are in flight together
        #pragma unroll
        for (u32 i = 0; i < KEYS; i++) found[i] = x[min(place(i), p.size - 1) * p.step_x];
        #pragma unroll
        for (u32 i = 0; i < KEYS; i++) keys[i] = place(i) < p.size ? key_of(found[i]) : 0;
    }
    DEVICE u32 place(u32 i) const { return i * LINE_THREADS + thread; }

    template <typename Do> DEVICE void each(Do act) const {
        #pragma unroll
        for (u32 i = 0; i < KEYS; i++) act(keys[i], place(i));
    }
    // Whether a key belongs to the line: the last keys may be beyond it.
    DEVICE bool inside(u32 i, const Params& p) const { return i + 1 < KEYS || place(i) < p.size; }

    // The largest key that `kept` keys are known to reach: in each warp, `kept` lanes reach the warp's own bound.
    DEVICE Key bound(Counts& counts, u32 kept) const {
        const u32 lane = thread % 32;
        Key most = 0;
        #pragma unroll
        for (u32 i = 0; i < KEYS; i++) most = max(most, keys[i]);
        u32 before = 0;
        #pragma unroll
        for (u32 other = 0; other < 32; other++) {
            const Key v = __shfl_sync(~0u, most, other);
            before += v > most || (v == most && other < lane);
        }
        const u32 found = __reduce_add_sync(~0u, before + 1 == kept ? lane : 0);
        Key least = __shfl_sync(~0u, most, found);
        if (WARPS == 1) return least;
        if (lane == 0) counts.bounds[thread / 32] = least;
        line_barrier();
        #pragma unroll
        for (u32 w = 0; w < WARPS; w++) least = max(least, counts.bounds[w]);
        return least;
    }
    // Gathers the keys that reach a bound, in any order, up to the capacity; returns their number.
    DEVICE u32 gather(Item* items, u32& count, Key least, const Params& p) const {
        u32 own = 0;
        #pragma unroll
        for (u32 i = 0; i < KEYS; i++) own += keys[i] >= least && inside(i, p) ? 1 : 0;
        u32 at = own ? atomicAdd(&count, own) : 0;
        #pragma unroll
        for (u32 i = 0; i < KEYS; i++) {
            const bool reaches = keys[i] >= least && inside(i, p);
            if (reaches && at < CANDIDATES) items[at] = {keys[i], place(i)};
            at += reaches ? 1 : 0;
        }
        line_barrier();
        return count;
    }
    // The number of the line's keys that fulfill a condition.
    template <typename If> DEVICE u32 counted(Counts& counts, If condition) {
        u32 parts[4] = {};                         // independent of one another
        #pragma unroll
        for (u32 i = 0; i < KEYS; i++) parts[i % 4] += condition(keys[i], place(i)) ? 1 : 0;
        const u32 own = __reduce_add_sync(~0u, parts[0] + parts[1] + parts[2] + parts[3]);
        if (WARPS == 1) return own;
        u32* const found = counts.of_warp[turn];
        turn ^= 1;
        if (thread % 32 == 0) found[thread / 32] = own;
        line_barrier();
        return __reduce_add_sync(~0u, thread % 32 < WARPS ? found[thread % 32] : 0);
    }
    DEVICE Threshold threshold(Counts& counts, u32 kept) {
        Key key = 0;                               // the largest key that more than `kept` keys reach
        u32 above = 0;                             // number of larger keys: key + 1 was the latest candidate that too few keys reach
        #pragma unroll 1
        for (int bit = KEY_BITS - 1; bit >= 0; bit--) {
            const Key candidate = key | Key(1) << bit;
            const u32 reach = counted(counts, [&](Key k, u32) { return k >= candidate; });
            if (reach == kept) return {candidate - 1, 0};
            if (reach > kept)
                key = candidate;
            else
                above = reach;
        }
        u32 bound = 0;                             // the largest index below which too few of the equal keys are
        #pragma unroll 1
        for (u32 bit = floor_power(KEYS * LINE_THREADS); bit; bit /= 2) {
            const u32 candidate = bound | bit;
            if (above + counted(counts, [&](Key k, u32 at) { return k == key && at < candidate; }) < kept) bound = candidate;
        }
        return {key, bound + 1};
    }
};
