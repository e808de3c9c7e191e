// Fused attention for Hopper: out = softmax(scale * q k^T + mask) v per batch and head, wgmma fed by TMA, 16-bit operands.
//
// A block takes WARPGROUPS x 64 queries of one head. It loads its queries once, then tiles of BLOCK_KEYS keys and values into a ring
// of STAGES. A separate warp loads them, or one thread before it multiplies, where every tile has a stage of its own. Each warpgroup
// multiplies 64 queries with a tile of keys, keeps the scores in registers, turns them into exp2(score - maximum) and multiplies these, as
// wgmma's register operand, with the values (the online softmax of FlashAttention; statistics and accumulators are fp32;
// attention_softmax.cuh). The tensor cores multiply the weights of one tile with its values during the softmax of the next tile's scores
// (FlashAttention-3). Operands are strided views [batch][position][head][feature], so q, k and v may be slices of the output of one joint
// projection.
//
// PERSISTENT: a block takes several items in turn (an item is 64 * WARPGROUPS queries of one head). The loading warp loads the next item's
// first tiles of keys and values while the current item is multiplied, and its queries, too, if queries have two buffers (QUERY_PLACES).
//
// TURNS: warpgroups issue their products in turn (FlashAttention-3's ping-pong), so that the softmax of one overlaps the products of another.
// Without it they wait for the same tile, and tensor cores and exponentials are busy one after the other.
//
// SPLIT: the warpgroups of a block share 64 queries, and take tiles of keys in turn, which shortens the latency of few queries. At the end
// the first warpgroup adds the results of all. SHARERS: so many blocks of a cluster share these queries as well, each with a part of the
// tiles. The first block adds the results of all.
//
// A head of HEAD features (a multiple of 16, of 64 above 128; TMA pads the tensor with zeros) is stored in shared memory as subtiles with SPAN bytes per row.
// k is K-major. The rows of v are keys, so v is wgmma's MN-major operand.
//
// generated.cuh defines SHARED_BYTES (reserved by the launch), WARPGROUPS, BLOCK_KEYS, STAGES, LOADER (whether a separate warp loads), ONE_TILE (a warpgroup has one tile at most),
// PERSISTENT (implies LOADER), QUERY_PLACES (buffers of queries: 1, or 2 if PERSISTENT), TURNS, SPLIT, SHARERS, LIVE_WARPS (of a
// warpgroup: those with queries, if blocks share them), REGISTERS (per multiplying thread of
// a persistent block), HEAD, SPAN, MIN_BLOCKS, CAUSAL, REACH (a query sees only a limited number of keys before its position; earlier tiles
// are neither loaded nor multiplied), FROM_END (positions of queries count from the end of the keys), HAS_LENGTHS, MASK (0 none; 1 or 2:
// elements per load of a thread; TILED_MASK: tiles of masks per query come with the values by TMA), MASK_ROWS (2 where each query has its own mask, else 1), FACTORS (0: none; key k = KEY_WIDTH * row + column
// gets rows[query][row] + columns[query][column]. 1: KEY_WIDTH is BLOCK_KEYS, so that columns stay in registers; 2: any even KEY_WIDTH),
// SOFTCAP (scores become cap * tanh(score / cap) before masks are added), NARROW (1: the result is stored as 8-bit integers, 2: as fp8),
// wgmma_scores(), wgmma_values(), SINKS where each head's softmax has one more logit, which no value belongs to, and ROUNDED (1: weights are
// rounded to a grid of 8-bit integers, 2: scores, too). A weight is then known only when the row's sum is: the keys of rows of several tiles
// are multiplied twice.
#include "ptx.cuh"
#include "generated.cuh"
#include "mma.cuh"
#include "narrow.cuh"
#include "attention_tiles.cuh"

#define TILED_MASK 8

// The loading warp of a persistent block is part of a separate warpgroup, which gives its registers to the multiplying warpgroups.
constexpr int LOADING_REGISTERS = MASK == TILED_MASK ? 32 : 24;        // that it keeps, per thread
constexpr int THREADS = WARPGROUPS * 128 + (PERSISTENT ? 128 : LOADER * 32);
constexpr int QUERY_GROUPS = SPLIT ? 1 : WARPGROUPS;   // of 64 queries each
constexpr int TILE_STEP = SPLIT ? WARPGROUPS : 1;      // tiles between consecutive tiles of a warpgroup
constexpr int SUBTILES = HEAD * 2 / SPAN;
constexpr u32 QUERY_SUBTILE = 64 * SPAN, QUERY_BYTES = SUBTILES * QUERY_SUBTILE;
constexpr u32 KEY_SUBTILE = BLOCK_KEYS * SPAN, KEY_BYTES = SUBTILES * KEY_SUBTILE;
constexpr bool LATE_QUERIES = PERSISTENT && QUERY_PLACES == 1;        // the next item's queries wait for the store of the current result
constexpr int PASSES = ROUNDED && LOADER && !ONE_TILE ? 2 : 1;        // over the keys; without LOADER, all of them stay in the ring
constexpr u32 BARRIER_BYTES = 1024;
constexpr u32 TURN_BARRIER = 1 + WARPGROUPS;       // barrier of the first warpgroup's turn; lower numbers order the stores of a warpgroup
static_assert(!ROUNDED || (!SPLIT && !TURNS && !FACTORS && !SOFTCAP && !CAUSAL && !REACH), "rounded weights need whole rows");
static_assert(QUERY_PLACES == 1 || (QUERY_PLACES == 2 && PERSISTENT), "the next item's queries have a buffer of their own");
static_assert(ROUNDED != 2 || !MASK, "a mask would follow the rounding of scores");
static_assert(SHARERS == 1 || SPLIT, "the warpgroups of blocks that share queries share them, too");
static_assert(!SPLIT || (!PERSISTENT && !TURNS && (!LOADER || STAGES % WARPGROUPS == 0)), "a split block has one item, and stages for each warpgroup");

constexpr u32 MASK_SPAN = BLOCK_KEYS % 64 ? 64 : 128;  // bytes per row of a subtile of a mask
constexpr int MASK_SUBTILES = BLOCK_KEYS * 2 / MASK_SPAN;
constexpr u32 MASK_SUBTILE = 64 * MASK_SPAN, MASK_BYTES = MASK == TILED_MASK ? 64 * BLOCK_KEYS * 2 : 0;    // of 64 queries
constexpr u32 RING_BYTES = STAGES * (2 * KEY_BYTES + QUERY_GROUPS * MASK_BYTES);
static_assert(SHARED_BYTES >= BARRIER_BYTES + QUERY_PLACES * QUERY_GROUPS * QUERY_BYTES + RING_BYTES, "the launch reserves what the block uses");
static_assert(MASK != TILED_MASK || (MASK_ROWS == 2 && BLOCK_KEYS % 32 == 0 && !ROUNDED), "no tile of a mask");

struct Params {
    TensorMap queries, keys, values, output;       // (feature, position, head, batch)
#if MASK == TILED_MASK
    TensorMap masks;                               // (key, query, head, batch)
#endif
    const u16* mask;
    const int* lengths;                            // keys of each batch
    long long mask_batch, mask_head, mask_query;   // strides in elements
    int query_count, key_count, heads, group;      // group: query heads per key head
    int causal_offset;                             // query i sees keys <= i + causal_offset (FROM_END: positions count from the end of the keys)
    int reach;                                     // with REACH, query i sees keys >= i + causal_offset - reach
    int mask_period;                               // batch entry n has mask n % mask_period
    int items, row_items;                          // items of the launch, and of one head
    float scale_log2;                              // the scale times log2(e)
    Narrow narrow;
#if FACTORS
    const u16* factors[2];                         // rows, columns
    long long factor_strides[2][4];                // in elements: batch, head, row and column of the query
    int query_width;                               // queries per row
#endif
#if SOFTCAP
    float cap_in, cap_out;                         // 2 log2(e) scale / cap, and cap log2(e)
#endif
#if SINKS
    const u16* sinks;                              // of each head
#endif
#if ROUNDED
    float weight_steps, weight_high, weight_step;  // of weights: steps in 1, the bound in steps, the step
#endif
#if ROUNDED == 2
    float to_grid, low, high, step_log2;           // of scores: the scale over their step, bounds in steps, the step times log2(e)
#endif
};

struct Item {                                      // 64 * QUERY_GROUPS queries of a head
    int first, head, batch, key_head;
};

// Addresses of a block's operands and barriers in shared memory.
struct Room {
    u32 query_full, query_empty, key_full, value_full, key_empty, value_empty, others_full, queries, keys, values, masks;
    float4* merged;                                // reuses the ring, at the end of a split block

    __device__ __forceinline__ Room(u8* shared, u32 base) {
        query_full = base, query_empty = query_full + 8 * QUERY_PLACES, key_full = query_empty + 8 * QUERY_PLACES;
        value_full = key_full + 8 * STAGES, key_empty = value_full + 8 * STAGES, value_empty = key_empty + 8 * STAGES;
        others_full = value_empty + 8 * STAGES, queries = base + BARRIER_BYTES, keys = queries + QUERY_PLACES * QUERY_GROUPS * QUERY_BYTES, values = keys + STAGES * KEY_BYTES;
        masks = values + STAGES * KEY_BYTES;
        merged = reinterpret_cast<float4*>(shared + (keys - base));
    }
};

// The items of a block are own_first(), own_first() + gridDim.x, ..., below own_end().
DEVICE int own_first() { return PERSISTENT ? int(blockIdx.x) : 0; }
DEVICE int own_end(const Params& p) { return PERSISTENT ? p.items : 1; }

// The last queries of all heads come first: with causal order they see the most keys.
DEVICE Item item_at(const Params& p, int index) {
    if (!PERSISTENT) return {int(blockIdx.x / SHARERS) * QUERY_GROUPS * 64, int(blockIdx.y), int(blockIdx.z), int(blockIdx.y / u32(p.group))};
    const int stack = p.items / p.row_items, row = index / stack, pair = index - row * stack;
    const int batch = pair / p.heads, head = pair - batch * p.heads;
    return {(p.row_items - 1 - row) * QUERY_GROUPS * 64, head, batch, head / p.group};
}

// Query i sees keys up to i + seen_ahead().
DEVICE int seen_ahead(const Params& p, int key_count) { return p.causal_offset + (FROM_END ? key_count - p.query_count : 0); }

struct Tiles {                                     // tiles of keys: from first to last - 1
    int first, last;
};

// The tiles of all keys that any of the ``count`` queries from ``query`` on sees; of these the block's own, where blocks share them.
DEVICE Tiles seen_tiles(const Params& p, int query, int count, int key_count) {
    const int ahead = seen_ahead(p, key_count);
    const int end = CAUSAL ? max(0, min(key_count, query + count + ahead)) : key_count;
    const int last = (end + BLOCK_KEYS - 1) / BLOCK_KEYS;
    const int first = REACH ? min(last, max(0, query + ahead - p.reach) / BLOCK_KEYS) : 0;
    if (SHARERS == 1) return {first, last};
    const int each = (last - first + SHARERS - 1) / SHARERS, own = min(last, first + int(cluster_rank()) * each);
    return {own, min(last, own + each)};
}

// The number of keys of the item's batch entry.
DEVICE int keys_of(const Params& p, const Item& item) {
    return HAS_LENGTHS ? min(p.key_count, max(p.lengths[item.batch], 0)) : p.key_count;
}

// A value that is equal in all lanes, which the compiler cannot know. It then computes descriptors once per warp.
DEVICE u32 uniform(u32 x) { return __shfl_sync(0xffffffffu, x, 0); }
DEVICE void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Loads the operands of the block's items (of ``item`` alone, unless blocks are persistent). Called by one thread.
DEVICE void load_items(const Params& p, const Room& at, Item item) {
    int stage = 0, parity = 1, loads = 0, place = 0, place_parity = 1;
    for (int index = own_first(); index < own_end(p); index += gridDim.x) {
        if (PERSISTENT) item = item_at(p, index);
        const Tiles tiles = seen_tiles(p, item.first, QUERY_GROUPS * 64, keys_of(p, item));
        auto load_queries = [&] {
            const u32 queries = at.queries + place * QUERY_GROUPS * QUERY_BYTES, query_full = at.query_full + 8 * place;
            if (PERSISTENT) barrier_wait(at.query_empty + 8 * place, place_parity);
            barrier_expect(query_full, QUERY_GROUPS * QUERY_BYTES);
            for (int j = 0; j < QUERY_GROUPS * SUBTILES; j++)
                tma_load_4d(queries + j * QUERY_SUBTILE, &p.queries, query_full, j % SUBTILES * (SPAN / 2), item.first + j / SUBTILES * 64,
                            item.head, item.batch);
        };
        const int count = tiles.last - tiles.first;
#if MASK == TILED_MASK
        const int mask_head = p.mask_head ? item.head : 0, mask_batch = p.mask_batch ? item.batch % p.mask_period : 0;
#endif
        if (!LATE_QUERIES || count == 0) load_queries();
        for (int turn = 0; turn < PASSES * count; turn++, loads++) {
            const int tile = tiles.first + (PASSES == 2 && turn >= count ? turn - count : turn);
            const u32 key_full = at.key_full + 8 * stage, value_full = at.value_full + 8 * stage;
            if (LOADER && loads >= STAGES) barrier_wait(at.key_empty + 8 * stage, parity);
            barrier_expect(key_full, KEY_BYTES);
            for (int j = 0; j < SUBTILES; j++)
                tma_load_4d(at.keys + stage * KEY_BYTES + j * KEY_SUBTILE, &p.keys, key_full, j * (SPAN / 2), tile * BLOCK_KEYS,
                            item.key_head, item.batch);
            if (LOADER && loads >= STAGES) barrier_wait(at.value_empty + 8 * stage, parity);
            if (PASSES == 2 && turn < count) {     // the first pass needs keys alone
                barrier_arrive(value_full);
            } else {
                barrier_expect(value_full, KEY_BYTES + QUERY_GROUPS * MASK_BYTES);
#if MASK == TILED_MASK
                u32 to = at.masks + stage * QUERY_GROUPS * MASK_BYTES;
                #pragma unroll 1
                for (int i = 0; i < QUERY_GROUPS; i++)
                    #pragma unroll 1
                    for (int j = 0; j < MASK_SUBTILES; j++, to += MASK_SUBTILE)
                        tma_load_4d(to, &p.masks, value_full, tile * BLOCK_KEYS + j * (MASK_SPAN / 2), item.first + i * 64, mask_head, mask_batch);
#endif
                for (int j = 0; j < SUBTILES; j++)
                    tma_load_4d(at.values + stage * KEY_BYTES + j * KEY_SUBTILE, &p.values, value_full, j * (SPAN / 2), tile * BLOCK_KEYS,
                                item.key_head, item.batch);
            }
            if (++stage == STAGES) stage = 0, parity ^= 1;
            if (LATE_QUERIES && turn + 1 == min(STAGES, PASSES * count)) load_queries();       // after the loads that need not wait for them
        }
        if (++place == QUERY_PLACES) place = 0, place_parity ^= 1;
    }
}

// Position of a multiplying warpgroup in the ring of keys and values, and in the query buffers.
struct Turn {
    int stage, parity = 0, place = 0, place_parity = 0;

    explicit __device__ __forceinline__ Turn(int group) : stage(SPLIT ? group : 0) {}
    __device__ __forceinline__ void next_stage() {
        stage += TILE_STEP;
        if (stage >= STAGES) stage -= STAGES, parity ^= 1;
    }
};

// A fence for the compiler: writers of these values stay before it, readers after it.
template <int N> DEVICE void settle(float (&sums)[N]) {
    #pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(sums[i]) :: "memory");
}

// The sum of ``x`` over the four lanes that share a row.
DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

#include "attention_softmax.cuh"
#include "attention_merge.cuh"

// The work of the multiplying warps on one item.
DEVICE void attend(const Params& p, const Room& at, const Item& item, Turn& turn, bool first, int warp, int lane) {
    const int group = warp / 4, quarter = warp % 4, query_group = SPLIT ? 0 : group;
    const int row = item.first + query_group * 64 + quarter * 16 + lane / 4;  // this thread's queries: row and row + 8
    const int key_count = keys_of(p, item);
    const Tiles tiles = seen_tiles(p, item.first, QUERY_GROUPS * 64, key_count);
    Tiles own = seen_tiles(p, item.first + query_group * 64, 64, key_count);  // of this warpgroup; with SPLIT, every WARPGROUPS-th
    if (SPLIT) own.first += group;
    if (item.first + query_group * 64 >= p.query_count || own.first >= own.last) own = {tiles.first, tiles.first};
    // Releases the query buffer of the previous item, once the store of its result has been read from shared memory.
    auto leave_place = [&] {
        if (QUERY_PLACES == 2 && !first && quarter == 0 && elect_one()) {
            tma_store_wait_read<0>();
            barrier_arrive(at.query_empty + 8 * (turn.place ^ 1));
        }
    };
    Bias bias(p, item, row, lane);
#if SINKS
    const float sink = LOG2_E * unpack1(p.sinks[item.head]);
#endif
    const u32 own_queries = at.queries + (turn.place * QUERY_GROUPS + query_group) * QUERY_BYTES;
    float out[HEAD / 2], s[BLOCK_KEYS / 2], sum[2] = {0.0f, 0.0f}, rescale[2];
    float maximum[2] = {NOTHING, NOTHING};
    u32 pairs[MASK_PAIRS], weights[BLOCK_KEYS / 4];                   // wgmma's register operand: rows row, row + 8 of keys 0-7, then of keys 8-15
    #pragma unroll
    for (int i = 0; i < HEAD / 2; i++) out[i] = 0.0f;
    int behind = 0, behind_parity = 0;             // the stage whose values are multiplied next
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
    auto take_mask = [&](int tile) {
        if (MASK == TILED_MASK) {
            barrier_wait(at.value_full + 8 * turn.stage, turn.parity);
            bias.tile = at.masks + (turn.stage * QUERY_GROUPS + query_group) * MASK_BYTES + quarter * 16 * MASK_SPAN;
        } else {
            load_mask(p, bias, tile, lane, pairs);
        }
    };
    auto multiply_values = [&] {
        barrier_wait(at.value_full + 8 * behind, behind_parity);
        wgmma_fence();
        const u64 b = value_descriptor<KEY_SUBTILE>(at.values + uniform(behind) * KEY_BYTES);
        #pragma unroll
        for (int k = 0; k < BLOCK_KEYS / 16; k++)
            wgmma_values(out, weights[4 * k], weights[4 * k + 1], weights[4 * k + 2], weights[4 * k + 3], later(b, k * SPAN));
        wgmma_commit();
    };
    auto keys_done = [&] {                         // releases the stage of the keys
        if (LOADER && lane == 0) barrier_arrive(at.key_empty + 8 * turn.stage);
        behind = turn.stage, behind_parity = turn.parity;
        turn.next_stage();
    };
    auto pass_turn = [&] {
        if (TURNS) named_barrier_arrive(TURN_BARRIER + (group + 1) % WARPGROUPS, 256);
    };
    auto pass_tiles = [&](int from, int to) {      // skips tiles of other warpgroups
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
    auto pack_weights = [&](int from, int to) {    // from, to: groups of eight keys
        #pragma unroll
        for (int i = 2 * from; i < 2 * to; i++) weights[i] = pack2(s[2 * i], s[2 * i + 1]);
    };
    barrier_wait(at.query_full + 8 * turn.place, turn.place_parity);
    if (REACH && !SPLIT) pass_tiles(tiles.first, own.first);
#if ROUNDED
    if (own.first < own.last) {
        const Turn begin = turn;
        #pragma unroll 1
        for (int tile = own.first; tile < own.last; tile++) {
            multiply_keys();
            take_mask(tile);
            wgmma_wait<0>();
            settle(s);
#if ROUNDED == 2
            weigh_on_grid(p, tile, key_count, lane, s);
            #pragma unroll
            for (int i = 0; i < BLOCK_KEYS / 2; i++) sum[i / 2 % 2] += s[i];
#else
            const bool grown[2] = {true, true};
            soften(p, bias, pairs, row, tile, key_count, lane, grown, s, maximum, sum, rescale);
#endif
            if (ONE_TILE) break;
            if (LOADER && lane == 0) barrier_arrive(at.value_empty + 8 * turn.stage);
            keys_done();
        }
        leave_place();
        __syncwarp();
        if (!LOADER) turn = begin;
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            sum[i] = quad_sum(sum[i]);
            sum[i] = sum[i] == 0.0f ? 0.0f : __fdividef(p.weight_steps, sum[i]);
        }
        auto weigh_again = [&](int tile) {
#if ROUNDED == 2
            weigh_on_grid(p, tile, key_count, lane, s);
#else
            float offset[2];
            prepare(p, bias, pairs, row, tile, key_count, lane, maximum, s, offset);
            weigh<0, EIGHTS>(0, factor_of(p), offset[0], s), weigh<0, EIGHTS>(1, factor_of(p), offset[1], s);
#endif
        };
        if (!ONE_TILE) {
            multiply_keys();
            take_mask(own.first);
            wgmma_wait<0>();
            settle(s);
            weigh_again(own.first);
        }
        round_weights(p, sum, s);
        keys_done();
        pack_weights(0, EIGHTS);
        #pragma unroll 1
        for (int tile = own.first + 1; !ONE_TILE && tile < own.last; tile++) {
            const int stage = behind;
            multiply_keys();
            multiply_values();
            take_mask(tile);
            wgmma_wait<1>();
            settle(s);
            weigh_again(tile);
            round_weights(p, sum, s);
            settle(s);
            if (sum[0] < 0.0f) __nanosleep(1);     // as below
            wgmma_wait<0>();
            settle(out);
            if (LOADER && lane == 0) barrier_arrive(at.value_empty + 8 * stage);
            keys_done();
            pack_weights(0, EIGHTS);
        }
        multiply_values();
        wgmma_wait<0>();
        settle(out);
        if (LOADER && lane == 0) barrier_arrive(at.value_empty + 8 * behind);
    } else {
        leave_place();
        if (PASSES == 2) pass_tiles(tiles.first, tiles.last);
    }
#else
    if (own.first < own.last) {
        bool grown[2] = {true, true};
        multiply_keys();
        pass_turn();
        take_mask(own.first);
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
            take_mask(tile);
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
            // ptxas moves a wait to the start of its basic block, before the softmax. A branch that is never taken ends the block.
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
                    issue_keys();                  // again: the scores were overwritten
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
#endif
    if (!SPLIT) pass_tiles(own.last, tiles.last);

#if ROUNDED
    sum[0] = sum[1] = p.weight_step;
#else
    #pragma unroll
    for (int i = 0; i < 2; i++) sum[i] = quad_sum(sum[i]);
    if (SPLIT && !merge(at.merged, group, factor_of(p), out, sum, maximum)) return;
#if SHARERS > 1
    if (!merge_blocks(at, quarter, lane, factor_of(p), out, sum, maximum)) return;
#endif
    #pragma unroll
    for (int i = 0; i < 2; i++) {
#if SINKS
        if (sum[i] != 0.0f) sum[i] += exp2_fast(sink - shift_of(maximum[i], factor_of(p)));
#endif
        sum[i] = sum[i] == 0.0f ? 0.0f : __fdividef(1.0f, sum[i]);     // no key at all: zeros, as in ONNX's Attention
    }
#endif
    named_barrier(1 + group, 128);                 // the queries have been read: the result takes their buffer
#if NARROW
    const u32 own_row = own_queries + (quarter * 16 + lane / 4) * HEAD + lane % 4 * 2;
    #pragma unroll
    for (int j = 0; j < HEAD / 8; j++) {       // rounded to 16 bits first, so the result equals a quantized 16-bit result
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
    if (LATE_QUERIES) {
        if (quarter == 0 && elect_one()) {
            tma_store_wait_read<0>();
            barrier_arrive(at.query_empty);
        }
        __syncwarp();
    }
    if (++turn.place == QUERY_PLACES) turn.place = 0, turn.place_parity ^= 1;
}

// This thread's number, read once more: with wide heads, ptxas would spill it beside the loading warps, which have few registers.
DEVICE u32 thread_again() {
    if (HEAD <= 128) return threadIdx.x;
    u32 thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_sm90(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 shared[];
    const u32 base = smem_address(shared);
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
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
        if (SHARERS > 1) barrier_init(at.others_full, 1);
        barrier_init_fence();
        async_proxy_fence();
        if (SHARERS > 1) barrier_expect(at.others_full, (SHARERS - 1) * OTHERS_BYTES);
    }
    if (threadIdx.x == (LOADER ? WARPGROUPS * 128 : 32)) {
        tma_prefetch(&p.queries);
        tma_prefetch(&p.keys);
        tma_prefetch(&p.values);
        tma_prefetch(&p.output);
    }
    const bool loads = warp == (LOADER ? WARPGROUPS * 4 : 0);
    Item first;
    if (loads && !PERSISTENT) first = item_at(p, own_first());         // before the wait: it takes a division
    __syncthreads();
    grid_launch_dependents();
    grid_dependency_wait();

    if (PERSISTENT && warp >= WARPGROUPS * 4) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOADING_REGISTERS));
    if (loads && elect_one()) load_items(p, at, first);
    if (LOADER && (HEAD > 128 ? thread_again() >= WARPGROUPS * 128 : warp >= WARPGROUPS * 4)) return;
    __syncwarp();
    if (PERSISTENT) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
    const u32 thread = thread_again();
    const int own_warp = HEAD > 128 ? uniform(thread / 32) : warp;
    if (TURNS && own_warp >= WARPGROUPS * 4 - 4) named_barrier_arrive(TURN_BARRIER, 256);
    Turn turn(own_warp / 4);
    for (int index = own_first(); index < own_end(p); index += gridDim.x)
        attend(p, at, item_at(p, index), turn, index == own_first(), own_warp, thread % 32);
    if (TURNS && own_warp < 4) named_barrier(TURN_BARRIER, 256);
    if (own_warp % 4 == 0 && elect_one()) tma_store_wait_read<0>();
}
