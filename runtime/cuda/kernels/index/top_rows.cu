// The first KEEP elements of each line in order: the largest, or the smallest. Of equal elements the one with the lower index comes first; a
// NaN counts as larger than any number. A block takes LINES lines, each with WARPS warps.
//
// Elements become keys that are ordered as integers: the element that comes first has the larger key. A threshold selects the kept elements;
// the search for it counts keys. Threads hold the keys of a line in registers (top_keys.cuh). A line that is too long for that is read again
// for each count (top_digits.cuh). The kept elements are then gathered and sorted.
//
// generated.cuh defines TYPE (of the elements, by number), LINES (1 if WARPS is more), WARPS, KEYS (per thread; 0: lines are read again), RANK
// (axes that number the lines), KEEP, CAPACITY (KEEP or the next power of two), LARGEST, WIDE (elements of 64 bits), INDICES (the indices
// are written).
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
};

#if WIDE
typedef u64 Key;
#else
typedef u32 Key;
#endif
constexpr u32 KEY_BITS = 8 * sizeof(Key), LINE_THREADS = WARPS * 32;
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

DEVICE u32 ordered(float v) {
    const u32 bits = v == 0 ? 0 : __float_as_uint(v);
    return v != v ? ~0u : bits ^ (u32(i32(bits) >> 31) | 0x80000000u);
}
DEVICE u64 ordered(double v) {
    const u64 bits = v == 0 ? 0 : __double_as_longlong(v);
    return v != v ? ~u64(0) : bits ^ (u64(i64(bits) >> 63) | u64(1) << 63);
}
DEVICE u32 ordered(bool v) { return v; }
DEVICE u32 ordered(u8 v) { return v; }
DEVICE u32 ordered(u16 v) { return v; }
DEVICE u32 ordered(u32 v) { return v; }
DEVICE u64 ordered(u64 v) { return v; }
DEVICE u32 ordered(i8 v) { return u32(v) ^ 0x80000000u; }
DEVICE u32 ordered(i16 v) { return u32(v) ^ 0x80000000u; }
DEVICE u32 ordered(i32 v) { return u32(v) ^ 0x80000000u; }
DEVICE u64 ordered(i64 v) { return u64(v) ^ u64(1) << 63; }

DEVICE Key key_of(Element e) {
    const Key key = ordered(widen(e));
    return LARGEST ? key : Key(~key);
}

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
    Item items[CAPACITY > CANDIDATES ? CAPACITY : CANDIDATES];
};

// Bitonic: no two items are equal, so the result does not depend on the order in which they were gathered.
DEVICE void sort(Shared& s, u32 thread) {
    for (u32 run = 2; run <= CAPACITY; run *= 2) {
        for (u32 half = run / 2; half; half /= 2) {
            for (u32 pair = thread; pair < CAPACITY / 2; pair += LINE_THREADS) {
                const u32 low = pair / half * half * 2 + pair % half, high = low + half;
                const Item a = s.items[low], b = s.items[high];
                if (comes_before(b, a) == !(low & run)) {
                    s.items[low] = b;
                    s.items[high] = a;
                }
            }
            line_barrier();
        }
    }
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

#if KEYS
// Each gathered candidate counts the candidates before it.
DEVICE void put_candidates(const Shared& s, u32 count, const Places& places, u32 thread) {
    for (u32 j = thread; j < count; j += LINE_THREADS) {
        const Item own = s.items[j];
        u32 before = 0;
        #pragma unroll 4
        for (u32 i = 0; i < count; i++) before += comes_before(s.items[i], own) ? 1 : 0;
        if (before < KEEP) places.put(before, own.at);
    }
}
#endif

extern "C" __global__ void __launch_bounds__(LINES * LINE_THREADS) top_rows(const __grid_constant__ Params p) {
    __shared__ Shared shared[LINES];
    Shared& s = shared[threadIdx.x / LINE_THREADS];
    const u32 thread = threadIdx.x % LINE_THREADS, line = blockIdx.x * LINES + threadIdx.x / LINE_THREADS;
    launch_dependents();
    wait_for_predecessor();
    if (LINES > 1 && line >= p.lines) return;
    const Places places(p, line);
    Line held(places.x, p, thread);
    if (thread == 0) s.gathered = 0;
    line_barrier();
#if KEYS
    if (FEW) {
        const u32 count = held.gather(s.items, s.gathered, held.bound(s.counts, KEEP), p);
        if (count <= CANDIDATES) {
            put_candidates(s, count, places, thread);
            return;
        }
        line_barrier();
        if (thread == 0) s.gathered = 0;
    }
#endif
    for (u32 j = KEEP + thread; j < CAPACITY; j += LINE_THREADS) s.items[j] = {0, ~0u};
    const Threshold t = p.size == KEEP ? Threshold{0, p.size} : held.threshold(s.counts, KEEP);
    line_barrier();
    held.each([&](Key key, u32 at) {
        if (t.keeps(key, at)) s.items[atomicAdd(&s.gathered, 1)] = {key, at};
    });
    line_barrier();
    sort(s, thread);
    for (u32 j = thread; j < KEEP; j += LINE_THREADS) places.put(j, s.items[j].at);
}
