// Fused attention for Hopper: out = softmax(scale * q k^T + mask) v per batch and head, wgmma fed by TMA, 16-bit operands.
//
// A block takes WARPGROUPS x 64 queries of one head. Its queries are loaded once, then tiles of BLOCK_KEYS keys and values into a
// ring of STAGES: by a warp of its own, or, where all tiles have a stage, by one thread before it multiplies. Each
// warpgroup multiplies 64 queries with a tile of keys, keeps the scores in registers, turns them into exp2(score - maximum)
// and multiplies these, as wgmma's register operand, with the values (the online softmax of FlashAttention; statistics and accumulators
// are fp32; attention_softmax.cuh). The tensor cores multiply one tile's weights with its values while the next tile's scores go through the softmax
// (FlashAttention-3). Operands are strided views [batch][position][head][feature], so q, k and v may lie in the output of one joint
// projection.
//
// PERSISTENT: a block takes items (64 * WARPGROUPS queries of one head) in turn. Queries have two places then, so the loading warp
// brings the next item's operands while this one's are multiplied.
//
// TURNS: warpgroups issue their products in turn (FlashAttention-3's ping-pong), so that one's softmax runs beside another's products.
// Without it they wait for the same tile, and tensor cores and exponentials are busy one after the other.
//
// SPLIT: a block's warpgroups share 64 queries, and take tiles of keys in turn: few queries then occupy the GPU for a shorter time. At the end
// the first warpgroup adds up what all found.
//
// A head of HEAD features (a multiple of 16; TMA fills what the tensor lacks with zeros) lies in shared memory as subtiles of
// SPAN bytes per row. k is K-major; v is read across: its rows are keys, so it is wgmma's MN-major operand.
//
// generated.cuh defines WARPGROUPS, BLOCK_KEYS, STAGES, LOADER (whether a warp of its own loads), ONE_TILE (a warpgroup has one at most), PERSISTENT
// (LOADER is 1, then), TURNS, SPLIT, REGISTERS (of a persistent block's multiplying threads), HEAD, SPAN, MIN_BLOCKS, CAUSAL, REACH (a query
// sees a number of keys before its position only: tiles before them are neither loaded nor multiplied), FROM_END (positions of queries count from the
// end of the keys), HAS_LENGTHS, MASK (0 none;
// else elements per load: 1 or 2), MASK_ROWS (2 where queries have masks of their own, else 1), FACTORS (0: none; key k = KEY_WIDTH *
// row + column gets rows[query][row] + columns[query][column]. 1: KEY_WIDTH is BLOCK_KEYS, so that columns stay in registers; 2: any even
// KEY_WIDTH), SOFTCAP (scores become cap * tanh(score / cap) before masks are added), NARROW (1: the result goes out in 8-bit integers, 2: in fp8), wgmma_scores() and wgmma_values().
#include "ptx.cuh"
#include "generated.cuh"
#include "mma.cuh"
#include "narrow.cuh"

// A persistent block's loading warp belongs to a warpgroup of its own, which gives its registers to the multiplying ones.
constexpr int THREADS = WARPGROUPS * 128 + (PERSISTENT ? 128 : LOADER * 32);
constexpr int QUERY_GROUPS = SPLIT ? 1 : WARPGROUPS;   // of 64 queries each
constexpr int TILE_STEP = SPLIT ? WARPGROUPS : 1;      // from one tile of a warpgroup to its next one
constexpr int SUBTILES = HEAD * 2 / SPAN;
constexpr u32 QUERY_SUBTILE = 64 * SPAN, QUERY_BYTES = SUBTILES * QUERY_SUBTILE;
constexpr u32 KEY_SUBTILE = BLOCK_KEYS * SPAN, KEY_BYTES = SUBTILES * KEY_SUBTILE;
constexpr int QUERY_PLACES = PERSISTENT ? 2 : 1;
constexpr u32 BARRIER_BYTES = 1024;
constexpr u32 TURN_BARRIER = 1 + WARPGROUPS;       // of the first warpgroup; those before order a warpgroup's stores
static_assert(!SPLIT || (!PERSISTENT && !TURNS && (!LOADER || STAGES % WARPGROUPS == 0)), "a split block has one item, and stages for each warpgroup");

struct Params {
    TensorMap queries, keys, values, output;       // (feature, position, head, batch)
    const u16* mask;
    const int* lengths;                            // keys of each batch
    long long mask_batch, mask_head, mask_query;   // strides in elements
    int query_count, key_count, heads, group;      // group: query heads per key head
    int causal_offset;                             // query i sees keys <= i + causal_offset (FROM_END: positions count from the end of the keys)
    int reach;                                     // with REACH, query i sees keys from i + causal_offset - reach on
    int mask_period;                               // batch entry n has mask n % mask_period
    int items, row_items;                          // of the launch, and of one head
    float scale_log2;                              // the scale times log2(e)
    Narrow narrow;
#if FACTORS
    const u16* factors[2];                         // rows, columns
    long long factor_strides[2][4];                // in elements: batch, head, row and column of the query
    int query_width;                               // queries in a row
#endif
#if SOFTCAP
    float cap_in, cap_out;                         // 2 log2(e) scale / cap, and cap log2(e)
#endif
};

struct Item {                                      // 64 * QUERY_GROUPS queries of a head
    int first, head, batch;
};

// Where a block's operands and barriers lie in shared memory.
struct Room {
    u32 query_full, query_empty, key_full, value_full, key_empty, value_empty, queries, keys, values;
    float4* merged;                                // in place of the ring, at the end of a split block

    __device__ __forceinline__ Room(u8* shared, u32 base) {
        query_full = base, query_empty = query_full + 8 * QUERY_PLACES, key_full = query_empty + 8 * QUERY_PLACES;
        value_full = key_full + 8 * STAGES, key_empty = value_full + 8 * STAGES, value_empty = key_empty + 8 * STAGES;
        queries = base + BARRIER_BYTES, keys = queries + QUERY_PLACES * QUERY_GROUPS * QUERY_BYTES, values = keys + STAGES * KEY_BYTES;
        merged = reinterpret_cast<float4*>(shared + (keys - base));
    }
};

// The items of a block are own_first(), own_first() + gridDim.x ... below own_end().
DEVICE int own_first() { return PERSISTENT ? int(blockIdx.x) : 0; }
DEVICE int own_end(const Params& p) { return PERSISTENT ? p.items : 1; }

// The last queries of all heads come first: in causal order they see the most keys.
DEVICE Item item_at(const Params& p, int index) {
    if (!PERSISTENT) return {int(blockIdx.x) * QUERY_GROUPS * 64, int(blockIdx.y), int(blockIdx.z)};
    const int stack = p.items / p.row_items, row = index / stack, pair = index - row * stack;
    return {(p.row_items - 1 - row) * QUERY_GROUPS * 64, pair % p.heads, pair / p.heads};
}

// Query i sees keys up to i and this.
DEVICE int seen_ahead(const Params& p, int key_count) { return p.causal_offset + (FROM_END ? key_count - p.query_count : 0); }

struct Tiles {                                     // of keys: from first to last - 1
    int first, last;
};

// Tiles of those keys that any of ``count`` queries from ``query`` on sees.
DEVICE Tiles seen_tiles(const Params& p, int query, int count, int key_count) {
    const int ahead = seen_ahead(p, key_count);
    const int end = CAUSAL ? max(0, min(key_count, query + count + ahead)) : key_count;
    const int last = (end + BLOCK_KEYS - 1) / BLOCK_KEYS;
    return {REACH ? min(last, max(0, query + ahead - p.reach) / BLOCK_KEYS) : 0, last};
}

// Keys of the item's batch.
DEVICE int keys_of(const Params& p, const Item& item) {
    return HAS_LENGTHS ? min(p.key_count, max(p.lengths[item.batch], 0)) : p.key_count;
}

// An MN-major operand: each key is a row of SPAN bytes, eight rows are one swizzle atom, subtiles follow each other.
DEVICE u64 value_descriptor(u32 address) {
    constexpr u64 swizzle = SPAN == 128 ? 1 : SPAN == 64 ? 2 : 3;
    return (swizzle << 62) | (u64((8 * SPAN) >> 4) << 32) | (u64(KEY_SUBTILE >> 4) << 16) | u64((address & 0x3ffff) >> 4);
}
// Of an operand ``units`` of 16 bytes behind. The upper word stays: with 64-bit additions, products wait for carries.
DEVICE u64 later(u64 descriptor, u32 units) { return (descriptor >> 32 << 32) | (u32(descriptor) + units); }
// A number that all lanes have, as the compiler does not know: it then computes descriptors once for a warp.
DEVICE u32 uniform(u32 x) { return __shfl_sync(0xffffffffu, x, 0); }
DEVICE u32 swizzled(u32 offset) { return offset ^ (((offset >> 7) & (SPAN / 16 - 1)) << 4); }
DEVICE void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Loads the operands of the block's items: one thread.
DEVICE void load_items(const Params& p, const Room& at) {
    int stage = 0, parity = 1, loads = 0, place = 0, place_parity = 1;
    for (int index = own_first(); index < own_end(p); index += gridDim.x) {
        const Item item = item_at(p, index);
        const Tiles tiles = seen_tiles(p, item.first, QUERY_GROUPS * 64, keys_of(p, item));
        const u32 queries = at.queries + place * QUERY_GROUPS * QUERY_BYTES, query_full = at.query_full + 8 * place;
        if (PERSISTENT) barrier_wait(at.query_empty + 8 * place, place_parity);
        barrier_expect(query_full, QUERY_GROUPS * QUERY_BYTES);
        for (int j = 0; j < QUERY_GROUPS * SUBTILES; j++)
            tma_load_4d(queries + j * QUERY_SUBTILE, &p.queries, query_full, j % SUBTILES * (SPAN / 2), item.first + j / SUBTILES * 64,
                        item.head, item.batch);
        for (int tile = tiles.first; tile < tiles.last; tile++, loads++) {
            const u32 key_full = at.key_full + 8 * stage, value_full = at.value_full + 8 * stage;
            if (LOADER && loads >= STAGES) barrier_wait(at.key_empty + 8 * stage, parity);
            barrier_expect(key_full, KEY_BYTES);
            for (int j = 0; j < SUBTILES; j++)
                tma_load_4d(at.keys + stage * KEY_BYTES + j * KEY_SUBTILE, &p.keys, key_full, j * (SPAN / 2), tile * BLOCK_KEYS,
                            item.head / p.group, item.batch);
            if (LOADER && loads >= STAGES) barrier_wait(at.value_empty + 8 * stage, parity);
            barrier_expect(value_full, KEY_BYTES);
            for (int j = 0; j < SUBTILES; j++)
                tma_load_4d(at.values + stage * KEY_BYTES + j * KEY_SUBTILE, &p.values, value_full, j * (SPAN / 2), tile * BLOCK_KEYS,
                            item.head / p.group, item.batch);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        if (++place == QUERY_PLACES) place = 0, place_parity ^= 1;
    }
}

// Where a multiplying warpgroup is in the ring of keys and values, and among the places of queries.
struct Turn {
    int stage, parity = 0, place = 0, place_parity = 0;

    explicit __device__ __forceinline__ Turn(int group) : stage(SPLIT ? group : 0) {}
    __device__ __forceinline__ void next_stage() {
        stage += TILE_STEP;
        if (stage >= STAGES) stage -= STAGES, parity ^= 1;
    }
};

// What makes these numbers stays above this, what reads them below.
template <int N> DEVICE void settle(float (&sums)[N]) {
    #pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(sums[i]) :: "memory");
}

#include "attention_softmax.cuh"
#include "attention_merge.cuh"

// What the multiplying warps do with one item.
DEVICE void attend(const Params& p, const Room& at, const Item& item, Turn& turn, bool first, int warp, int lane) {
    const int group = warp / 4, quarter = warp % 4, query_group = SPLIT ? 0 : group;
    const int row = item.first + query_group * 64 + quarter * 16 + lane / 4;  // this thread's queries: row and row + 8
    const int key_count = keys_of(p, item);
    const Tiles tiles = seen_tiles(p, item.first, QUERY_GROUPS * 64, key_count);
    Tiles own = seen_tiles(p, item.first + query_group * 64, 64, key_count);  // of this warpgroup; of SPLIT ones, each WARPGROUPS-th
    if (SPLIT) own.first += group;
    if (item.first + query_group * 64 >= p.query_count || own.first >= own.last) own = {tiles.first, tiles.first};
    // The place of the item before: its result has been read when its store has left shared memory.
    auto leave_place = [&] {
        if (PERSISTENT && !first && quarter == 0 && elect_one()) {
            tma_store_wait_read<0>();
            barrier_arrive(at.query_empty + 8 * (turn.place ^ 1));
        }
    };
    const Bias bias(p, item, row, lane);
    const u32 own_queries = at.queries + (turn.place * QUERY_GROUPS + query_group) * QUERY_BYTES;
    float out[HEAD / 2], s[BLOCK_KEYS / 2], sum[2] = {0.0f, 0.0f}, rescale[2];
    float maximum[2] = {NOTHING, NOTHING};
    u32 pairs[MASK_PAIRS], weights[BLOCK_KEYS / 4];                   // wgmma's register operand: rows row, row + 8 of keys 0-7, then of keys 8-15
    #pragma unroll
    for (int i = 0; i < HEAD / 2; i++) out[i] = 0.0f;
    int behind = 0, behind_parity = 0;             // the stage whose values come next
    auto issue_keys = [&] {
        wgmma_fence();
        const u32 keys = at.keys + uniform(turn.stage) * KEY_BYTES;
        #pragma unroll
        for (int i = 0; i < SUBTILES; i++) {
            const u64 a = wgmma_descriptor<SPAN>(own_queries + i * QUERY_SUBTILE);
            const u64 b = wgmma_descriptor<SPAN>(keys + i * KEY_SUBTILE);
            #pragma unroll
            for (int k = 0; k < SPAN / 32; k++) wgmma_scores(s, later(a, 2 * k), later(b, 2 * k), (i | k) != 0);
        }
        wgmma_commit();
    };
    auto multiply_keys = [&] {
        barrier_wait(at.key_full + 8 * turn.stage, turn.parity);
        if (TURNS) named_barrier(TURN_BARRIER + group, 256);
        issue_keys();
    };
    auto multiply_values = [&] {
        barrier_wait(at.value_full + 8 * behind, behind_parity);
        wgmma_fence();
        const u64 b = value_descriptor(at.values + uniform(behind) * KEY_BYTES);
        #pragma unroll
        for (int k = 0; k < BLOCK_KEYS / 16; k++)
            wgmma_values(out, weights[4 * k], weights[4 * k + 1], weights[4 * k + 2], weights[4 * k + 3], later(b, k * SPAN));
        wgmma_commit();
    };
    auto keys_done = [&] {                         // their stage is free
        if (LOADER && lane == 0) barrier_arrive(at.key_empty + 8 * turn.stage);
        behind = turn.stage, behind_parity = turn.parity;
        turn.next_stage();
    };
    auto pass_turn = [&] {
        if (TURNS) named_barrier_arrive(TURN_BARRIER + (group + 1) % WARPGROUPS, 256);
    };
    auto pass_tiles = [&](int from, int to) {      // other warpgroups' tiles
        for (int tile = from; tile < to; tile++) {
            barrier_wait(at.key_full + 8 * turn.stage, turn.parity);
            if (LOADER && lane == 0) barrier_arrive(at.key_empty + 8 * turn.stage);
            if (TURNS) named_barrier(TURN_BARRIER + group, 256);
            pass_turn();
            barrier_wait(at.value_full + 8 * turn.stage, turn.parity);
            if (LOADER && lane == 0) barrier_arrive(at.value_empty + 8 * turn.stage);
            turn.next_stage();
        }
    };
    auto rescale_results = [&] {
        #pragma unroll
        for (int j = 0; j < HEAD / 2; j++) out[j] *= rescale[j / 2 % 2];
    };
    auto pack_weights = [&](int from, int to) {    // of eights of keys    // of eights of keys
        #pragma unroll
        for (int i = 2 * from; i < 2 * to; i++) weights[i] = pack2(s[2 * i], s[2 * i + 1]);
    };
    barrier_wait(at.query_full + 8 * turn.place, turn.place_parity);
    if (REACH && !SPLIT) pass_tiles(tiles.first, own.first);
    if (own.first < own.last) {
        bool grown[2] = {true, true};
        multiply_keys();
        pass_turn();
        load_mask(p, bias, own.first, lane, pairs);
        leave_place();
        __syncwarp();
        wgmma_wait<0>();
        settle(s);
        keys_done();
        soften(p, bias, pairs, row, own.first, key_count, lane, grown, s, maximum, sum, rescale);
        pack_weights(0, EIGHTS);
        #pragma unroll 1
        for (int tile = own.first + TILE_STEP; !ONE_TILE && tile < own.last; tile += TILE_STEP) {
            const int stage = behind;
            multiply_keys();
            multiply_values();
            pass_turn();
            load_mask(p, bias, tile, lane, pairs);
            wgmma_wait<1>();
            settle(s);
            float offset[2], total[2];
            if (KEEPS_MAXIMA) {
                prepare(p, bias, pairs, row, tile, key_count, lane, maximum, s, offset);
                total[0] = weigh<0, MIDDLE>(0, factor_of(p), offset[0], s), total[1] = weigh<0, MIDDLE>(1, factor_of(p), offset[1], s);
            } else {
                soften(p, bias, pairs, row, tile, key_count, lane, grown, s, maximum, sum, rescale);
            }
            settle(s);
            // ptxas moves a wait to the start of its basic block, in front of the softmax. A branch that is never taken ends the block.
            if ((KEEPS_MAXIMA ? total[0] : sum[0]) < 0.0f) __nanosleep(1);
            wgmma_wait<0>();
            settle(out);
            if (LOADER && lane == 0) barrier_arrive(at.value_empty + 8 * stage);
            pack_weights(0, MIDDLE);
            if (KEEPS_MAXIMA) {
                #pragma unroll
                for (int i = 0; i < 2; i++) {
                    total[i] += weigh<MIDDLE, EIGHTS>(i, factor_of(p), offset[i], s);
                    grown[i] = !(total[i] <= MOST) || maximum[i] == NOTHING;
                }
                if (any_thread(1 + group, 128, grown[0] || grown[1])) {
                    grown[0] = quad_any(grown[0], lane), grown[1] = quad_any(grown[1], lane);
                    issue_keys();                  // once more: the scores are lost
                    wgmma_wait<0>();
                    settle(s);
                    soften(p, bias, pairs, row, tile, key_count, lane, grown, s, maximum, sum, rescale);
                    rescale_results();
                    pack_weights(0, MIDDLE);
                } else {
                    sum[0] += total[0], sum[1] += total[1];
                }
            } else {
                rescale_results();
            }
            keys_done();
            pack_weights(MIDDLE, EIGHTS);
        }
        multiply_values();
        wgmma_wait<0>();
        settle(out);
        if (LOADER && lane == 0) barrier_arrive(at.value_empty + 8 * behind);
    } else {
        leave_place();
    }
    if (!SPLIT) pass_tiles(own.last, tiles.last);

    #pragma unroll
    for (int i = 0; i < 2; i++) {
        sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
        sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
    }
    if (SPLIT && !merge(at.merged, group, factor_of(p), out, sum, maximum)) return;
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        sum[i] = sum[i] == 0.0f ? 0.0f : __fdividef(1.0f, sum[i]);     // no key at all: zeros, as ONNX's Attention has it
    }
    named_barrier(1 + group, 128);                 // the queries have been read: their place takes the result
#if NARROW
    const u32 own_row = own_queries + (quarter * 16 + lane / 4) * HEAD + lane % 4 * 2;
    #pragma unroll
    for (int j = 0; j < HEAD / 8; j++) {       // rounded to 16 bits first, as a reader of that result would see it
        const u32 upper = pack2(out[4 * j] * sum[0], out[4 * j + 1] * sum[0]);
        const u32 lower = pack2(out[4 * j + 2] * sum[1], out[4 * j + 3] * sum[1]);
        const u32 word = narrow_four<NARROW == 2>(p.narrow, low_float(upper), high_float(upper), low_float(lower), high_float(lower));
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(own_row + 8 * j), "h"(u16(word)) : "memory");
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(own_row + 8 * HEAD + 8 * j), "h"(u16(word >> 16)) : "memory");
    }
    async_proxy_fence();
    named_barrier(1 + group, 128);
    if (quarter == 0 && elect_one()) {
        tma_store_4d(&p.output, own_queries, 0, item.first + query_group * 64, item.head, item.batch);
        tma_store_commit();
    }
#else
    #pragma unroll
    for (int j = 0; j < HEAD / 8; j += 2) {
        const int at = quarter * 16 + lane % 16, block = j + lane / 16;
        const u32 offset = swizzled(at * SPAN + block % (SPAN / 16) * 16);
        store_matrices(own_queries + block / (SPAN / 16) * QUERY_SUBTILE + offset,
                       pack2(out[4 * j] * sum[0], out[4 * j + 1] * sum[0]), pack2(out[4 * j + 2] * sum[1], out[4 * j + 3] * sum[1]),
                       pack2(out[4 * j + 4] * sum[0], out[4 * j + 5] * sum[0]), pack2(out[4 * j + 6] * sum[1], out[4 * j + 7] * sum[1]));
    }
    async_proxy_fence();
    named_barrier(1 + group, 128);
    if (quarter == 0 && elect_one()) {
        for (int i = 0; i < SUBTILES; i++)
            tma_store_4d(&p.output, own_queries + i * QUERY_SUBTILE, i * (SPAN / 2), item.first + query_group * 64, item.head, item.batch);
        tma_store_commit();
    }
#endif
    if (++turn.place == QUERY_PLACES) turn.place = 0, turn.place_parity ^= 1;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_sm90(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 shared[];
    const u32 base = smem_address(shared);
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const Room at(shared, base);

    if (threadIdx.x == 0) {
        for (int i = 0; i < QUERY_PLACES; i++) {
            barrier_init(at.query_full + 8 * i, 1);
            barrier_init(at.query_empty + 8 * i, WARPGROUPS);
        }
        for (int i = 0; i < STAGES; i++) {
            barrier_init(at.key_full + 8 * i, 1);
            barrier_init(at.value_full + 8 * i, 1);
            barrier_init(at.key_empty + 8 * i, QUERY_GROUPS * 4);
            barrier_init(at.value_empty + 8 * i, QUERY_GROUPS * 4);
        }
        barrier_init_fence();
        async_proxy_fence();
    }
    if (threadIdx.x == (LOADER ? WARPGROUPS * 128 : 32)) {
        tma_prefetch(&p.queries);
        tma_prefetch(&p.keys);
        tma_prefetch(&p.values);
        tma_prefetch(&p.output);
    }
    __syncthreads();
    grid_launch_dependents();
    grid_dependency_wait();

    if (PERSISTENT && warp >= WARPGROUPS * 4) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (warp == (LOADER ? WARPGROUPS * 4 : 0) && elect_one()) load_items(p, at);
    if (LOADER && warp >= WARPGROUPS * 4) return;
    __syncwarp();
    if (PERSISTENT) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
    if (TURNS && warp >= WARPGROUPS * 4 - 4) named_barrier_arrive(TURN_BARRIER, 256);
    Turn turn(warp / 4);
    for (int index = own_first(); index < own_end(p); index += gridDim.x)
        attend(p, at, item_at(p, index), turn, index == own_first(), warp, lane);
    if (TURNS && warp < 4) named_barrier(TURN_BARRIER, 256);
    if (warp % 4 == 0 && elect_one()) tma_store_wait_read<0>();
}
