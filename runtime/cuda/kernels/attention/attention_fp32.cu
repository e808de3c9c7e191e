// Fused attention of fp32 for any tensor-core GPU from sm_80 on: out = softmax(scale * q k^T + mask) v per batch and head, mma.sync fed by a
// cp.async ring.
//
// Tensor cores multiply tf32, which has 11 of fp32's 24 significant bits. So each value is the sum of a first part, rounded to 11 bits, and a rest,
// and a product is the sum of three: first x first, first x rest, rest x first. The fourth, rest x rest, is below 2^-22 of the product
// (3xTF32: Ootomo and Yokota 2022, and CUTLASS). Tensor cores truncate in their additions. So products with a rest have accumulators of their own
// where the sum becomes an exponent, and the accumulators of each tile of keys are added to the result by fp32 additions.
//
// A block takes WARPS / SPLIT sets of 16 queries of one head, which stay in shared memory (KEEP: in registers). Tiles of BLOCK_KEYS keys and
// their values alternate in a ring of SLOTS. The SPLIT warps of a set each take a part of every tile's keys. At the end, the first one
// adds the others' results to its own: with few queries, this occupies more of a multiprocessor. The exponentials of the score
// accumulators of eight keys are operand A of the product with the values, since K may be in any order: column c of the operand is key 2 c for c < 4, else key 2 (c - 4) + 1. The statistics are those of the online softmax.
//
// A lane (row g = lane / 4, t = lane % 4) reads four features of a key at once: two steps of K. It reads FEW features of a value at once,
// each of them column g of a tile of results. So the pitch of key rows is PITCH floats (16 more than a multiple of 32), and the pitch of
// value rows is HEAD + 4: the lanes of a quarter warp read different banks.
//
// generated.cuh defines WARPS, SPLIT, BLOCK_KEYS, SLOTS, HEAD (a multiple of 16, padded with zeros), KEEP, MIN_BLOCKS, CAUSAL,
// WINDOW, FROM_END, HAS_LENGTHS, SOFTCAP, MASK and SINKS (as for attention_sm80.cu, in fp32), ROUNDED (values are rounded to tf32, and one product suffices)
// and multiply().
#include "ptx.cuh"
#include "mma.cuh"
#include "generated.cuh"
#include "attention_fp32.cuh"

constexpr int THREADS = WARPS * 32, ROWS = 16, QUERIES = WARPS / SPLIT * ROWS;
constexpr int OWN_KEYS = BLOCK_KEYS / SPLIT, EIGHTS = OWN_KEYS / 8;                        // keys of a tile that a warp multiplies
static_assert(WARPS % SPLIT == 0 && OWN_KEYS % 16 == 0, "whole fragments for each warp");
constexpr int PITCH = HEAD % 32 == 0 ? HEAD + 16 : HEAD, VALUE_PITCH = HEAD + 4;           // floats
constexpr u32 SLOT_BYTES = BLOCK_KEYS * (PITCH > VALUE_PITCH ? PITCH : VALUE_PITCH) * 4;
constexpr int FEW = HEAD % 32 == 0 ? 4 : 2, GROUPS = HEAD / (8 * FEW);                     // groups of FEW tiles of results

// A value rounded to 11 bits, and the rest; with ROUNDED, the rest is omitted.
struct Parts {
    u32 first, rest;
    Parts() = default;
    __device__ __forceinline__ Parts(float x) {
        first = ROUNDED ? rounded_to_tf32(__float_as_uint(x)) : first_part(__float_as_uint(x));
        rest = ROUNDED ? 0 : __float_as_uint(x - __uint_as_float(first));
    }
};
struct Left {                                      // operands of both parts
    u32 first[4], rest[4];
    __device__ __forceinline__ void set(int i, float x) {
        const Parts parts(x);
        first[i] = parts.first, rest[i] = parts.rest;
    }
};

// The three products (one for rounded values) with COUNT tiles of columns; small: accumulators of products with a rest.
template <int COUNT> DEVICE void multiply_parts(float (*sums)[4], float (*small)[4], const Left& a, const Parts (&b)[COUNT][2]) {
    #pragma unroll
    for (int n = 0; !ROUNDED && n < COUNT; n++) multiply(small[n], a.rest, b[n][0].first, b[n][1].first);
    #pragma unroll
    for (int n = 0; n < COUNT; n++) multiply(sums[n], a.first, b[n][0].first, b[n][1].first);
    #pragma unroll
    for (int n = 0; !ROUNDED && n < COUNT; n++) multiply(small[n], a.first, b[n][0].rest, b[n][1].rest);
}

// Loads COUNT rows of a head from ``first`` on; zeros from row ``end`` on, and beyond the features.
template <int COUNT, int PITCH_OF> DEVICE void load_rows(u32 target, const float* source, int position, int features, int first, int end) {
    for (int i = threadIdx.x; i < COUNT * (HEAD / 4); i += THREADS) {
        const int row = i / (HEAD / 4), column = i % (HEAD / 4) * 4;
        const bool live = first + row < end && column < features;
        copy_16_or_zeros(target + (row * PITCH_OF + column) * 4, live ? source + (long long)(first + row) * position + column : source, live ? 16 : 0);
    }
}

// Loads four elements by one instruction. NVRTC may split a plain vector load, and combine its parts differently from run to run.
DEVICE float4 four(u32 at) {
    float4 v;
    shared_load(at, v);
    return v;
}

// A warp's queries: row i, features 16 k + 4 t to + 3 of lane t.
struct Queries { float4 v[KEEP ? HEAD / 16 : 1][2]; };
DEVICE void load_queries(Queries& q, u32 queries) {
    #pragma unroll
    for (int k = 0; KEEP && k < HEAD / 16; k++)
        #pragma unroll
        for (int i = 0; i < 2; i++) q.v[k][i] = four(queries + (i * 8 * PITCH + k * 16) * 4);
}

// Scores of a tile of keys: s[j][i]: query row 8 (i / 2), key column + 8 j + i % 2. queries, keys: addresses for this lane.
DEVICE void multiply_keys(float (&s)[EIGHTS][4], const Queries& kept, u32 queries, u32 keys) {
    constexpr int SOME = EIGHTS % 4 == 0 ? 4 : 2;  // groups of eight keys at a time
    #pragma unroll
    for (int first = 0; first < EIGHTS; first += SOME) {
        float small[SOME][4] = {};
        #pragma unroll KEEP ? HEAD / 16 : 2        // the loads of all steps at once would spill
        for (int k = 0; k < HEAD / 16; k++) {
            Left a[2];
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                const float4 q = KEEP ? kept.v[KEEP ? k : 0][i] : four(queries + (i * 8 * PITCH + k * 16) * 4);
                a[0].set(i, q.x), a[0].set(i + 2, q.y), a[1].set(i, q.z), a[1].set(i + 2, q.w);
            }
            #pragma unroll
            for (int j = 0; j < SOME; j += 2) {
                Parts b[2][2][2];
                #pragma unroll
                for (int n = 0; n < 2; n++) {
                    const float4 v = four(keys + ((first + j + n) * 8 * PITCH + k * 16) * 4);
                    b[0][n][0] = v.x, b[0][n][1] = v.y, b[1][n][0] = v.z, b[1][n][1] = v.w;
                }
                multiply_parts(s + first + j, small + j, a[0], b[0]);
                multiply_parts(s + first + j, small + j, a[1], b[1]);
            }
        }
        #pragma unroll
        for (int i = 0; i < SOME * 4; i++) s[first + i / 4][i % 4] += small[i / 4][i % 4];
    }
}

// out = out * rescale + the weights of a tile of keys times their values. values: address for this lane.
DEVICE void multiply_values(float (&out)[GROUPS * FEW][4], const float (&s)[EIGHTS][4], const float (&rescale)[2], u32 values) {
    #pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        float sums[FEW][4] = {};
        #pragma unroll
        for (int j = 0; j < EIGHTS; j++) {
            Left a;
            #pragma unroll
            for (int i = 0; i < 4; i++) a.set(i, s[j][i % 2 * 2 + i / 2]);
            Parts b[FEW][2];
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                const u32 row = values + ((j * 8 + i) * VALUE_PITCH + group * (8 * FEW)) * 4;
                float v[4];
                if (FEW == 4) *reinterpret_cast<float4*>(v) = four(row);
                else shared_load(row, *reinterpret_cast<float2*>(v));
                #pragma unroll
                for (int n = 0; n < FEW; n++) b[n][i] = v[n];
            }
            multiply_parts(sums, sums, a, b);
        }
        #pragma unroll
        for (int n = 0; n < FEW; n++)
            #pragma unroll
            for (int i = 0; i < 4; i++) out[group * FEW + n][i] = fmaf(out[group * FEW + n][i], rescale[i / 2], sums[n][i]);
    }
}

// Adds the results of the SPLIT warps of a set. Returns true in the first one, which then has the result, its sums and maxima.
// ``room``: shared memory that nobody reads any more.
DEVICE bool merge(float4* room, int set, int part, int lane, float factor, float (&out)[GROUPS * FEW][4], float (&sum)[2], float (&maximum)[2]) {
    constexpr int ITEMS = GROUPS * FEW + 1;
    auto at = [&](int other, int item) -> float4& { return room[((set * (SPLIT - 1) + other - 1) * ITEMS + item) * 32 + lane]; };
    __syncthreads();
    if (part > 0) {
        at(part, 0) = make_float4(maximum[0], maximum[1], sum[0], sum[1]);
        #pragma unroll
        for (int j = 0; j < GROUPS * FEW; j++) at(part, j + 1) = make_float4(out[j][0], out[j][1], out[j][2], out[j][3]);
    }
    __syncthreads();
    if (part > 0) return false;
    float4 ends[SPLIT];
    ends[0] = make_float4(maximum[0], maximum[1], sum[0], sum[1]);
    sum[0] = sum[1] = 0.0f;
    #pragma unroll
    for (int n = 1; n < SPLIT; n++) {
        ends[n] = at(n, 0);
        maximum[0] = fmaxf(maximum[0], ends[n].x), maximum[1] = fmaxf(maximum[1], ends[n].y);
    }
    const float shift[2] = {maximum[0] == -infinity() ? 0.0f : maximum[0], maximum[1] == -infinity() ? 0.0f : maximum[1]};
    #pragma unroll
    for (int n = 0; n < SPLIT; n++) {
        const float scale[2] = {exp2_fast((ends[n].x - shift[0]) * factor), exp2_fast((ends[n].y - shift[1]) * factor)};
        sum[0] = fmaf(ends[n].z, scale[0], sum[0]), sum[1] = fmaf(ends[n].w, scale[1], sum[1]);
        #pragma unroll
        for (int j = 0; j < GROUPS * FEW; j++) {
            float4 more = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (n > 0) more = at(n, j + 1);
            const float v[4] = {more.x, more.y, more.z, more.w};
            #pragma unroll
            for (int i = 0; i < 4; i++) out[j][i] = n ? fmaf(v[i], scale[i / 2], out[j][i]) : out[j][i] * scale[i / 2];
        }
    }
    return true;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_fp32(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 base = smem_address(shared);
    constexpr u32 RING = QUERIES * PITCH * 4;
    const int lane = threadIdx.x % 32, set = threadIdx.x / 32 / SPLIT, part = threadIdx.x / 32 % SPLIT;
    // With causal order the last queries see the most keys: they begin first.
    const int first = int(CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x) * QUERIES, own = first + set * ROWS;
    const int head = blockIdx.y, batch = blockIdx.z;
    grid_launch_dependents();
    grid_dependency_wait();

    const Seen seen(p, batch, first, QUERIES, own, ROWS);
    const int begin = seen.begin, tiles = seen.tiles;

    const float* const keys = p.keys + batch * p.of_keys.batch + head / p.group * p.of_keys.head;
    const float* const values = p.values + batch * p.of_values.batch + head / p.group * p.of_values.head;
    // Load 2 t is tile begin + t of the keys; load 2 t + 1 is that tile of the values.
    auto load_part = [&](int load, int slot) {
        const u32 to = base + RING + slot * SLOT_BYTES;
        const int row = (begin + load / 2) * BLOCK_KEYS;
        if (load % 2) load_rows<BLOCK_KEYS, VALUE_PITCH>(to, values, p.of_values.position, p.value_features, row, seen.key_count);
        else load_rows<BLOCK_KEYS, PITCH>(to, keys, p.of_keys.position, p.features, row, seen.key_count);
    };
    if (tiles > 0)
        load_rows<QUERIES, PITCH>(base, p.queries + batch * p.of_queries.batch + head * p.of_queries.head, p.of_queries.position, p.features, first, p.query_count);
    #pragma unroll
    for (int load = 0; load < SLOTS - 1; load++) {
        if (load < 2 * tiles) load_part(load, load);
        copies_commit();
    }
    int slot = 0;                                  // slot of the current load
    auto next_part = [&](int load) {
        copies_wait_but<SLOTS - 2>();
        __syncthreads();                           // this load has landed for all threads; all have read the previous load's slot
        if (load + SLOTS - 1 < 2 * tiles) load_part(load + SLOTS - 1, slot == 0 ? SLOTS - 1 : slot - 1);
        copies_commit();
        const u32 found = base + RING + slot * SLOT_BYTES;
        slot = slot + 1 == SLOTS ? 0 : slot + 1;
        return found;
    };

    const u32 own_queries = base + ((set * ROWS + lane / 4) * PITCH + lane % 4 * 4) * 4;
    Rows rows(p, batch, head, own + lane / 4);
    float out[GROUPS * FEW][4] = {};
    Queries kept;
    for (int turn = 0; turn < tiles; turn++) {
        const int start = (begin + turn) * BLOCK_KEYS + part * OWN_KEYS, end = start + OWN_KEYS;
        const bool sees = start < seen.own_last;
        const u32 key_tile = next_part(2 * turn);
        if (turn == 0) load_queries(kept, own_queries);
        float s[EIGHTS][4] = {};
        if (sees) {
            multiply_keys(s, kept, own_queries, key_tile + ((part * OWN_KEYS + lane / 4) * PITCH + lane % 4 * 4) * 4);
            rows.weigh<0>(p, seen, own, start + lane % 4 * 2, end, {1.0f, 1.0f}, s);
        }
        const u32 value_tile = next_part(2 * turn + 1);
        if (sees) multiply_values(out, s, rows.rescale, value_tile + ((part * OWN_KEYS + lane % 4 * 2) * VALUE_PITCH + lane / 4 * FEW) * 4);
    }

    if constexpr (SPLIT > 1)
        if (!merge(reinterpret_cast<float4*>(shared), set, part, lane, factor_of(p), out, rows.sum, rows.maximum)) return;
    // Tile n of a group has feature FEW c + n in its column c.
    float* const target = p.output + batch * p.of_output.batch + head * p.of_output.head;
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = own + 8 * i + lane / 4;
        const float inverse = rows.inverse<0>(p, i);
        if (row >= p.query_count) continue;
        #pragma unroll
        for (int group = 0; group < GROUPS; group++)
            #pragma unroll
            for (int f = 0; f < 2 * FEW; f += 4) {                             // four at a time of the 2 FEW contiguous features
                const int feature = group * (8 * FEW) + lane % 4 * (2 * FEW) + f;
                float v[4];
                #pragma unroll
                for (int e = 0; e < 4; e++) v[e] = out[group * FEW + (f + e) % FEW][2 * i + (f + e) / FEW] * inverse;
                if (feature < p.value_features) *reinterpret_cast<float4*>(target + (long long)row * p.of_output.position + feature) = *reinterpret_cast<float4*>(v);
            }
    }
}
