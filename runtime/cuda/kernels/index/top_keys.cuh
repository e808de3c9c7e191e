// top_rows.cu: a line whose keys are in its threads' registers. The threshold is found bit by bit: how many keys reach a candidate?
#pragma once

struct Counts {
    u32 of_warp[2][WARPS];                         // in turn: a warp that is late still reads those before
};

DEVICE constexpr u32 floor_power(u32 n) { return n < 2 ? n : 2 * floor_power(n / 2); }

struct Line {
    Key keys[KEYS];                                // beyond the line 0, which no candidate counts
    const u32 thread;
    u32 turn;

    DEVICE Line(const Element* x, const Params& p, u32 thread) : thread(thread), turn(0) {
        Element found[KEYS];                       // without a branch, so that all are on their way at once
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
    // How many keys of the line fulfil a condition.
    template <typename If> DEVICE u32 counted(Counts& counts, If condition) {
        u32 parts[4] = {};                         // that do not wait for one another
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
        Key key = 0;                               // the largest one that more than `kept` keys reach
        u32 above = 0;                             // keys that are larger: as counted last, since key + 1 was the last that too few reach
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
        u32 bound = 0;                             // the largest one below which too few of the equal keys are
        #pragma unroll 1
        for (u32 bit = floor_power(KEYS * LINE_THREADS); bit; bit /= 2) {
            const u32 candidate = bound | bit;
            if (above + counted(counts, [&](Key k, u32 at) { return k == key && at < candidate; }) < kept) bound = candidate;
        }
        return {key, bound + 1};
    }
};
