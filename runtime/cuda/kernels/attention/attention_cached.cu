// Attention of one new position over a cache of keys and values: rotary embedding of the queries and of the new key, the write of the new
// rows into the cache, and out = softmax(scale * q K^T) V for each query head. 16-bit operands, fp32 accumulators, every GPU from sm_80 on.
// Bound by the reads of the filled part of the cache.
//
// A block takes the GROUP queries that share a key head, and every SPLITS-th tile of BLOCK_KEYS keys that they see; a warp takes 16 keys of a
// tile. The queries are the rows of mma.sync for the scores, and its columns for the result: the packed fragments of the scores are the
// operand of the second product. Keys and values go from global memory to registers: the order of features within a product is free, so a
// lane reads 16 bytes. The next loads are in flight while the warp computes. The number of keys is read from memory, so one launch serves
// every position: blocks without a tile end at once, and the last block to finish adds the results of the others.
//
// CLUSTER: the blocks that share a key head are a cluster, and send their results to the shared memory of the first block. A barrier
// counts their bytes, so no block waits for the fences of another.
//
// The row that this launch writes is read from shared memory, since other blocks may not see it in the cache yet.
//
// GIVEN: the launch writes no rows, and all keys and values are in memory. A null ``lengths`` stands for the capacity.
// MASK: a number is added to the score of each key. A head's numbers are contiguous.
//
// generated.cuh defines WARPS, SPLITS, CLUSTER, GROUP, HEAD (features, a multiple of 16), TURNED (rotated features, 0: none), INTERLEAVED,
// WINDOW, SOFTCAP, multiply(), and SINKS where each query head's softmax has one more logit, which no value belongs to.
#include "ptx.cuh"
#include "mma.cuh"
#include "generated.cuh"

constexpr int THREADS = WARPS * 32, BLOCK_KEYS = WARPS * 16;
constexpr int WARP_PARTS = (HEAD + 63) / 64;        // a warp has all parts
#include "attention_cached.cuh"
constexpr bool KEEP = HEAD <= 128;                 // queries in registers
#if GIVEN
constexpr int NEW = 0;                             // rows that the launch writes
#else
constexpr int NEW = 2;
#endif
#if MASK
constexpr bool SCALED = true;                      // scores are in units of log2 before they are weighed
#else
constexpr bool SCALED = SOFTCAP;
#endif

struct Rows {                                      // strides in elements
    long long batch, head;
};

struct Params {
    const u16 *queries, *new_keys, *new_values, *cosines, *sines;
    const int *starts, *lengths;                   // cache position of each batch entry's new row (null: 0), and its number of keys afterward
    u16 *keys, *values, *output;
    float* partial;                                // [batch][key head][split] of GROUP x (HEAD + 2): accumulators, largest score, sum of weights
    u32* arrived;                                  // [batch][key head]
    Rows of_queries, of_new_keys, of_new_values, of_keys, of_values, of_output;
    long long key_position, value_position, cosine_batch, sine_batch, start_step, length_step;
    int capacity;
    int reach;                                     // with a window: visible keys before the new one
    float scale_log2;                              // the scale times log2(e)
    float cap_in, cap_out;                         // of a softcap: 2 log2(e) scale / cap, and cap log2(e)
#if SINKS
    const u16* sinks;                              // of each query head
#endif
#if MASK
    const u16* mask;
    Rows of_mask;
#endif
};

struct Row {                                       // reader for turn_unit
    const u16* from;
    __device__ __forceinline__ void operator()(u32& a, u32& b, int left, int right) const { a = word_at(from + left), b = word_at(from + right); }
};

// The visible keys, and the tiles that hold them.
struct Range {
    int begin, end, first, last;

    __device__ __forceinline__ Range(const Params& p, int length) {
        end = max(0, min(length, p.capacity));
        begin = WINDOW ? max(0, end - 1 - p.reach) : 0;
        first = begin / BLOCK_KEYS, last = (end + BLOCK_KEYS - 1) / BLOCK_KEYS;
    }
    // Blocks that have a tile; the first block works in any case.
    __device__ __forceinline__ int active() const { return max(1, min(SPLITS, last - first)); }
};

// Prefetches a warp's first keys and values into L2.
DEVICE void prefetch_tile(const Params& p, const u16* keys, const u16* values, int end, int tile, int warp, int lane) {
    constexpr int LINES = (HEAD + 63) / 64;        // per row
    #pragma unroll
    for (int i = 0; i < (16 * LINES + 31) / 32; i++) {
        const int row = (i * 32 + lane) / LINES, line = (i * 32 + lane) % LINES * 64, at = tile * BLOCK_KEYS + warp * 16 + row;
        if (row < 16 && at < end) prefetch_l2(keys + at * p.key_position + line), prefetch_l2(values + at * p.value_position + line);
    }
}

// The keys that a block sees, and the row that this launch writes.
struct Seen {
    const u16 *keys, *values, *new_key, *new_value;
    long long key_position, value_position;
    int begin, end, fresh;

    __device__ __forceinline__ bool holds(int key) const { return key >= begin && key < end; }
    __device__ __forceinline__ const u16* key(int at) const { return at == fresh ? new_key : keys + at * key_position; }
    __device__ __forceinline__ const u16* value(int at) const { return at == fresh ? new_value : values + at * value_position; }
};

// Loads 16 keys: rows first + lane / 4 and first + 8 + lane / 4.
DEVICE void load_keys(Fragment (&k)[2], const Seen& seen, int first, int lane) {
    #pragma unroll
    for (int j = 0; j < 2; j++) {
        const int at = first + 8 * j + lane / 4;
        if (seen.holds(at)) k[j].load(seen.key(at), lane % 4);
        else k[j].clear();
    }
}

// Loads the values of 16 keys: of keys first + 2 (lane % 4) + {0, 1, 8, 9}, the eight features from 8 (lane / 4) on of each block of 64
// features.
DEVICE void load_values(uint4 (&v)[PARTS][4], const Seen& seen, int first, int lane) {
    #pragma unroll
    for (int j = 0; j < 4; j++) {
        const int at = first + lane % 4 * 2 + j % 2 + j / 2 * 8;
        const bool live = seen.holds(at);
        const u16* row = live ? seen.value(at) + lane / 4 * 8 : seen.values;
        #pragma unroll
        for (int c = 0; c < PARTS; c++) {
            const bool inside = live && (HEAD % 64 == 0 || 64 * c + lane / 4 * 8 < HEAD);
            v[c][j] = inside ? *reinterpret_cast<const uint4*>(row + 64 * c) : make_uint4(0u, 0u, 0u, 0u);
        }
    }
}

#if MASK
// Loads the numbers that are added to a lane's scores of 16 keys (s of ``score``). ``rows``: those of the block's first query.
DEVICE void load_mask(float (&m)[2][4], const u16* rows, long long row, const Seen& seen, int first, int lane) {
    #pragma unroll
    for (int j = 0; j < 2; j++) {
        #pragma unroll
        for (int i = 0; i < 2 * TILES; i++) {
            const int query = lane / 4 + i / 2 * 8, at = first + 8 * j + lane % 4 * 2 + i % 2;
            m[j][i] = query < GROUP && seen.holds(at) ? LOG2_E * unpack1(rows[query * row + at]) : 0.0f;
        }
    }
}
#endif

#if CLUSTER
// A block sends accumulators as above, then for each query the largest score, the sum of weights, and two floats of padding.
constexpr int SENT = GROUP * (HEAD + 4);

// Like add_up, for the results that the blocks of a cluster have sent.
template <class Put> DEVICE void add_sent(const float* parts, int count, float factor, const Put& put) {
    for (int e = threadIdx.x; e < GROUP * HEAD / 4; e += THREADS) {
        const int query = 4 * e / HEAD;
        const float* const own = parts + GROUP * HEAD + 4 * query;
        float most = -infinity(), weight = 0.0f;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        #pragma unroll
        for (int i = 0; i < SPLITS; i++)
            if (i < count) most = fmaxf(most, own[i * SENT]);
        const float shift = most == -infinity() ? 0.0f : most * factor;
        #pragma unroll
        for (int i = 0; i < SPLITS; i++) {
            if (i >= count) break;
            const float rescale = exp2_fast(fmaf(own[i * SENT], factor, -shift));
            const float4 v = reinterpret_cast<const float4*>(parts + i * SENT)[e];
            sum.x = fmaf(v.x, rescale, sum.x), sum.y = fmaf(v.y, rescale, sum.y), sum.z = fmaf(v.z, rescale, sum.z), sum.w = fmaf(v.w, rescale, sum.w);
            weight = fmaf(own[i * SENT + 1], rescale, weight);
        }
        put(query, 4 * e % HEAD, sum, weight, most);
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS) attention_cached(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 shared[];
    grid_launch_dependents();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, split = blockIdx.x, head = blockIdx.y, batch = blockIdx.z;
    u16* const queries = reinterpret_cast<u16*>(shared);                       // [8 TILES][ROW], then the new key and the new value
    u16* const new_key = queries + 8 * TILES * ROW;
    u16* const new_value = new_key + ROW;
#if SINKS
    float* const sinks = reinterpret_cast<float*>(new_value + ROW);            // [GROUP], times log2(e)
    float* const found_at = sinks + (GROUP + 3) / 4 * 4;                       // [WARPS][FOUND]
#else
    float* const found_at = reinterpret_cast<float*>(new_value + ROW);         // [WARPS][FOUND]
#endif
    u32* const word = reinterpret_cast<u32*>(found_at + WARPS * FOUND);        // with CLUSTER a barrier, 16 bytes, and [SPLITS][SENT]
#if CLUSTER
    if (threadIdx.x == 0) {
        barrier_init(smem_address(word), 1);
        barrier_init_fence();
    }
    cluster_arrive_relaxed();
#endif
    u16* const keys = p.keys + batch * p.of_keys.batch + head * p.of_keys.head;
    u16* const values = p.values + batch * p.of_values.batch + head * p.of_values.head;
    // The length may not be written yet. A stale value does no harm here: it only chooses a prefetch, and L2 is coherent. A stale copy of the
    // length in L1 would do harm, hence __ldcg.
#if GIVEN
    const int* const length = p.lengths ? p.lengths + batch * p.length_step : &p.capacity;
    const Range likely(p, p.lengths ? __ldcg(length) : p.capacity);
#else
    const int* const length = p.lengths + batch * p.length_step;
    const Range likely(p, __ldcg(length));
#endif
    if (split < likely.active()) prefetch_tile(p, keys, values, likely.end, likely.first + split, warp, lane);
    grid_dependency_wait();
#if CLUSTER
    cluster_wait();                                // every block has initialized its barrier
#endif

    const int start = NEW == 0 ? -1 : p.starts ? p.starts[batch * p.start_step] : 0;
    const Range range(p, *length);
    const u16* const cosines = TURNED ? p.cosines + batch * p.cosine_batch : nullptr;
    const u16* const sines = TURNED ? p.sines + batch * p.sine_batch : nullptr;
    constexpr int UNITS = HEAD / 4;
    for (int e = threadIdx.x; e < (GROUP + NEW) * UNITS; e += THREADS) {
        const int row = e / UNITS, unit = e % UNITS;
        if (row < GROUP) {
            const u16* from = p.queries + batch * p.of_queries.batch + (head * GROUP + row) * p.of_queries.head;
            turn_unit(queries + row * ROW, Row{from}, cosines, sines, unit);
        } else if (row == GROUP) {
            turn_unit(new_key, Row{p.new_keys + batch * p.of_new_keys.batch + head * p.of_new_keys.head}, cosines, sines, unit);
        } else {
            const u16* from = p.new_values + batch * p.of_new_values.batch + head * p.of_new_values.head + 4 * unit;
            put_word(new_value + 4 * unit, word_at(from)), put_word(new_value + 4 * unit + 2, word_at(from + 2));
        }
    }
    if (split >= range.active()) return;
#if SINKS
    if (threadIdx.x < GROUP) sinks[threadIdx.x] = LOG2_E * unpack1(p.sinks[head * GROUP + threadIdx.x]);
#endif
    const int first = range.first, last = range.last, active = range.active();
    const Seen seen = {keys, values, new_key, new_value, p.key_position, p.value_position, range.begin, range.end, start};
    for (int e = threadIdx.x; e < (8 * TILES - GROUP) * ROW / 2; e += THREADS) put_word(queries + GROUP * ROW + 2 * e, 0u);
    __syncthreads();
    if (split == 0 && start >= 0 && start < p.capacity) {
        for (int e = threadIdx.x; e < HEAD; e += THREADS) {                    // pairs of features, of the key and of the value
            const int at = e % (HEAD / 2) * 2;
            if (e < HEAD / 2) put_word(keys + start * p.key_position + at, word_at(new_key + at));
            else put_word(values + start * p.value_position + at, word_at(new_value + at));
        }
    }

    Fragment q[TILES], k[2];
    uint4 v[PARTS][4];
    auto load_queries = [&] {
        #pragma unroll
        for (int m = 0; m < TILES; m++) q[m].load(queries + (8 * m + lane / 4) * ROW, lane % 4);
    };
    if (KEEP) load_queries();
    Found found;
    found.clear();
    int at = (first + split) * BLOCK_KEYS + warp * 16;
    load_keys(k, seen, at, lane);
    load_values(v, seen, at, lane);
#if MASK
    float m[2][4];
    const u16* const mask = p.mask + batch * p.of_mask.batch + head * GROUP * p.of_mask.head;
    load_mask(m, mask, p.of_mask.head, seen, at, lane);
#endif
    for (int tile = first + split; tile < last; tile += SPLITS) {
        float s[2][4];
        if (!KEEP) load_queries();
        score(s, q, k);
        const int next = at + SPLITS * BLOCK_KEYS;
        load_keys(k, seen, next, lane);
        #pragma unroll
        for (int j = 0; j < 2; j++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                if (SOFTCAP) s[j][i] = fmaf(__fdividef(-2.0f, 1.0f + exp2_fast(s[j][i] * p.cap_in)), p.cap_out, p.cap_out);
#if MASK
                if (i < 2 * TILES) s[j][i] = SOFTCAP ? s[j][i] + m[j][i] : fmaf(s[j][i], p.scale_log2, m[j][i]);
#endif
                if (!seen.holds(at + 8 * j + lane % 4 * 2 + i % 2)) s[j][i] = -infinity();
            }
        }
#if MASK
        load_mask(m, mask, p.of_mask.head, seen, next, lane);
#endif
        u32 packed[TILES][2];
        found.weigh(packed, s, SCALED ? 1.0f : p.scale_log2, lane);
        found.add(packed, v);
        load_values(v, seen, next, lane);
        at = next;
    }
    found.put(found_at + warp * FOUND, lane, 0);
    __syncthreads();

    const float factor = SCALED ? 1.0f : p.scale_log2;
    u16* const output = p.output + batch * p.of_output.batch + head * GROUP * p.of_output.head;
    auto write = [&](int query, int feature, const float4& sum, float weight, float most) {
#if SINKS
        if (weight != 0.0f) weight += exp2_fast(fmaf(-most, factor, sinks[query]));
#endif
        const float whole = weight == 0.0f ? 0.0f : 1.0f / weight;             // no key at all: zeros
        *reinterpret_cast<uint2*>(output + query * p.of_output.head + feature) =
            make_uint2(pack2(sum.x * whole, sum.y * whole), pack2(sum.z * whole, sum.w * whole));
    };
    if (active == 1) {
        add_up<false>(found_at, WARPS, factor, write);
        return;
    }
#if CLUSTER
    float* const sent = reinterpret_cast<float*>(word + 4);                    // written by each block, in the first block's memory
    const u32 barrier = cluster_map(smem_address(word), 0), to = cluster_map(smem_address(sent + split * SENT), 0);
    if (split == 0 && threadIdx.x == 0) barrier_expect(smem_address(word), active * (GROUP * HEAD + 4 * GROUP) * 4);
    add_up<false>(found_at, WARPS, factor, [&](int query, int feature, const float4& sum, float weight, float most) {
        const float four[4] = {sum.x, sum.y, sum.z, sum.w}, rest[4] = {most, weight, 0.0f, 0.0f};
        cluster_store_async(to + (query * HEAD + feature) * 4, barrier, four);
        if (feature == 0) cluster_store_async(to + (GROUP * HEAD + query * 4) * 4, barrier, rest);
    });
    if (split) return;
    barrier_wait_cluster(smem_address(word), 0);
    add_sent(sent, active, factor, write);
#else
    const int pair = batch * gridDim.y + head;
    float* const parts = p.partial + (long long)pair * SPLITS * FOUND;
    float* const own = parts + split * FOUND;
    add_up<false>(found_at, WARPS, factor, [&](int query, int feature, const float4& sum, float weight, float most) {
        *reinterpret_cast<float4*>(own + query * HEAD + feature) = sum;
        if (feature == 0) own[GROUP * HEAD + query] = most, own[GROUP * (HEAD + 1) + query] = weight;
    });
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        *word = count_arrival(p.arrived + pair) == u32(active - 1);
        if (*word) p.arrived[pair] = 0;
    }
    __syncthreads();
    if (!*word) return;
    __threadfence();
    add_up<true>(parts, active, factor, write);
#endif
}
