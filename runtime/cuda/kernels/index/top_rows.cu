// The first KEEP elements of each line in order: the largest, or the smallest. Of equal elements the one with the lower index comes first; a
// NaN counts as larger than any number. A block takes LINES lines, each with WARPS warps; or a part of a line, of PARTS parts.
//
// Elements become keys that are ordered as integers: the element that comes first has the larger key. Keys that reach a bound are gathered and
// sorted. Threads hold the keys of a line in registers (top_keys.cuh). The last block of a line to finish selects from the elements that
// the parts kept. A line that is too long for all this is read again for each count (top_digits.cuh).
//
// generated.cuh defines TYPE (of the elements, by number), LINES (1 if WARPS is more), WARPS, PARTS, KEYS (per thread; 0: lines are read again),
// RANK (axes that number the lines), KEEP, CANDIDATES (places for gathered elements, KEEP or more), LARGEST, KEY_BITS, INDICES (the indices are
// written).
#include "general.cuh"
#include "generated.cuh"

#if TYPE == 0
typedef f16 Element;
#elif TYPE == 1
typedef bf16 Element;
#elif TYPE == 2
typedef f32 Element;
#elif TYPE == 3
typedef f64 Element;
#elif TYPE == 4
typedef i8 Element;
#elif TYPE == 5
typedef i16 Element;
#elif TYPE == 6
typedef i32 Element;
#elif TYPE == 7
typedef i64 Element;
#elif TYPE == 8
typedef u8 Element;
#elif TYPE == 9
typedef u16 Element;
#elif TYPE == 10
typedef u32 Element;
#elif TYPE == 11
typedef u64 Element;
#elif TYPE == 12
typedef boolean Element;
#endif

struct Params {
    const Element* x;
    Element* y;
#if INDICES
    i64* index;
#endif
    i64 step_x, step_y, step_index;                // strides along a line
    i64 dims[RANK], x_strides[RANK], y_strides[RANK], index_strides[RANK];
    u32 size, lines;                               // elements of a line; lines
#if PARTS > 1
    struct Item* kept;                             // [lines][PARTS][KEEP]
    u32* arrived;                                  // [lines]: finished blocks
#endif
};

#if KEY_BITS == 64
typedef u64 Key;
#else
typedef u32 Key;
#endif
constexpr u32 LINE_THREADS = WARPS * 32;
static_assert(WARPS == 1 || LINES == 1, "lines of a block do not wait for one another");

struct Item {
    Key key;
    u32 at;
};

// Selects the kept elements: larger keys, and elements with this key whose index is below the bound.
struct Threshold {
    Key key;
    u32 bound;
    DEVICE bool keeps(Key other, u32 at) const { return other > key || (other == key && at < bound); }
};

// Waits for the threads of the line.
DEVICE void line_barrier() {
    if (WARPS > 1)
        __syncthreads();
    else
        __syncwarp();
}

// ---- keys ------------------------------------------------------------------------------------------------------------------

// A float of 16 bits; the bits of infinity.
DEVICE u32 ordered(u16 bits, u32 infinity) {
    const u32 size = bits & 0x7fff;
    return size > infinity ? 0xffff : size == 0 ? 0x8000 : bits & 0x8000 ? 0xffff ^ bits : bits | 0x8000;
}
DEVICE u32 ordered(f16 v) { return ordered(v.bits, 0x7c00); }
DEVICE u32 ordered(bf16 v) { return ordered(v.bits, 0x7f80); }
DEVICE u32 ordered(float v) {
    const u32 bits = v == 0 ? 0 : __float_as_uint(v);
    return v != v ? ~0u : bits ^ (u32(i32(bits) >> 31) | 0x80000000u);
}
DEVICE u64 ordered(double v) {
    const u64 bits = v == 0 ? 0 : __double_as_longlong(v);
    return v != v ? ~u64(0) : bits ^ (u64(i64(bits) >> 63) | u64(1) << 63);
}
DEVICE u32 ordered(boolean v) { return v.bits != 0; }
DEVICE u32 ordered(u8 v) { return v; }
DEVICE u32 ordered(u16 v) { return v; }
DEVICE u32 ordered(u32 v) { return v; }
DEVICE u64 ordered(u64 v) { return v; }
DEVICE u32 ordered(i8 v) { return u8(v) ^ 0x80; }
DEVICE u32 ordered(i16 v) { return u16(v) ^ 0x8000; }
DEVICE u32 ordered(i32 v) { return u32(v) ^ 0x80000000u; }
DEVICE u64 ordered(i64 v) { return u64(v) ^ u64(1) << 63; }

DEVICE Key key_of(Element e) {
    const Key key = ordered(e);
    return LARGEST ? key : Key(~key) & (~Key(0) >> (8 * sizeof(Key) - KEY_BITS));
}

// A line's keys, by the place of the element.
struct Elements {
    const Element* x;
    i64 step;
    DEVICE Key operator()(u32 at) const { return key_of(x[at * step]); }
};

DEVICE bool comes_before(const Item& a, const Item& b) { return a.key > b.key || (a.key == b.key && a.at < b.at); }

#if KEYS
#include "top_keys.cuh"
#else
#include "top_digits.cuh"
#endif

// ---- the kept elements -----------------------------------------------------------------------------------------------------

struct Shared {
    Counts counts;
    u32 gathered;
    Item items[CANDIDATES];
};

// Acts on each of a thread's items. Warps without items skip it.
template <u32 EACH, typename Do> DEVICE void each(u32 count, u32 thread, Do act) {
    #pragma unroll
    for (u32 k = 0; k < EACH; k++)
        if (k * LINE_THREADS + thread < count) act(k, k * LINE_THREADS + thread);
}

// Sorts runs, then pairs of them. An item's place in a run of RUN items is the number of items before it, and its place in a pair of runs is
// its place in its own one and the number of items before it in the other one. No two items are equal, so the result does not depend on the
// order in which they were gathered. (A bitonic sort with shuffles takes 1.2 to 1.8 times as long.)
DEVICE void sort(Item* items, u32 count, u32 thread) {
    constexpr u32 EACH = (CANDIDATES + LINE_THREADS - 1) / LINE_THREADS, RUN_BITS = 5, RUN = 1 << RUN_BITS;
    Item own[EACH] = {};
    u32 to[EACH] = {};
    const auto move = [&] {
        line_barrier();
        each<EACH>(count, thread, [&](u32 k, u32) { items[to[k]] = own[k]; });
        line_barrier();
    };
    each<EACH>(count, thread, [&](u32 k, u32 at) {
        const u32 base = at / RUN * RUN;
        own[k] = items[at];
        to[k] = base;
        #pragma unroll 8
        for (u32 i = base; i < min(base + RUN, count); i++) to[k] += comes_before(items[i], own[k]) ? 1 : 0;
    });
    move();
    for (u32 bits = RUN_BITS; 1u << bits < count; bits++) {
        u32 low[EACH], high[EACH];
        each<EACH>(count, thread, [&](u32 k, u32 at) {
            const u32 other = (at >> bits ^ 1) << bits;
            own[k] = items[at];
            low[k] = to[k] = min(other, count);
            high[k] = min(other + (1u << bits), count);
        });
        for (u32 half = 1u << bits; half; half /= 2)
            each<EACH>(count, thread, [&](u32 k, u32) {
                if (low[k] + half <= high[k] && comes_before(items[low[k] + half - 1], own[k])) low[k] += half;
            });
        each<EACH>(count, thread, [&](u32 k, u32 at) { to[k] = (at >> (bits + 1) << (bits + 1)) + (at & ((1u << bits) - 1)) + low[k] - to[k]; });
        move();
    }
}

// Leaves the kept elements of a line, in order, as the first items.
template <typename Held> DEVICE void select(Held& held, Shared& s, u32 thread) {
    if (thread == 0) s.gathered = 0;
    line_barrier();
    u32 count = held.gather_some(s.counts, s.items, s.gathered);
    if (count > CANDIDATES) {
        if (thread == 0) s.gathered = 0;
        line_barrier();
        const Threshold t = held.threshold(s.counts);
        held.gather(s.items, s.gathered, [&](Key key, u32 at) { return t.keeps(key, at); });
        count = KEEP;
    }
    sort(s.items, count, thread);
}

// Read and write addresses of a line.
struct Places {
    const Params& p;
    const Element* x;
    Element* y;
#if INDICES
    i64* index;
#endif
    DEVICE Places(const Params& p, u32 line) : p(p), x(p.x), y(p.y) {
#if INDICES
        index = p.index;
#endif
        for (int k = RANK - 1; k >= 0; k--) {
            const u32 o = line % u32(p.dims[k]);
            line /= u32(p.dims[k]);
            x += o * p.x_strides[k];
            y += o * p.y_strides[k];
#if INDICES
            index += o * p.index_strides[k];
#endif
        }
    }
    DEVICE void put(u32 rank, u32 at) const {
        y[rank * p.step_y] = x[at * p.step_x];
#if INDICES
        index[rank * p.step_index] = at;
#endif
    }
};

#if PARTS > 1
// The elements that the parts of a line kept, in their order: by part, each sorted. So of equal elements the one with the lower index is first.
struct Kept {
    const Item* items;
    static constexpr u32 SIZE = PARTS * KEEP;
    DEVICE Key operator()(u32 at) const { return items[at].key; }
};
#endif

extern "C" __global__ void __launch_bounds__(LINES * LINE_THREADS) top_rows(const __grid_constant__ Params p) {
    __shared__ Shared shared[LINES];
    Shared& s = shared[threadIdx.x / LINE_THREADS];
    const u32 thread = threadIdx.x % LINE_THREADS, line = (blockIdx.x * LINES + threadIdx.x / LINE_THREADS) / PARTS;
    launch_dependents();
    wait_for_predecessor();
    if (LINES > 1 && line >= p.lines) return;
    const Places places(p, line);
    const u32 part = blockIdx.x % PARTS, first = u64(part) * p.size / PARTS, size = u64(part + 1) * p.size / PARTS - first;
    Line<KEYS> held(Elements{places.x + first * p.step_x, p.step_x}, size, thread);
    select(held, s, thread);
#if PARTS > 1
    Item* const kept = p.kept + u64(line) * Kept::SIZE;
    for (u32 j = thread; j < KEEP; j += LINE_THREADS) kept[part * KEEP + j] = {s.items[j].key, first + s.items[j].at};
    if (!arrives_last(p.arrived + line, PARTS)) return;
    Line<(Kept::SIZE + LINE_THREADS - 1) / LINE_THREADS> merged(Kept{kept}, Kept::SIZE, thread);
    select(merged, s, thread);
    for (u32 j = thread; j < KEEP; j += LINE_THREADS) places.put(j, kept[s.items[j].at].at);
#else
    for (u32 j = thread; j < KEEP; j += LINE_THREADS) places.put(j, s.items[j].at);
#endif
}
