// Fused attention of fp32 on Hopper: out = softmax(scale * q k^T + mask) v per batch and head, wgmma on parts of fp16.
//
// Each number, times a power of two, is a first part of fp16 and a rest (fp16_parts.cuh), and a product is the sum of three: rest x first, first x
// rest, first x first. The fourth is below 2^-22 of the product. ROUNDED (tf32): first parts alone, since fp16 has as many bits as tf32.
//
// Powers of two keep the parts within the range of fp16: each query has a scale, and so has each tile of keys, and each tile of values. The
// largest number that they scale becomes 2^14 or more. Numbers below 2^-15 of it lose bits: those below 2^-39 of it (ROUNDED: numbers below
// 2^-29 lose bits below 2^-40). Weights begin at 2^14.
//
// A block takes WARPGROUPS x 64 queries of one head. One more warpgroup loads tiles of BLOCK_KEYS keys and of values, AHEAD tiles ahead,
// divides them, and writes the parts to a ring of STAGES. The multiplying warpgroups keep scores and weights in registers, where weights are
// wgmma's operand A. The products of each tile have accumulators of their own, since tensor cores truncate in their additions. Queries stay
// in registers (KEEP) or in shared memory. The online softmax is that of attention_fp32.cuh.
//
// Rows of keys are a K-major operand, rows of values an MN-major one. A tile is stored as subtiles with SPAN bytes per row, swizzled.
//
// generated.cuh defines WARPGROUPS, BLOCK_KEYS, STAGES, HEAD (padded with zeros), COLUMNS (of it, for a product with values), SPAN, KEEP,
// REGISTERS and LOADING_REGISTERS (of a multiplying and of a dividing thread), MIN_BLOCKS, CAUSAL, WINDOW, FROM_END, HAS_LENGTHS, SOFTCAP,
// MASK, SINKS (as for attention_fp32.cu), ROUNDED, SHARED_BYTES, wgmma_kept() and wgmma_scores() (with queries in registers and in shared
// memory) and wgmma_features().
#include "ptx.cuh"
#include "mma.cuh"
#include "generated.cuh"
#include "fp16_parts.cuh"
#include "attention_fp32.cuh"
#include "attention_tiles.cuh"

constexpr int PARTS = ROUNDED ? 1 : 2, START = 14, AHEAD = 2;
constexpr int CONSUMERS = WARPGROUPS * 128, THREADS = CONSUMERS + 128, QUERIES = WARPGROUPS * 64, EIGHTS = BLOCK_KEYS / 8, STEPS = HEAD / 16;
constexpr int SUBTILES = HEAD * 2 / SPAN, STEPS_OF_SPAN = SPAN / 32;
constexpr u32 SUBTILE = BLOCK_KEYS * SPAN, PART_BYTES = SUBTILES * SUBTILE, TILE_BYTES = PARTS * PART_BYTES;
constexpr u32 QUERY_SUBTILE = 64 * SPAN, QUERY_PART = SUBTILES * QUERY_SUBTILE, QUERY_BYTES = KEEP ? 0 : PARTS * QUERY_PART;    // of a warpgroup
constexpr u32 BARRIER_BYTES = 1024;
constexpr int ROW_FOURS = HEAD / 4, ROWS_AT_ONCE = 128 / ROW_FOURS;           // four numbers of a row for each thread that divides it
constexpr u32 RAW_BYTES = (BLOCK_KEYS + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE * 2048;
constexpr bool EQUAL_SHARES = 128 % ROW_FOURS == 0 && BLOCK_KEYS % ROWS_AT_ONCE == 0;
constexpr int FOURS = (BLOCK_KEYS + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;         // of a tile, for each thread
static_assert(SHARED_BYTES >= BARRIER_BYTES + WARPGROUPS * QUERY_BYTES + 2 * (STAGES * TILE_BYTES + AHEAD * RAW_BYTES), "the launch reserves what the block uses");

// Lanes that arrive at a barrier. One is enough, after the accesses of the others, but racecheck tracks only a thread's own arrivals.
#ifdef RACECHECK
constexpr int ARRIVERS = 32;
#else
constexpr int ARRIVERS = 1;
#endif

// Addresses in shared memory. Of keys and values (i = 0, 1): barriers, inverse scales, and the rings.
struct Room {
    u32 base;
    __device__ __forceinline__ u32 full(int i, int stage) const { return base + (i * STAGES + stage) * 16; }
    __device__ __forceinline__ u32 empty(int i, int stage) const { return full(i, stage) + 8; }
    __device__ __forceinline__ u32 inverse(int i, int stage) const { return base + 512 + (i * STAGES + stage) * 4; }
    __device__ __forceinline__ u32 most(int i, int turn) const { return base + 768 + i * 32 + turn % 2 * 16; }      // of four warps
    __device__ __forceinline__ u32 queries(int group) const { return base + BARRIER_BYTES + group * QUERY_BYTES; }
    __device__ __forceinline__ u32 tile(int i, int stage) const { return queries(WARPGROUPS) + (i * STAGES + stage) * TILE_BYTES; }
    __device__ __forceinline__ u32 raw(int i, int slot) const { return tile(2, 0) + (i * AHEAD + slot) * RAW_BYTES; }
};

// Where feature ``feature`` of row ``row`` is in an operand whose subtiles have ``subtile`` bytes.
DEVICE u32 place_of(int row, int feature, u32 subtile) { return feature * 2 / SPAN * subtile + swizzled(row * SPAN + feature * 2 % SPAN); }

// Keys or values of a head: the next number that a thread divides. Rows are ``position`` numbers apart.
struct Source {
    const float* from;
    int position, features;

    __device__ __forceinline__ Source(const float* numbers, const View& view, int batch, int head, int features, int row, int feature)
        : from(numbers + batch * view.batch + head * view.head + (long long)row * view.position + feature), position(view.position), features(features) {}
};

// Divides the tiles of keys (i = 0) and of values (i = 1), in turn. row, feature: this thread's in a tile.
DEVICE void divide_tiles(const Room& at, const Seen& seen, Source (&sources)[2], int thread, int row, int feature) {
    const int warp = thread / 32, lane = thread % 32;
    const bool works = row < ROWS_AT_ONCE;
    float4 v[FOURS];
    auto own_row = [&](int n) { return n * ROWS_AT_ONCE + row; };
    auto left_of = [&](int turn) { return turn < seen.tiles ? min(BLOCK_KEYS, seen.key_count - (seen.begin + turn) * BLOCK_KEYS) : 0; };     // rows
    auto raw = [&](int i, int turn) { return at.raw(i, turn % AHEAD) + thread * 16; };       // only this thread reads what it loads
    auto load = [&](int i, int turn) {
        const Source& source = sources[i];
        const int left = left_of(turn);
        #pragma unroll
        for (int n = 0; n < FOURS; n++) {
            const bool live = works && feature < source.features && own_row(n) < left;
            copy_16_or_zeros(raw(i, turn) + n * 2048, live ? source.from + (long long)(n * ROWS_AT_ONCE) * source.position : source.from, live ? 16 : 0);
        }
        copies_commit();
        sources[i].from += (long long)BLOCK_KEYS * source.position;
    };
    auto most_of_tile = [&](int i, int turn, bool finite) {        // of all numbers, or of the finite ones
        auto size = [&](float x) { return finite && !(fabsf(x) < infinity()) ? 0.0f : fabsf(x); };
        float most = 0.0f;
        #pragma unroll
        for (int n = 0; n < FOURS; n++) most = fmaxf(most, fmaxf(fmaxf(size(v[n].x), size(v[n].y)), fmaxf(size(v[n].z), size(v[n].w))));
        const u32 of_warp = __reduce_max_sync(0xffffffffu, __float_as_uint(most)), all = at.most(i, turn);
        if (lane == 0) shared_store(all + warp * 4, int(of_warp));
        named_barrier(1 + WARPGROUPS, 128);
        const uint4 of_warps = shared_load16(all);
        return __uint_as_float(max(max(of_warps.x, of_warps.y), max(of_warps.z, of_warps.w)));
    };
    #pragma unroll
    for (int turn = 0; turn < AHEAD; turn++) load(0, turn), load(1, turn);
    int stage = 0, parity = 1;
    #pragma unroll 1
    for (int turn = 0; turn < seen.tiles; turn++) {
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            copies_wait_but<AHEAD * 2 - 1>();
            #pragma unroll
            for (int n = 0; n < FOURS; n++) shared_load(raw(i, turn) + n * 2048, v[n]);
            float most = most_of_tile(i, turn, false);
            if (most == infinity()) {              // an infinity of one key must not cost the others their bits
                named_barrier(1 + WARPGROUPS, 128);        // all have read the maxima
                most = most_of_tile(i, turn, true);
            }
            load(i, turn + AHEAD);
            const u32 exponent = exponent_of(most);
            const float scale = scale_of(exponent);
            barrier_wait(at.empty(i, stage), parity);
            if (thread == 0) shared_store(at.inverse(i, stage), inverse_scale_of(exponent));
            #pragma unroll
            for (int n = 0; n < FOURS; n++) {
                u32 first[2], rest[2];
                divide_pair(v[n].x, v[n].y, scale, first[0], rest[0]);
                divide_pair(v[n].z, v[n].w, scale, first[1], rest[1]);
                if (!EQUAL_SHARES && (!works || own_row(n) >= BLOCK_KEYS)) continue;
                const u32 to = at.tile(i, stage) + place_of(own_row(n), feature, SUBTILE);
                shared_store(to, make_uint2(first[0], first[1]));
                if (PARTS == 2) shared_store(to + PART_BYTES, make_uint2(rest[0], rest[1]));
            }
            __syncwarp();                          // readers have the fence of the async proxy: here it would wait for the loads
            if (lane < ARRIVERS) barrier_arrive(at.full(i, stage));
        }
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    copies_wait_but<0>();                          // those beyond the last tile
}

// A warpgroup's queries as operand A, in registers or in shared memory: 64 rows, of which a thread has ``row`` and row + 8.
struct Queries {
    u32 parts[KEEP ? PARTS : 1][KEEP ? STEPS : 1][4];
    float inverse[2];                              // of the scales

    __device__ __forceinline__ Queries(const float* source, int position, int features, int count, int first, int row, u32 room, int lane) {
        float2 v[2][STEPS][2];
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            float most = 0.0f;
            #pragma unroll
            for (int s = 0; s < STEPS; s++)
                #pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int feature = s * 16 + h * 8 + lane % 4 * 2;
                    v[i][s][h] = make_float2(0.0f, 0.0f);
                    if (first + row + 8 * i < count && feature < features)
                        v[i][s][h] = *reinterpret_cast<const float2*>(source + (long long)(first + row + 8 * i) * position + feature);
                    most = fmaxf(most, fmaxf(fabsf(v[i][s][h].x), fabsf(v[i][s][h].y)));
                }
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
            const u32 exponent = exponent_of(most);
            inverse[i] = inverse_scale_of(exponent);
            #pragma unroll
            for (int s = 0; s < STEPS; s++)
                #pragma unroll
                for (int h = 0; h < 2; h++) {
                    u32 own[2];
                    divide_pair(v[i][s][h].x, v[i][s][h].y, scale_of(exponent), own[0], own[1]);
                    #pragma unroll
                    for (int part = 0; part < PARTS; part++) {
                        if (KEEP) parts[part][s][i + 2 * h] = own[part];
                        else shared_store(room + part * QUERY_PART + place_of(row + 8 * i, s * 16 + h * 8 + lane % 4 * 2, QUERY_SUBTILE), int(own[part]));
                    }
                }
        }
    }
};

// Scores of a tile of keys, in units of the inverse scales.
DEVICE void multiply_keys(float (&s)[BLOCK_KEYS / 2], const Queries& q, u32 queries, u32 keys) {
    auto product = [&](int of_queries, int of_keys, bool begin) {
        #pragma unroll
        for (int k = 0; k < STEPS; k++) {
            const u64 b = wgmma_descriptor<SPAN>(keys + of_keys * PART_BYTES + k / STEPS_OF_SPAN * SUBTILE);
            const u32 units = k % STEPS_OF_SPAN * 2;
            if constexpr (KEEP) {
                wgmma_kept(s, q.parts[of_queries][k], later(b, units), !(begin && k == 0));
            } else {
                const u64 a = wgmma_descriptor<SPAN>(queries + of_queries * QUERY_PART + k / STEPS_OF_SPAN * QUERY_SUBTILE);
                wgmma_scores(s, later(a, units), later(b, units), !(begin && k == 0));
            }
        }
    };
    if (PARTS == 2) product(1, 0, true), product(0, 1, false);
    product(0, 0, PARTS == 1);
}

// The weights of a tile of keys, as operand A, times COLUMNS features of their values.
struct Weights { u32 parts[PARTS][BLOCK_KEYS / 16][4]; };
DEVICE void multiply_values(float (&sums)[COLUMNS / 2], const Weights& a, u32 values) {
    auto product = [&](int of_weights, int of_values, bool begin) {
        #pragma unroll
        for (int k = 0; k < BLOCK_KEYS / 16; k++)
            wgmma_features(sums, a.parts[of_weights][k], later(value_descriptor<SUBTILE>(values + of_values * PART_BYTES), k * SPAN), !(begin && k == 0));
    };
    if (PARTS == 2) product(1, 0, true), product(0, 1, false);
    product(0, 0, PARTS == 1);
}

// Computes 64 queries from ``own`` on. group, thread: of the multiplying warpgroups, and of this one.
DEVICE void attend(const Params& p, const Room& at, const Seen& seen, int batch, int head, int own, int group, int thread) {
    const int lane = thread % 32, row = thread / 32 * 16 + lane / 4;
    const Queries q(p.queries + batch * p.of_queries.batch + head * p.of_queries.head, p.of_queries.position, p.features, p.query_count, own, row, at.queries(group), lane);
    if (!KEEP) {
        async_proxy_fence();
        named_barrier(1 + group, 128);
    }
    Rows rows(p, batch, head, own + row);
    float out[HEAD / 2] = {};
    int stage = 0, parity = 0;
    #pragma unroll 1
    for (int turn = 0; turn < seen.tiles; turn++) {
        const int start = (seen.begin + turn) * BLOCK_KEYS;
        const bool sees = start < seen.own_last;
        float s[EIGHTS][4], unit[2];
        barrier_wait(at.full(0, stage), parity);
        async_proxy_fence();
        if (sees) {
            wgmma_fence();
            multiply_keys(reinterpret_cast<float(&)[BLOCK_KEYS / 2]>(s), q, at.queries(group), at.tile(0, stage));
            wgmma_commit();
            float of_keys;
            shared_load(at.inverse(0, stage), of_keys);
            unit[0] = q.inverse[0] * of_keys, unit[1] = q.inverse[1] * of_keys;
            wgmma_wait<0>();
        }
        if (lane < ARRIVERS) barrier_arrive(at.empty(0, stage));
        Weights weights;
        if (sees) {
            rows.weigh<START>(p, seen, own + row - lane / 4, start + lane % 4 * 2, start + BLOCK_KEYS, unit, s);
            #pragma unroll
            for (int k = 0; k < BLOCK_KEYS / 16; k++)
                #pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float x = s[2 * k + i / 2][i % 2 * 2], y = s[2 * k + i / 2][i % 2 * 2 + 1];
                    u32 rest;
                    divide_pair(x, y, 1.0f, weights.parts[0][k][i], rest);
                    if (PARTS == 2) weights.parts[PARTS - 1][k][i] = rest;
                }
        }
        barrier_wait(at.full(1, stage), parity);
        async_proxy_fence();
        if (sees) {
            float of_values;
            shared_load(at.inverse(1, stage), of_values);
            #pragma unroll
            for (int first = 0; first < HEAD; first += COLUMNS) {
                float sums[COLUMNS / 2];
                wgmma_fence();
                multiply_values(sums, weights, at.tile(1, stage) + first * 2 / SPAN * SUBTILE);
                wgmma_commit();
                #pragma unroll
                for (int j = first / 2; j < (first + COLUMNS) / 2; j++) out[j] *= rows.rescale[j / 2 % 2];
                wgmma_wait<0>();
                #pragma unroll
                for (int j = 0; j < COLUMNS / 2; j++) out[first / 2 + j] = fmaf(sums[j], of_values, out[first / 2 + j]);
            }
        }
        if (lane < ARRIVERS) barrier_arrive(at.empty(1, stage));
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    float* const target = p.output + batch * p.of_output.batch + head * p.of_output.head;
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        const float inverse = rows.inverse<START>(p, i);
        if (own + row + 8 * i >= p.query_count) continue;
        #pragma unroll
        for (int j = 0; j < HEAD / 8; j++) {
            const int feature = 8 * j + lane % 4 * 2;
            if (feature < p.value_features)
                *reinterpret_cast<float2*>(target + (long long)(own + row + 8 * i) * p.of_output.position + feature) =
                    make_float2(out[4 * j + 2 * i] * inverse, out[4 * j + 2 * i + 1] * inverse);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_parts_sm90(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 shared[];
    const Room at{smem_address(shared)};
    const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), thread = threadIdx.x % 128;
    // With causal order the last queries see the most keys: they begin first.
    const int first = int(CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x) * QUERIES, own = first + group * 64;
    const int head = blockIdx.y, batch = blockIdx.z;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++)
            for (int stage = 0; stage < STAGES; stage++) {
                barrier_init(at.full(i, stage), 4 * ARRIVERS);
                barrier_init(at.empty(i, stage), WARPGROUPS * 4 * ARRIVERS);
            }
        barrier_init_fence();
        async_proxy_fence();
    }
    __syncthreads();
    grid_launch_dependents();
    grid_dependency_wait();
    const Seen seen(p, batch, first, QUERIES, own, 64);
    if (group < WARPGROUPS) {
        take_registers<REGISTERS>();
        attend(p, at, seen, batch, head, own, group, thread);
    } else {
        give_registers<LOADING_REGISTERS>();
        const int key_head = head / p.group, row = thread / ROW_FOURS, feature = thread % ROW_FOURS * 4, from = seen.begin * BLOCK_KEYS + row;
        Source sources[2] = {{p.keys, p.of_keys, batch, key_head, p.features, from, feature},
                             {p.values, p.of_values, batch, key_head, p.value_features, from, feature}};
        divide_tiles(at, seen, sources, thread, row, feature);
    }
}
