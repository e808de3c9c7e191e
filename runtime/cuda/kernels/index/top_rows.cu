// The first KEEP elements of each line in order: the largest ones, or the smallest ones. Of equal elements the one with the lower
// index comes first; a NaN counts as larger than any number. A block takes a line.
//
// Elements become keys that are ordered as integers, a larger key for an element that comes earlier. The KEEP-th largest key is found
// digit by digit: the histogram of a digit tells which bin holds it. Where several elements share this key, digits of their index
// decide. The block then gathers the elements up to this one, and sorts them.
//
// generated.cuh defines TYPE (of the elements, by number), THREADS (256 or more), RANK (axes that number the lines), KEEP, CAPACITY (KEEP or the next power
// of two), LARGEST, WIDE (elements of 64 bits), INDICES (the indices are written).
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
    i64 step_x, step_y, step_index;                // along a line
    i64 dims[RANK], x_strides[RANK], y_strides[RANK], index_strides[RANK];
    u32 size;                                      // of a line
};

#if WIDE
typedef u64 Key;
#else
typedef u32 Key;
#endif
constexpr u32 DIGIT_BITS = 8, BINS = 256, NO_BIN = BINS, GROUP = 16, GROUPS = BINS / GROUP;
static_assert(THREADS >= BINS, "a thread for each bin");
constexpr u32 KEY_BITS = 8 * sizeof(Key), INDEX_BITS = 32;

struct Item {
    Key key;
    u32 at;
};

struct Shared {
    u32 bins[BINS], groups[GROUPS];
    u32 digit, rest, inside, gathered;
    Item items[CAPACITY];
};

// The elements that are kept have a larger key under its mask, or the same and an inverted index that is not smaller under its mask.
struct Threshold {
    Key key, key_mask;
    u32 inverted, index_mask;
};

// ---- keys ------------------------------------------------------------------------------------------------------------------

DEVICE u32 ordered(float v) {
    if (v != v) return ~0u;
    const u32 bits = __float_as_uint(v == 0 ? 0.0f : v);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
DEVICE u64 ordered(double v) {
    if (v != v) return ~u64(0);
    const u64 bits = __double_as_longlong(v == 0 ? 0.0 : v);
    return bits >> 63 ? ~bits : bits | u64(1) << 63;
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

// ---- the threshold ---------------------------------------------------------------------------------------------------------

// Find the bin that holds the `rest`-th element from the top: s.digit, s.rest (how many of the bin are kept), s.inside (its elements).
DEVICE void find_bin(Shared& s, u32 rest) {
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

// Count the elements of a line by bin; bin_of(key, inverted index) is NO_BIN for those that do not count.
template <typename BinOf> DEVICE void count(Shared& s, const Element* x, const Params& p, BinOf bin_of) {
    for (u32 j = threadIdx.x; j < BINS; j += THREADS) s.bins[j] = 0;
    __syncthreads();
    #pragma unroll 4
    for (u32 at = threadIdx.x; at < p.size; at += THREADS) {
        const u32 bin = bin_of(key_of(x[at * p.step_x]), ~at);
        if (bin != NO_BIN) atomicAdd(&s.bins[bin], 1);
    }
}

DEVICE Threshold threshold(Shared& s, const Element* x, const Params& p) {
    Threshold t = {0, 0, 0, 0};
    u32 rest = KEEP;
    if (p.size == KEEP) return t;
    for (int shift = KEY_BITS - DIGIT_BITS; shift >= 0; shift -= DIGIT_BITS) {
        count(s, x, p, [&](Key key, u32) { return (key & t.key_mask) == t.key ? u32(key >> shift) & (BINS - 1) : NO_BIN; });
        find_bin(s, rest);
        t.key |= Key(s.digit) << shift;
        t.key_mask |= Key(BINS - 1) << shift;
        rest = s.rest;
        if (s.inside == rest) return t;
    }
    for (int shift = INDEX_BITS - DIGIT_BITS; shift >= 0; shift -= DIGIT_BITS) {
        count(s, x, p, [&](Key key, u32 inverted) {
            return key == t.key && (inverted & t.index_mask) == t.inverted ? inverted >> shift & (BINS - 1) : NO_BIN;
        });
        find_bin(s, rest);
        t.inverted |= s.digit << shift;
        t.index_mask |= (BINS - 1) << shift;
        rest = s.rest;
        if (s.inside == rest) return t;
    }
    return t;
}

// ---- the kept elements -----------------------------------------------------------------------------------------------------

DEVICE void gather(Shared& s, const Element* x, const Params& p, const Threshold& t) {
    if (threadIdx.x == 0) s.gathered = 0;
    for (u32 j = KEEP + threadIdx.x; j < CAPACITY; j += THREADS) s.items[j] = {0, ~0u};
    __syncthreads();
    for (u32 at = threadIdx.x; at < p.size; at += THREADS) {
        const Key key = key_of(x[at * p.step_x]), head = key & t.key_mask;
        if (head > t.key || (head == t.key && (~at & t.index_mask) >= t.inverted)) s.items[atomicAdd(&s.gathered, 1)] = {key, at};
    }
    __syncthreads();
}

DEVICE bool comes_before(const Item& a, const Item& b) { return a.key > b.key || (a.key == b.key && a.at < b.at); }

// Bitonic: no two items are equal, so the result does not depend on the order in which they were gathered.
DEVICE void sort(Shared& s) {
    for (u32 run = 2; run <= CAPACITY; run *= 2) {
        for (u32 half = run / 2; half; half /= 2) {
            for (u32 pair = threadIdx.x; pair < CAPACITY / 2; pair += THREADS) {
                const u32 low = pair / half * half * 2 + pair % half, high = low + half;
                const Item a = s.items[low], b = s.items[high];
                if (comes_before(b, a) == !(low & run)) {
                    s.items[low] = b;
                    s.items[high] = a;
                }
            }
            __syncthreads();
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) top_rows(const __grid_constant__ Params p) {
    __shared__ Shared s;
    launch_dependents();
    wait_for_predecessor();
    const Element* x = p.x;
    Element* y = p.y;
#if INDICES
    i64* index = p.index;
#endif
    u32 line = blockIdx.x;
    for (int k = RANK - 1; k >= 0; k--) {
        const u32 o = line % u32(p.dims[k]);
        line /= u32(p.dims[k]);
        x += o * p.x_strides[k];
        y += o * p.y_strides[k];
#if INDICES
        index += o * p.index_strides[k];
#endif
    }
    gather(s, x, p, threshold(s, x, p));
    sort(s);
    for (u32 j = threadIdx.x; j < KEEP; j += THREADS) {
        const u32 at = s.items[j].at;
        y[j * p.step_y] = x[at * p.step_x];
#if INDICES
        index[j * p.step_index] = at;
#endif
    }
}
