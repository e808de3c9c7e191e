// The next token of a sequence, from its logits: greedy, or drawn from what temperature, top_k and top_p leave.
//
// A cluster of blocks has a row, each block a part of it. What blocks have counted they read from one another's shared memory.
//
// optdnn/ops/sampling.py says what the settings mean. Probabilities are integers of 28 bits relative to the largest one, so that
// their sums do not depend on the order of threads, and the token drawn is that of the reference.
//
// The k-th largest logit, and the last one that top_p keeps, are found digit by digit: logits become keys that are ordered as
// integers, and a histogram of a digit tells in which bin the unit lies that is looked for. Units are tokens, or parts of the mass.
//
// generated.cuh defines THREADS (a multiple of 32 up to 1024), CLUSTER (blocks of a row), LANES (elements per access), WIDE (fp32
// logits), BFLOAT (bf16 ones).
#include "general.cuh"
#include "generated.cuh"

#if WIDE
typedef f32 Element;
#elif BFLOAT
typedef bf16 Element;
#else
typedef f16 Element;
#endif

struct Params {
    const Element* logits;
    const float* temperature;
    const i64* top_k;
    const float* top_p;
    const i64* seed;
    const i64* position;
    i64* token;
    i64 pitch;                                     // from one row of logits to the next one
    i64 temperature_step, top_k_step, top_p_step, seed_step, position_step, token_step;
    u32 vocabulary;
};

constexpr u32 GROUPS = THREADS / 32;
constexpr u32 BINS = 2048, BIN_BITS = 11, PER_THREAD = (BINS + THREADS - 1) / THREADS;
constexpr u32 MASS_BITS = 28, HALF_BITS = MASS_BITS / 2;
constexpr u32 LEVELS = WIDE ? 3 : 2;               // the low 13 bits of a 16-bit float's key follow from the others
static_assert(THREADS % 32 == 0 && GROUPS <= 32, "groups of threads");

// What the threads of a block share.
struct Shared {
    u64 part[THREADS];
    u64 group[GROUPS];
    u32 low[BINS], high[BINS];                     // a bin's units in two halves: shared memory adds 32 bits at a time
    float best[THREADS];
    u32 place[THREADS];
    u32 found;
    u64 rest, here, before, total;                 // units of this block, of blocks in front of it, and of all
};

struct Row {
    const Element* logits;
    u32 size, begin, end;                          // the row, and the block's part of it
    float highest, scale;                          // 2 ^ (scale * (logit - highest)) is a token's share of the largest one's
};

// ---- keys, masses, random bits ---------------------------------------------------------------------------------------------

// Ordered as the floats are.
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

// ---- blocks of a cluster ---------------------------------------------------------------------------------------------------

#if CLUSTER > 1
DEVICE u32 block_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Every thread of every block; what they stored before is visible behind it.
DEVICE void sync_blocks() {
    __syncwarp();                                  // the barrier wants whole warps
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

DEVICE u32 address_in(const void* mine, u32 rank) {
    u32 at;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(u32(__cvta_generic_to_shared(mine))), "r"(rank));
    return at;
}

// The same variable of the block of that rank.
DEVICE u32 read_in(const u32& mine, u32 rank) {
    u32 v;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(address_in(&mine, rank)) : "memory");
    return v;
}
DEVICE u64 read_in(const u64& mine, u32 rank) {
    u64 v;
    asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(v) : "r"(address_in(&mine, rank)) : "memory");
    return v;
}
DEVICE float read_in(const float& mine, u32 rank) {
    float v;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(address_in(&mine, rank)) : "memory");
    return v;
}
#else
DEVICE u32 block_rank() { return 0; }
DEVICE void sync_blocks() { __syncthreads(); }
template <typename T> DEVICE T read_in(const T& mine, u32 rank) { return mine; }
#endif

// ---- searches by the whole block -------------------------------------------------------------------------------------------

// The units of the block's threads, in a row.
DEVICE void line_up(Shared& s, u64 own) {
    s.part[threadIdx.x] = own;
    __syncthreads();
    if (threadIdx.x < GROUPS) {
        u64 sum = 0;
        for (u32 i = 0; i < 32; i++) sum += s.part[threadIdx.x * 32 + i];
        s.group[threadIdx.x] = sum;
    }
    __syncthreads();
}

// The thread that holds unit `wanted` of those lined up; `s.rest`: how many of its own stand before it.
DEVICE u32 find(Shared& s, u64 wanted) {
    if (threadIdx.x == 0) {
        u32 g = 0;
        while (g + 1 < GROUPS && wanted >= s.group[g]) wanted -= s.group[g++];
        u32 found = g * 32;
        while (found + 1 < THREADS && wanted >= s.part[found]) wanted -= s.part[found++];
        s.found = found;
        s.rest = wanted;
    }
    __syncthreads();
    return s.found;
}

// Lines up the units, and counts those of all blocks.
DEVICE u64 count_all(Shared& s, u64 own) {
    line_up(s, own);
    if (threadIdx.x == 0) {
        s.here = 0;
        for (u32 g = 0; g < GROUPS; g++) s.here += s.group[g];
    }
    sync_blocks();
    if (threadIdx.x == 0) {
        u64 before = 0, total = 0;
        for (u32 rank = 0; rank < CLUSTER; rank++) {
            if (rank == block_rank()) before = total;
            total += read_in(s.here, rank);
        }
        s.before = before;
        s.total = total;
    }
    sync_blocks();                                 // all have read what the next count writes
    return s.total;
}

struct Best {
    float value;
    u32 place;                                     // the row's size: there is none yet
};

// The larger one, the first of equal ones. A NaN wins.
DEVICE Best better(const Row& row, Best a, Best b) {
    if (b.place >= row.size) return a;
    const bool wins = b.value > a.value || (b.value != b.value && a.value == a.value);
    return a.place >= row.size || wins || (b.value == a.value && b.place < a.place) ? b : a;
}

// The largest logit, and its first place.
DEVICE Best find_highest(Shared& s, const Row& row) {
    Best best = {0, row.size};
    each(row, row.begin, row.end, threadIdx.x, THREADS, [&](u32 i, float v) { best = better(row, best, {v, i}); });
    s.best[threadIdx.x] = best.value;
    s.place[threadIdx.x] = best.place;
    __syncthreads();
    for (u32 half = 512; half; half /= 2) {
        const u32 other = threadIdx.x + half;
        if (threadIdx.x < half && other < THREADS) {
            best = better(row, best, {s.best[other], s.place[other]});
            s.best[threadIdx.x] = best.value;
            s.place[threadIdx.x] = best.place;
        }
        __syncthreads();
    }
    sync_blocks();
    best.place = row.size;
    for (u32 rank = 0; rank < CLUSTER; rank++) best = better(row, best, {read_in(s.best[0], rank), read_in(s.place[0], rank)});
    sync_blocks();                                 // a block may end when the others have read it
    return best;
}

// The key of the logit that holds unit `wanted` (below their number), counted from the largest logit down. Elements below the key
// `least` have no units; others have `units(logit)`, at most 28 bits.
template <typename Units> DEVICE u32 select(Shared& s, const Row& row, u32 least, u64 wanted, Units units) {
    u32 prefix = 0, shift = 32;
    for (u32 level = 0; level < LEVELS; level++) {
        const u32 above = shift, bits = shift < BIN_BITS ? shift : BIN_BITS;
        shift -= bits;
        for (u32 b = threadIdx.x; b < BINS; b += THREADS) s.low[b] = s.high[b] = 0;
        __syncthreads();
        each(row, row.begin, row.end, threadIdx.x, THREADS, [&](u32 i, float v) {
            const u32 key = key_of(v);
            if (key < least || (level && key >> above != prefix)) return;
            const u32 count = units(v), bin = key >> shift & ((1u << bits) - 1);
            if (u32 part = count & ((1u << HALF_BITS) - 1)) atomicAdd(&s.low[bin], part);
            if (u32 part = count >> HALF_BITS) atomicAdd(&s.high[bin], part);
        });
        sync_blocks();
        const u32 first = BINS - 1 - threadIdx.x * PER_THREAD;          // the thread's bins, the highest one first
        u64 in_bin[PER_THREAD], own = 0;
        for (u32 b = 0; b < PER_THREAD; b++) {
            in_bin[b] = 0;
            for (u32 rank = 0; rank < CLUSTER; rank++)
                in_bin[b] += read_in(s.low[first - b], rank) + (u64(read_in(s.high[first - b], rank)) << HALF_BITS);
            own += in_bin[b];
        }
        line_up(s, own);                           // the same in each block
        const u32 holder = find(s, wanted);
        u64 rest = s.rest;
        __syncthreads();
        if (threadIdx.x == holder) {
            u32 b = 0;
            while (b + 1 < PER_THREAD && rest >= in_bin[b]) rest -= in_bin[b++];
            s.rest = rest;
            s.found = first - b;
        }
        sync_blocks();                             // all have read what the next level clears
        prefix = prefix << bits | s.found;
        wanted = s.rest;
    }
    __syncthreads();                               // the next search writes what this one has found
    return prefix << shift;
}

// Groups of 32 threads have a stretch of the block's part each: where that of group `g` begins.
DEVICE u32 edge(const Row& row, u32 g) {
    const u32 vectors = (row.end - row.begin) / LANES, share = (vectors + GROUPS - 1) / GROUPS;
    return row.begin + (g * share < vectors ? g * share : vectors) * LANES;
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

// The token of the block's part that holds unit `wanted` of its masses, which are lined up, in the vocabulary's order.
DEVICE u32 draw(Shared& s, const Row& row, u32 least, u64 wanted) {
    const u32 group = find(s, wanted) / 32;
    wanted = s.rest;
    for (u32 t = group * 32; t < s.found; t++) wanted += s.part[t];     // counted from the beginning of the stretch
    __syncthreads();
    const u32 begin = edge(row, group), end = edge(row, group + 1), each_one = (end - begin + THREADS - 1) / THREADS;
    const u32 from = begin + threadIdx.x * each_one, to = from + each_one < end ? from + each_one : end;
    u64 own = 0;
    for (u32 i = from; i < to; i++) {
        const float v = widen(row.logits[i]);
        if (key_of(v) >= least) own += mass_of(row, v);
    }
    line_up(s, own);
    u32 token = begin + find(s, wanted) * each_one;
    for (u64 rest = s.rest;; token++) {
        const float v = widen(row.logits[token]);
        const u64 mass = key_of(v) >= least ? mass_of(row, v) : 0;
        if (rest < mass || token + 1 >= row.size) return token;
        rest -= mass;
    }
}

// ---- the kernel ------------------------------------------------------------------------------------------------------------

// The token drawn, in the block that holds it; -1 in the others.
DEVICE i64 sampled(Shared& s, const Row& row, i64 top_k, float top_p, u64 random) {
    u32 least = 0;
    if (top_k > 1 && top_k < row.size) least = select(s, row, 0, u64(top_k - 1), [](float) { return 1u; });
    u64 total = count_all(s, own_mass(row, least));
    if (top_p < 1) {
        const double share = ceil(double(top_p) * double(total));
        const u64 wanted = share >= 1 ? u64(share) : 1;
        least = select(s, row, least, (wanted < total ? wanted : total) - 1, [&](float v) { return mass_of(row, v); });
        total = count_all(s, own_mass(row, least));
    }
    const u64 wanted = high_product(random, total);
    if (wanted < s.before || wanted - s.before >= s.here) return -1;
    return draw(s, row, least, wanted - s.before);
}

// Where the part of the block of this rank begins.
DEVICE u32 part_of(const Row& row, u32 rank) {
    const u32 vectors = row.size / LANES, share = (vectors + CLUSTER - 1) / CLUSTER;
    return (rank * share < vectors ? rank * share : vectors) * LANES;
}

extern "C" __global__ void __launch_bounds__(THREADS) sample(const __grid_constant__ Params p) {
    __shared__ Shared s;
    launch_dependents();
    wait_for_predecessor();
    const u32 b = blockIdx.x / CLUSTER;
    const float temperature = p.temperature[b * p.temperature_step];
    Row row = {p.logits + b * p.pitch, p.vocabulary, 0, 0, 0, fminf(1.4426950408889634f / temperature, 3e38f)};
    row.begin = part_of(row, block_rank());
    row.end = part_of(row, block_rank() + 1);
    const i64 top_k = p.top_k[b * p.top_k_step];
    const Best best = find_highest(s, row);
    row.highest = best.value;
    const bool finite = best.value - best.value == 0, greedy = !(temperature > 0) || top_k == 1;
    i64 token = block_rank() == 0 ? i64(best.place) : -1;
    if (finite && !greedy) {
        const u64 random = philox(p.seed[b * p.seed_step], p.position[b * p.position_step]);
        token = sampled(s, row, top_k, p.top_p[b * p.top_p_step], random);
    }
    const bool mine = finite ? token >= 0 : block_rank() == 0;
    if (threadIdx.x == 0 && mine) p.token[b * p.token_step] = finite ? token : -1;
}
