// top_rows.cu: a line whose keys are in the registers of its threads.
//
// A bound that at least KEEP keys reach, and mostly few more: the KEEP-th largest of the largest keys of equal groups. With few kept elements
// (FEW) the groups are the lanes of a warp. Otherwise they are parts of the threads' keys, and the bound is found by some bits at a time, by the
// numbers of groups that reach candidates. If too many keys reach the bound, the KEEP-th key itself is found, and then the index below which
// equal keys are kept.
#pragma once

constexpr bool FEW = KEEP <= (WARPS == 1 ? 32 : 16);
constexpr u32 MOST_COUNTS = 3;

struct Counts {
    u32 of_warp[2][MOST_COUNTS][WARPS];            // alternating: a late warp still reads the previous counts
    Key bounds[WARPS];
};

DEVICE constexpr u32 floor_power(u32 n) { return n < 2 ? n : 2 * floor_power(n / 2); }

template <u32 N> struct Line {
    // Two groups for each kept element let few more keys than needed reach the bound.
    static constexpr u32 WANTED = (2 * KEEP + LINE_THREADS - 1) / LINE_THREADS, GROUPS = WANTED < N ? WANTED : N;
    Key keys[N];                                   // 0 beyond the line, which reaches no candidate
    const u32 thread, size;
    u32 turn;
    Key least;                                     // the bound

    template <typename From> DEVICE Line(const From& key_at, u32 size, u32 thread) : thread(thread), size(size), turn(0), least(0) {
        #pragma unroll
        for (u32 i = 0; i < N; i++) keys[i] = key_at(min(place(i), size - 1));     // without a branch: all loads are in flight together
        #pragma unroll
        for (u32 i = 0; i < N; i++) keys[i] = place(i) < size ? keys[i] : 0;
    }
    DEVICE u32 place(u32 i) const { return i * LINE_THREADS + thread; }

    // The largest key that KEEP keys are known to reach: in each warp, KEEP lanes reach the warp's own bound.
    DEVICE Key bound_of_few(Counts& counts) const {
        const u32 lane = thread % 32;
        Key most = 0;
        #pragma unroll
        for (u32 i = 0; i < N; i++) most = max(most, keys[i]);
        u32 before = 0;
        #pragma unroll
        for (u32 other = 0; other < 32; other++) {
            const Key v = __shfl_sync(~0u, most, other);
            before += v > most || (v == most && other < lane);
        }
        const u32 found = __reduce_add_sync(~0u, before + 1 == KEEP ? lane : 0);
        Key best = __shfl_sync(~0u, most, found);
        if (WARPS == 1) return best;
        if (lane == 0) counts.bounds[thread / 32] = best;
        line_barrier();
        #pragma unroll
        for (u32 w = 0; w < WARPS; w++) best = max(best, counts.bounds[w]);
        return best;
    }
    // The line's sums of C numbers of each thread.
    template <u32 C> DEVICE void add_up(Counts& counts, u32 (&own)[C]) {
        #pragma unroll
        for (u32 c = 0; c < C; c++) own[c] = __reduce_add_sync(~0u, own[c]);
        if (WARPS == 1) return;
        auto& found = counts.of_warp[turn];
        turn ^= 1;
        #pragma unroll
        for (u32 c = 0; c < C; c++)
            if (thread % 32 == 0) found[c][thread / 32] = own[c];
        line_barrier();
        #pragma unroll
        for (u32 c = 0; c < C; c++) own[c] = __reduce_add_sync(~0u, thread % 32 < WARPS ? found[c][thread % 32] : 0);
    }
    // The number of the line's keys that fulfill a condition.
    template <typename If> DEVICE u32 counted(Counts& counts, If condition) {
        u32 own[1] = {};
        #pragma unroll
        for (u32 i = 0; i < N; i++) own[0] += condition(keys[i], place(i)) ? 1 : 0;
        add_up(counts, own);
        return own[0];
    }
    // A key that at least KEEP of the values reach: no larger one, or one that exactly KEEP of them reach.
    template <u32 G> DEVICE Key reached(Counts& counts, const Key (&values)[G]) {
        constexpr u32 BITS = G <= 4 ? 2 : 1, COUNTS = (1 << BITS) - 1;     // more counts per step, fewer steps: for few values this is faster
        static_assert(COUNTS <= MOST_COUNTS && KEY_BITS % BITS == 0, "");
        Key key = 0;
        #pragma unroll 1
        for (int shift = KEY_BITS - BITS; shift >= 0; shift -= BITS) {
            u32 own[COUNTS] = {};
            #pragma unroll
            for (u32 c = 0; c < COUNTS; c++)
                #pragma unroll
                for (u32 i = 0; i < G; i++) own[c] += values[i] >= (key | Key(c + 1) << shift) ? 1 : 0;
            add_up(counts, own);
            u32 digit = 0;
            bool exact = false;
            #pragma unroll
            for (u32 c = 0; c < COUNTS; c++) {
                digit += own[c] >= KEEP ? 1 : 0;
                exact = exact || own[c] == KEEP;
            }
            key |= Key(digit) << shift;
            if (exact) break;
        }
        return key;
    }
    DEVICE Key bound(Counts& counts) {
        if (size == KEEP) return 0;
        if (FEW) return bound_of_few(counts);
        Key most[GROUPS] = {};
        #pragma unroll
        for (u32 i = 0; i < N; i++) most[i % GROUPS] = max(most[i % GROUPS], keys[i]);
        return reached(counts, most);
    }
    // Gathers the keys that fulfill a condition, in any order, as far as there are places; returns their number.
    template <typename If> DEVICE u32 gather(Item* items, u32& gathered, If condition) const {
        const u32 lane = thread % 32;
        u32 own = 0;
        #pragma unroll
        for (u32 i = 0; i < N; i++) own += place(i) < size && condition(keys[i], place(i)) ? 1 : 0;
        u32 at = own;
        #pragma unroll
        for (u32 step = 1; step < 32; step *= 2) {
            const u32 before = __shfl_up_sync(~0u, at, step);
            at += lane >= step ? before : 0;
        }
        u32 first = lane == 31 && at ? atomicAdd(&gathered, at) : 0;
        at += __shfl_sync(~0u, first, 31) - own;
        #pragma unroll
        for (u32 i = 0; i < N; i++) {
            const bool taken = place(i) < size && condition(keys[i], place(i));
            if (taken && at < CANDIDATES) items[at] = {keys[i], place(i)};
            at += taken ? 1 : 0;
        }
        line_barrier();
        return gathered;
    }
    // Gathers KEEP keys or some more, the largest ones; more than CANDIDATES are only counted.
    DEVICE u32 gather_some(Counts& counts, Item* items, u32& gathered) {
        least = bound(counts);
        const u32 count = gather(items, gathered, [&](Key key, u32) { return key >= least; });
        line_barrier();                            // all have read the count
        return count;
    }
    DEVICE Threshold threshold(Counts& counts) {
        Key key = least;                           // often the KEEP-th key: many equal ones reach it
        u32 above = counted(counts, [&](Key k, u32) { return k > key; });
        if (above >= KEEP) {
            key = reached(counts, keys);
            above = counted(counts, [&](Key k, u32) { return k > key; });
        }
        u32 bound = 0;                             // the largest index below which too few of the equal keys are
        #pragma unroll 1
        for (u32 bit = floor_power(N * LINE_THREADS); bit; bit /= 2) {
            const u32 candidate = bound | bit;
            if (above + counted(counts, [&](Key k, u32 at) { return k == key && at < candidate; }) < KEEP) bound = candidate;
        }
        return {key, bound + 1};
    }
};
