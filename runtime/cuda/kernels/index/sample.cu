// The next token of a sequence, from its logits: the token with the largest logit, or a random one of the tokens that temperature, top_k and
// top_p leave. A block takes a row.
//
// optdnn/ops/sampling.py explains the settings. Probabilities are integers of 28 bits relative to the largest one. So their sums do not
// depend on the order of threads, and the sampled token equals the reference's.
//
// The k-th largest logit, and the last one that top_p keeps, are found digit by digit: logits become keys that are ordered as
// integers, and the histogram of a digit gives the bin with the wanted unit. Units are tokens, or parts of the mass.
//
// generated.cuh defines THREADS (a multiple of 32 up to 1024), LANES (elements per access), WIDE (fp32 logits), BFLOAT (bf16 logits).
#include "element.cuh"

struct Params {
    const Element* logits;
    const float* temperature;
    const i64* top_k;
    const float* top_p;
    const i64* seed;
    const i64* position;
    i64* token;
    i64 pitch;                                     // elements between rows of logits
    i64 temperature_step, top_k_step, top_p_step, seed_step, position_step, token_step;
    u32 vocabulary;
};

constexpr u32 GROUPS = THREADS / 32;
constexpr u32 BINS = 2048, BIN_BITS = 11, PER_THREAD = (BINS + THREADS - 1) / THREADS;
constexpr u32 MASS_BITS = 28, HALF_BITS = MASS_BITS / 2;
constexpr u32 LEVELS = WIDE ? 3 : 2;               // the low 13 bits of a 16-bit float's key follow from the others
static_assert(THREADS % 32 == 0 && GROUPS <= 32, "groups of threads");

// Shared memory of a block.
struct Shared {
    u64 part[THREADS];
    u64 group[GROUPS];
    u32 low[BINS], high[BINS];                     // the units of a bin in two halves: shared memory adds 32 bits at a time
    float best[THREADS];
    u32 place[THREADS];
    u32 found;
    u64 rest, total;
};

struct Row {
    const Element* logits;
    u32 size;
    float highest, scale;                          // 2 ^ (scale * (logit - highest)) is a token's share, relative to the largest one
};

// ---- keys, masses, random bits ---------------------------------------------------------------------------------------------

// A key that is ordered as the floats are.
DEVICE u32 key_of(float v) {
    const u32 bits = __float_as_uint(v == 0 ? 0.0f : v);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

DEVICE u32 mass_of(const Row& row, float v) {
    const float power = (v - row.highest) * row.scale;
    if (!(power > -29.0f)) return 0;               // less than a unit
    const float share = floorf(exp2f(power) * float(1u << MASS_BITS));
    return share >= float((1u << MASS_BITS) - 1) ? (1u << MASS_BITS) - 1 : u32(share);
}

DEVICE u32 high_product(u32 a, u32 b) { return u32(u64(a) * b >> 32); }

DEVICE u64 high_product(u64 a, u64 b) {
    const u64 a1 = a >> 32, a0 = u32(a), b1 = b >> 32, b0 = u32(b);
    const u64 middle = a1 * b0 + (a0 * b0 >> 32), other = a0 * b1 + u32(middle);
    return a1 * b1 + (middle >> 32) + (other >> 32);
}

// The first two words of Philox4x32-10.
DEVICE u64 philox(u64 seed, u64 position) {
    u32 c0 = u32(position), c1 = u32(position >> 32), c2 = 0, c3 = 0, k0 = u32(seed), k1 = u32(seed >> 32);
    for (int round = 0; round < 10; round++) {
        const u32 next0 = high_product(0xcd9e8d57u, c2) ^ c1 ^ k0, next2 = high_product(0xd2511f53u, c0) ^ c3 ^ k1;
        c1 = 0xcd9e8d57u * c2;
        c3 = 0xd2511f53u * c0;
        c0 = next0;
        c2 = next2;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    return c0 | u64(c1) << 32;
}

// ---- walks over a row ------------------------------------------------------------------------------------------------------

// visit(index, logit) for the elements of [begin, end) that belong to thread `id` of `count`. Both ends are multiples of LANES.
template <typename Visit> DEVICE void each(const Row& row, u32 begin, u32 end, u32 id, u32 count, Visit visit) {
    #pragma unroll 4
    for (u32 first = begin + id * LANES; first < end; first += count * LANES) {
        const Pack<Element, LANES> pack(row.logits + first);
        for (int j = 0; j < LANES; j++) visit(first + j, widen(pack.lane[j]));
    }
}

// ---- searches by the whole block -------------------------------------------------------------------------------------------

// The thread that holds unit `wanted` in the sequence of all threads' units; THREADS if there are fewer units. `s.rest`: the units of this
// thread before the wanted one; `s.total`: all units.
DEVICE u32 locate(Shared& s, u64 own, u64 wanted) {
    s.part[threadIdx.x] = own;
    __syncthreads();
    if (threadIdx.x < GROUPS) {
        u64 sum = 0;
        for (u32 i = 0; i < 32; i++) sum += s.part[threadIdx.x * 32 + i];
        s.group[threadIdx.x] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        u64 total = 0;
        for (u32 g = 0; g < GROUPS; g++) total += s.group[g];
        u64 rest = wanted;
        u32 found = THREADS;
        if (rest < total) {
            u32 g = 0;
            while (rest >= s.group[g]) rest -= s.group[g++];
            found = g * 32;
            while (rest >= s.part[found]) rest -= s.part[found++];
        }
        s.found = found;
        s.rest = rest;
        s.total = total;
    }
    __syncthreads();
    return s.found;
}

DEVICE u64 total_of(Shared& s, u64 own) {
    locate(s, own, ~u64(0));
    const u64 total = s.total;
    __syncthreads();                               // the next search overwrites it
    return total;
}

// The largest logit, and its first position. A NaN wins.
DEVICE void find_highest(Shared& s, Row& row, u32& place) {
    float best = __uint_as_float(0xff800000u);
    u32 at = row.size;
    each(row, 0, row.size, threadIdx.x, THREADS, [&](u32 i, float v) {
        if (v > best || (v != v && best == best) || at == row.size) { best = v; at = i; }
    });
    s.best[threadIdx.x] = best;
    s.place[threadIdx.x] = at;
    __syncthreads();
    for (u32 half = 512; half; half /= 2) {
        const u32 other = threadIdx.x + half;
        if (threadIdx.x < half && other < THREADS && s.place[other] < row.size) {
            const float v = s.best[other], mine = s.best[threadIdx.x];
            const bool sooner = s.place[other] < s.place[threadIdx.x];
            if (s.place[threadIdx.x] == row.size || v > mine || (v != v && mine == mine) || (v == mine && sooner)) {
                s.best[threadIdx.x] = v;
                s.place[threadIdx.x] = s.place[other];
            }
        }
        __syncthreads();
    }
    row.highest = s.best[0];
    place = s.place[0];
}

// The key of the logit that holds unit `wanted` (below the number of units), counted from the largest logit down. Elements with keys below
// `least` have no units; others have `units(logit)`, at most 28 bits.
template <typename Units> DEVICE u32 select(Shared& s, const Row& row, u32 least, u64 wanted, Units units) {
    u32 prefix = 0, shift = 32;
    for (u32 level = 0; level < LEVELS; level++) {
        const u32 above = shift, bits = shift < BIN_BITS ? shift : BIN_BITS;
        shift -= bits;
        for (u32 b = threadIdx.x; b < BINS; b += THREADS) s.low[b] = s.high[b] = 0;
        __syncthreads();
        each(row, 0, row.size, threadIdx.x, THREADS, [&](u32 i, float v) {
            const u32 key = key_of(v);
            if (key < least || (level && key >> above != prefix)) return;
            const u32 count = units(v), bin = key >> shift & ((1u << bits) - 1);
            if (u32 part = count & ((1u << HALF_BITS) - 1)) atomicAdd(&s.low[bin], part);
            if (u32 part = count >> HALF_BITS) atomicAdd(&s.high[bin], part);
        });
        __syncthreads();
        const u32 first = BINS - 1 - threadIdx.x * PER_THREAD;          // the thread's bins, highest first
        u64 own = 0;
        for (u32 b = 0; b < PER_THREAD && b <= first; b++) own += s.low[first - b] + (u64(s.high[first - b]) << HALF_BITS);
        const u32 holder = locate(s, own, wanted);
        wanted = s.rest;
        u32 bin = BINS - 1 - holder * PER_THREAD;
        for (;; bin--) {
            const u64 in_bin = s.low[bin] + (u64(s.high[bin]) << HALF_BITS);
            if (wanted < in_bin || bin == 0) break;
            wanted -= in_bin;
        }
        prefix = prefix << bits | bin;
        __syncthreads();                           // the next level clears the bins
    }
    return prefix << shift;
}

// Each group of 32 threads has a stretch of the vocabulary. The beginning of the stretch of group `g`.
DEVICE u32 edge(const Row& row, u32 g) {
    const u32 vectors = row.size / LANES, share = (vectors + GROUPS - 1) / GROUPS;
    return (g * share < vectors ? g * share : vectors) * LANES;
}

// The thread's part of the mass of all tokens whose keys are at least `least`, in its group's stretch.
DEVICE u64 own_mass(const Row& row, u32 least) {
    const u32 group = threadIdx.x / 32;
    u64 own = 0;
    each(row, edge(row, group), edge(row, group + 1), threadIdx.x % 32, 32, [&](u32 i, float v) {
        if (key_of(v) >= least) own += mass_of(row, v);
    });
    return own;
}

// The token that holds unit `wanted` of the masses, in the vocabulary's order. `own`: result of own_mass.
DEVICE u32 draw(Shared& s, const Row& row, u32 least, u64 own, u64 wanted) {
    const u32 group = locate(s, own, wanted) / 32;
    wanted = s.rest;
    for (u32 t = group * 32; t < s.found; t++) wanted += s.part[t];     // counted from the beginning of the stretch
    __syncthreads();
    const u32 begin = edge(row, group), end = edge(row, group + 1), each_one = (end - begin + THREADS - 1) / THREADS;
    const u32 from = begin + threadIdx.x * each_one, to = from + each_one < end ? from + each_one : end;
    own = 0;
    for (u32 i = from; i < to; i++) {
        const float v = widen(row.logits[i]);
        if (key_of(v) >= least) own += mass_of(row, v);
    }
    u32 token = begin + locate(s, own, wanted) * each_one;
    for (u64 rest = s.rest;; token++) {
        const float v = widen(row.logits[token]);
        const u64 mass = key_of(v) >= least ? mass_of(row, v) : 0;
        if (rest < mass || token + 1 >= row.size) return token;
        rest -= mass;
    }
}

// ---- the kernel ------------------------------------------------------------------------------------------------------------

DEVICE u32 sampled(Shared& s, const Row& row, i64 top_k, float top_p, u64 random) {
    u32 least = 0;
    if (top_k > 1 && top_k < row.size) least = select(s, row, 0, u64(top_k - 1), [](float) { return 1u; });
    u64 own = own_mass(row, least), total = total_of(s, own);
    if (top_p < 1) {
        const double share = ceil(double(top_p) * double(total));
        const u64 wanted = share >= 1 ? u64(share) : 1;
        least = select(s, row, least, (wanted < total ? wanted : total) - 1, [&](float v) { return mass_of(row, v); });
        own = own_mass(row, least);
        total = total_of(s, own);
    }
    return draw(s, row, least, own, high_product(random, total));
}

extern "C" __global__ void __launch_bounds__(THREADS) sample(const __grid_constant__ Params p) {
    __shared__ Shared s;
    launch_dependents();
    wait_for_predecessor();
    const u32 b = blockIdx.x;
    const float temperature = p.temperature[b * p.temperature_step];
    Row row = {p.logits + b * p.pitch, p.vocabulary, 0, fminf(1.4426950408889634f / temperature, 3e38f)};
    const i64 top_k = p.top_k[b * p.top_k_step];
    u32 greedy;
    find_highest(s, row, greedy);
    const float distance = row.highest - row.highest;                   // NaN where the largest logit is not finite
    i64 token = -1;
    if (distance == 0) {
        token = greedy;
        if (temperature > 0 && top_k != 1) {
            const u64 random = philox(p.seed[b * p.seed_step], p.position[b * p.position_step]);
            token = sampled(s, row, top_k, p.top_p[b * p.top_p_step], random);
        }
    }
    if (threadIdx.x == 0) p.token[b * p.token_step] = token;
}
