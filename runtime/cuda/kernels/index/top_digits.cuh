// top_rows.cu: a line that is read again for each count. The threshold is found digit by digit: the histogram of a digit gives the bin with
// the last kept element. Where several elements share its key, digits of their index decide.
#pragma once

constexpr u32 DIGIT_BITS = 8, BINS = 256, NO_BIN = BINS, GROUP = 16, GROUPS = BINS / GROUP, INDEX_BITS = 32;
static_assert(LINES == 1 && LINE_THREADS >= BINS, "a thread for each bin");

struct Counts {
    u32 bins[BINS], groups[GROUPS];
    u32 digit, rest, inside;
};

// Finds the bin with the `rest`-th element from the top: s.digit, s.rest (kept elements of the bin), s.inside (all its elements).
DEVICE void find_bin(Counts& s, u32 rest) {
    __syncthreads();
    if (threadIdx.x < GROUPS) {
        u32 sum = 0;
        for (u32 j = 0; j < GROUP; j++) sum += s.bins[threadIdx.x * GROUP + j];
        s.groups[threadIdx.x] = sum;
    }
    __syncthreads();
    if (threadIdx.x < BINS) {
        const u32 bin = threadIdx.x, group = bin / GROUP;
        u32 above = 0;
        for (u32 j = group + 1; j < GROUPS; j++) above += s.groups[j];
        for (u32 j = bin + 1; j < (group + 1) * GROUP; j++) above += s.bins[j];
        if (above < rest && above + s.bins[bin] >= rest) {
            s.digit = bin;
            s.rest = rest - above;
            s.inside = s.bins[bin];
        }
    }
    __syncthreads();
}

template <u32> struct Line {
    const Elements key_at;
    const u32 size;
    DEVICE Line(const Elements& key_at, u32 size, u32) : key_at(key_at), size(size) {}

    template <typename Do> DEVICE void each(Do act) const {
        #pragma unroll 4
        for (u32 at = threadIdx.x; at < size; at += LINE_THREADS) act(key_at(at), at);
    }
    // Counts the elements by bin; bin_of(key, inverted index) is NO_BIN for elements to skip.
    template <typename BinOf> DEVICE void count(Counts& s, BinOf bin_of) const {
        for (u32 j = threadIdx.x; j < BINS; j += LINE_THREADS) s.bins[j] = 0;
        __syncthreads();
        each([&](Key key, u32 at) {
            const u32 bin = bin_of(key, ~at);
            if (bin != NO_BIN) atomicAdd(&s.bins[bin], 1);
        });
    }
    DEVICE u32 gather_some(Counts&, Item*, u32&) const { return CANDIDATES + 1; }      // there is no bound
    template <typename If> DEVICE void gather(Item* items, u32& gathered, If condition) const {
        line_barrier();
        each([&](Key key, u32 at) {
            if (condition(key, at)) items[atomicAdd(&gathered, 1)] = {key, at};
        });
        line_barrier();
    }
    DEVICE Threshold threshold(Counts& s) const {
        u32 rest = KEEP;
        Key key = 0, key_mask = 0;
        for (int shift = KEY_BITS - DIGIT_BITS; shift >= 0; shift -= DIGIT_BITS) {
            count(s, [&](Key k, u32) { return (k & key_mask) == key ? u32(k >> shift) & (BINS - 1) : NO_BIN; });
            find_bin(s, rest);
            key |= Key(s.digit) << shift;
            key_mask |= Key(BINS - 1) << shift;
            rest = s.rest;
            if (s.inside == rest) return key ? Threshold{key - 1, 0} : Threshold{0, size};
        }
        u32 inverted = 0, mask = 0;
        for (int shift = INDEX_BITS - DIGIT_BITS; shift >= 0; shift -= DIGIT_BITS) {
            count(s, [&](Key k, u32 other) { return k == key && (other & mask) == inverted ? other >> shift & (BINS - 1) : NO_BIN; });
            find_bin(s, rest);
            inverted |= s.digit << shift;
            mask |= (BINS - 1) << shift;
            rest = s.rest;
            if (s.inside == rest) break;
        }
        return {key, inverted ? ~inverted + 1 : size};
    }
};
