// Fused attention for any tensor-core GPU from sm_80 on: out = softmax(scale * q k^T + mask) v per batch and head, mma.sync fed by a
// cp.async ring, 16-bit operands. It computes the same as attention_sm90.cu, in the same order of keys.
//
// A block takes WARPS / SPLIT sets of TILES x 16 queries of one head, which stay in shared memory (KEEP: in registers). Tiles of BLOCK_KEYS
// keys and their values alternate in a ring of SLOTS. Each warp multiplies its queries with a tile of keys, keeps the scores in registers,
// turns them into exp2(score - running maximum), and multiplies these with the values. The packed accumulators of two products of eight
// keys are mma.sync's operand for sixteen of K (the online softmax of FlashAttention; statistics and accumulators are fp32). Operands are
// strided views [batch][position][head][feature], so q, k and v may be slices of the output of one joint projection.
//
// The results of wide heads exceed the registers of a warp. SPLIT warps then share a set of queries. For the scores, each warp takes a part
// of a tile's keys. When all have written their exponentials to shared memory, each takes a part of the features for the results.
//
// A head of HEAD features (a multiple of 16 x SPLIT, padded with zeros) is a row of 16-byte chunks in shared memory. With the swizzle, the
// eight rows of an ldmatrix touch all banks. A warp stages its results in place of its own queries, and stores them as whole chunks.
//
// generated.cuh defines WARPS, SPLIT, TILES, BLOCK_KEYS, SLOTS, HEAD, KEEP, MIN_BLOCKS, CAUSAL, WINDOW (queries see only a limited number of
// keys before their position), FROM_END (positions of queries count from the end of the keys), HAS_LENGTHS, SOFTCAP, MASK (0 none; else
// elements per load: 1 or 2), NARROW (1: the result is stored as 8-bit integers, 2: as fp8), multiply(), and SINKS where each head's
// softmax has one more logit, which no value belongs to.
#include "ptx.cuh"
#include "mma.cuh"
#include "generated.cuh"
#include "attention_mma.cuh"
#include "narrow.cuh"

constexpr int THREADS = WARPS * 32, ROWS = TILES * 16, QUERIES = WARPS / SPLIT * ROWS;
constexpr int OWN_KEYS = BLOCK_KEYS / SPLIT, COLUMNS = HEAD / SPLIT;           // of a warp: keys of its scores, features of its results
static_assert(WARPS % SPLIT == 0 && OWN_KEYS % 16 == 0 && COLUMNS % 16 == 0 && (SPLIT == 1 || !KEEP), "whole fragments for each warp");
constexpr int CHUNKS = HEAD / 8, ROW_BYTES = HEAD * 2;
constexpr int SWIZZLE = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2;         // chunks that the swizzle permutes
constexpr u32 SLOT_BYTES = BLOCK_KEYS * ROW_BYTES;
constexpr int WEIGHT_CHUNKS = BLOCK_KEYS / 8, WEIGHT_ROW_BYTES = BLOCK_KEYS * 2;
constexpr int WEIGHT_SWIZZLE = WEIGHT_CHUNKS % 8 == 0 ? 8 : WEIGHT_CHUNKS % 4 == 0 ? 4 : 2;

struct Params : Operands<u16, u8> {
    float scale_log2;                              // the scale times log2(e)
    float cap_in, cap_out;                         // of a softcap: 2 log2(e) scale / cap, and cap log2(e)
    Narrow narrow;
#if SINKS
    const u16* sinks;                              // of each head
#endif
};

// The XOR mask of a row's chunks: a row of CHUNKS begins at bank group row * CHUNKS % 8.
DEVICE int swizzle_of(int row) { return row / (8 / SWIZZLE) % SWIZZLE; }
DEVICE int weight_swizzle(int row) { return row / (8 / WEIGHT_SWIZZLE) % WEIGHT_SWIZZLE; }

// Loads COUNT rows of a head from ``first`` on; zeros from row ``end`` on, and beyond the features. A thread copies the chunks at one place
// of the swizzle, from every STEP-th row.
template <int COUNT> DEVICE void load_rows(u32 target, const u16* source, int position, int features, int first, int end) {
    constexpr int STEP = THREADS / SWIZZLE;
    const int column = threadIdx.x % SWIZZLE, row = threadIdx.x / SWIZZLE;
    const u16* from = source + (long long)(first + row) * position + column * 8;
    #pragma unroll
    for (int i = 0; i < (COUNT + STEP - 1) / STEP; i++, from += STEP * position) {
        if (COUNT % STEP != 0 && i * STEP + row >= COUNT) break;
        const bool inside = first + i * STEP + row < end;
        const u32 to = target + (i * STEP + row) * ROW_BYTES + ((column ^ swizzle_of(STEP % 8 ? i * STEP + row : row)) << 4);
        #pragma unroll
        for (int j = 0; j < CHUNKS; j += SWIZZLE) {
            const bool live = inside && (j + column) * 8 < features;
            copy_16_or_zeros(to + j * 16, live ? from + j * 8 : source, live ? 16 : 0);
        }
    }
}

// Maximum of ``most`` and a row's scores, over four lanes; i: index of the lane's two rows.
template <int N> DEVICE float row_maximum(const float (&s)[N][4], int i, float most) {
    #pragma unroll
    for (int j = 0; j < N; j++) most = fmaxf(most, fmaxf(s[j][2 * i], s[j][2 * i + 1]));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    return fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_sm80(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 base = smem_address(shared), ring = base + QUERIES * ROW_BYTES;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int set = warp / SPLIT, part = warp % SPLIT;                          // part: index among the parts of the keys, and of the features
    // The warps of a set exchange weights [set][row][key] and row statistics [set][part][row] here.
    const u32 weights = ring + SLOTS * SLOT_BYTES + set * ROWS * WEIGHT_ROW_BYTES;
    float* numbers = reinterpret_cast<float*>(shared + QUERIES * ROW_BYTES + SLOTS * SLOT_BYTES + QUERIES * WEIGHT_ROW_BYTES) +
                     set * SPLIT * ROWS;
    // With causal order the last queries see the most keys: they begin first.
    const int first = int(CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x) * QUERIES, own = first + set * ROWS;
    const int head = blockIdx.y, batch = blockIdx.z;
    const float factor = MASK || SOFTCAP ? 1.0f : p.scale_log2, mask_factor = SOFTCAP ? 1.0f : p.scale_log2;
    grid_launch_dependents();
    grid_dependency_wait();

    const Seen seen(p, batch, first, QUERIES, own, ROWS);
    const int key_count = seen.key_count, own_last = seen.own_last, offset = seen.offset, begin = seen.begin, tiles = seen.tiles;

    const u16* keys = p.keys + batch * p.of_keys.batch + head / p.group * p.of_keys.head;
    const u16* values = p.values + batch * p.of_values.batch + head / p.group * p.of_values.head;
    // Load 2 t is tile begin + t of the keys; load 2 t + 1 is that tile of the values.
    auto load_part = [&](int load, int slot) {
        const u16* source = load % 2 ? values : keys;
        const int position = load % 2 ? p.of_values.position : p.of_keys.position;
        const int features = load % 2 ? p.value_features : p.features;
        load_rows<BLOCK_KEYS>(ring + slot * SLOT_BYTES, source, position, features, (begin + load / 2) * BLOCK_KEYS, key_count);
    };
    if (tiles > 0)
        load_rows<QUERIES>(base, p.queries + batch * p.of_queries.batch + head * p.of_queries.head, p.of_queries.position, p.features,
                           first, p.query_count);
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
        const u32 found = ring + slot * SLOT_BYTES;
        slot = slot + 1 == SLOTS ? 0 : slot + 1;
        return found;
    };

    // Row addresses of a lane for ldmatrix. Queries and values: rows 0-15 at both chunks of a pair. Keys: rows 0-7 at both chunks, then rows
    // 8-15.
    const u32 own_queries = base + set * ROWS * ROW_BYTES, lane_swizzle = swizzle_of(lane % 8);
    const u32 down = lane % 16 * ROW_BYTES, down_chunk = (lane / 16 ^ lane_swizzle) << 4;
    const u32 across = (lane % 8 + lane / 16 * 8) * ROW_BYTES, across_chunk = (lane / 8 % 2 ^ lane_swizzle) << 4;
    const u32 own_keys = part * OWN_KEYS * ROW_BYTES, own_columns = part * COLUMNS * 2;
    u32 kept[KEEP ? HEAD / 16 : 1][TILES][4];

#if SINKS
    const float sink = LOG2_E * unpack1(p.sinks[head]);
#endif
    const u16* mask[TILES][2];
    float out[TILES][COLUMNS / 8][4], maximum[TILES][2], sum[TILES][2];
    #pragma unroll
    for (int m = 0; m < TILES; m++) {
        #pragma unroll
        for (int i = 0; i < 2; i++) {              // this thread's queries: own + 16 m + lane / 4, and 8 further
            maximum[m][i] = -infinity(), sum[m][i] = 0.0f;
            mask[m][i] = MASK ? p.mask + batch % p.mask_period * p.mask_batch + head * p.mask_head +
                                    min(own + m * 16 + lane / 4 + 8 * i, p.query_count - 1) * p.mask_query
                              : nullptr;
        }
        #pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++)
            #pragma unroll
            for (int i = 0; i < 4; i++) out[m][n][i] = 0.0f;
    }

    for (int turn = 0; turn < tiles; turn++) {
        const int tile = begin + turn;
        const bool sees = tile * BLOCK_KEYS < own_last;
        const u32 key_tile = next_part(2 * turn) + own_keys;
        float s[TILES][OWN_KEYS / 8][4];           // s[m][j][i]: query row 16 m + 8 (i / 2), key column + 8 j + i % 2
        if (sees) {
            #pragma unroll
            for (int m = 0; m < TILES; m++)
                #pragma unroll
                for (int j = 0; j < OWN_KEYS / 8; j++)
                    #pragma unroll
                    for (int i = 0; i < 4; i++) s[m][j][i] = 0.0f;
            #pragma unroll
            for (int k = 0; k < HEAD / 16; k++) {
                u32 a[TILES][4];
                #pragma unroll
                for (int m = 0; m < TILES; m++) {
                    u32 (&q)[4] = KEEP ? kept[k * KEEP][m] : a[m];
                    if (!KEEP || turn == 0)
                        ldmatrix_x4(own_queries + m * 16 * ROW_BYTES + down + ((k * 32) ^ down_chunk), q[0], q[1], q[2], q[3]);
                }
                #pragma unroll
                for (int j = 0; j < OWN_KEYS / 8; j += 2) {
                    u32 b[4];
                    ldmatrix_x4(key_tile + j * 8 * ROW_BYTES + across + ((k * 32) ^ across_chunk), b[0], b[1], b[2], b[3]);
                    #pragma unroll
                    for (int m = 0; m < TILES; m++) {
                        multiply(s[m][j], KEEP ? kept[k * KEEP][m] : a[m], b[0], b[1]);
                        multiply(s[m][j + 1], KEEP ? kept[k * KEEP][m] : a[m], b[2], b[3]);
                    }
                }
            }
            const int column = tile * BLOCK_KEYS + part * OWN_KEYS + lane % 4 * 2;
            #pragma unroll
            for (int m = 0; m < TILES; m++) {
                const int row = own + m * 16 + lane / 4;
                if (SOFTCAP) {                     // cap tanh(x / cap), by an exponential
                    #pragma unroll
                    for (int j = 0; j < OWN_KEYS / 8; j++)
                        #pragma unroll
                        for (int i = 0; i < 4; i++)
                            s[m][j][i] = fmaf(__fdividef(-2.0f, 1.0f + exp2_fast(s[m][j][i] * p.cap_in)), p.cap_out, p.cap_out);
                }
                if (MASK) {
                    #pragma unroll
                    for (int j = 0; j < OWN_KEYS / 8; j++) {
                        #pragma unroll
                        for (int i = 0; i < 2; i++) {
                            const int at = column + 8 * j;
                            float low = 0.0f, high = 0.0f;
                            if (MASK == 2) {
                                if (at < p.key_count) {
                                    const u32 pair = *reinterpret_cast<const u32*>(mask[m][i] + at);
                                    low = low_float(pair), high = high_float(pair);
                                }
                            } else {
                                if (at < p.key_count) low = unpack1(mask[m][i][at]);
                                if (at + 1 < p.key_count) high = unpack1(mask[m][i][at + 1]);
                            }
                            s[m][j][2 * i] = fmaf(s[m][j][2 * i], mask_factor, low * LOG2_E);
                            s[m][j][2 * i + 1] = fmaf(s[m][j][2 * i + 1], mask_factor, high * LOG2_E);
                        }
                    }
                }
                const bool cut = (tile + 1) * BLOCK_KEYS > key_count ||
                                 (CAUSAL && (tile + 1) * BLOCK_KEYS > own + m * 16 + offset + 1) ||
                                 (WINDOW && tile * BLOCK_KEYS < own + m * 16 + 15 + offset - p.reach);
                if (cut) {
                    #pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const int limit = (CAUSAL ? min(key_count, row + 8 * i + offset + 1) : key_count) - column;
                        const int least = WINDOW ? row + 8 * i + offset - p.reach - column : -(1 << 30);
                        #pragma unroll
                        for (int j = 0; j < OWN_KEYS / 8; j++) {
                            if (8 * j >= limit || 8 * j < least) s[m][j][2 * i] = -infinity();
                            if (8 * j + 1 >= limit || 8 * j + 1 < least) s[m][j][2 * i + 1] = -infinity();
                        }
                    }
                }
                if (SPLIT > 1) {                   // the maximum over this warp's keys
                    #pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const float most = row_maximum(s[m], i, -infinity());
                        if (lane % 4 == 0) numbers[part * ROWS + m * 16 + 8 * i + lane / 4] = most;
                    }
                }
            }
        }
        if (SPLIT > 1) __syncthreads();
        if (sees) {
            #pragma unroll
            for (int m = 0; m < TILES; m++) {
                #pragma unroll
                for (int i = 0; i < 2; i++) {
                    float most = maximum[m][i];
                    if (SPLIT > 1) {
                        #pragma unroll
                        for (int k = 0; k < SPLIT; k++) most = fmaxf(most, numbers[k * ROWS + m * 16 + 8 * i + lane / 4]);
                    } else {
                        most = row_maximum(s[m], i, most);
                    }
                    // While a row has seen only -inf, its accumulators stay zero; they are zero at the end if nothing else follows.
                    const float shift = most == -infinity() ? 0.0f : most * factor;
                    const float rescale = exp2_fast(maximum[m][i] * factor - shift);
                    maximum[m][i] = most;
                    float total = 0.0f;
                    #pragma unroll
                    for (int j = 0; j < OWN_KEYS / 8; j++) {
                        s[m][j][2 * i] = exp2_fast(fmaf(s[m][j][2 * i], factor, -shift));
                        s[m][j][2 * i + 1] = exp2_fast(fmaf(s[m][j][2 * i + 1], factor, -shift));
                        total += s[m][j][2 * i] + s[m][j][2 * i + 1];
                    }
                    sum[m][i] = fmaf(sum[m][i], rescale, total);
                    if (turn > 0) {
                        #pragma unroll
                        for (int n = 0; n < COLUMNS / 8; n++) {
                            out[m][n][2 * i] *= rescale;
                            out[m][n][2 * i + 1] *= rescale;
                        }
                    }
                    if (SPLIT > 1) {               // for the other warps of the set
                        const int row = m * 16 + 8 * i + lane / 4;
                        #pragma unroll
                        for (int j = 0; j < OWN_KEYS / 8; j++)
                            *reinterpret_cast<u32*>(shared + (weights - base) + row * WEIGHT_ROW_BYTES +
                                                    ((part * (OWN_KEYS / 8) + j) ^ weight_swizzle(row)) * 16 + lane % 4 * 4) =
                                pack2(s[m][j][2 * i], s[m][j][2 * i + 1]);
                    }
                }
            }
        }
        const u32 value_tile = next_part(2 * turn + 1);
        if (!sees) continue;
        #pragma unroll
        for (int k = 0; k < BLOCK_KEYS / 16; k++) {
            u32 a[TILES][4];                       // rows 0-7 and 8-15 of keys 0-7, then of keys 8-15
            #pragma unroll
            for (int m = 0; m < TILES; m++) {
                if constexpr (SPLIT > 1) {
                    const u32 row = weights + (m * 16 + lane % 16) * WEIGHT_ROW_BYTES;
                    ldmatrix_x4(row + ((k * 32) ^ ((lane / 16 ^ weight_swizzle(lane % 8)) << 4)), a[m][0], a[m][1], a[m][2], a[m][3]);
                    continue;
                }
                #pragma unroll
                for (int i = 0; i < 4; i++) a[m][i] = pack2(s[m][2 * k + i / 2][i % 2 * 2], s[m][2 * k + i / 2][i % 2 * 2 + 1]);
            }
            #pragma unroll
            for (int n = 0; n < COLUMNS / 8; n += 2) {
                u32 b[4];
                const u32 column = COLUMNS % 64 == 0 ? own_columns + ((n * 16) ^ down_chunk) : (own_columns + n * 16) ^ down_chunk;
                ldmatrix_x4_trans(value_tile + k * 16 * ROW_BYTES + down + column, b[0], b[1], b[2], b[3]);
                #pragma unroll
                for (int m = 0; m < TILES; m++) {
                    multiply(out[m][n], a[m], b[0], b[1]);
                    multiply(out[m][n + 1], a[m], b[2], b[3]);
                }
            }
        }
    }

    // No other set reads these queries, and the warps of this set have read them all: the result takes their place.
    __syncwarp();
    u8* place = shared + set * ROWS * ROW_BYTES;
    if (SPLIT > 1) {                               // sums over a warp's keys -> over all keys
        __syncthreads();                           // nobody reads the maxima any more
        #pragma unroll
        for (int m = 0; m < TILES; m++) {
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                sum[m][i] += __shfl_xor_sync(0xffffffffu, sum[m][i], 1);
                sum[m][i] += __shfl_xor_sync(0xffffffffu, sum[m][i], 2);
                if (lane % 4 == 0) numbers[part * ROWS + m * 16 + 8 * i + lane / 4] = sum[m][i];
            }
        }
        __syncthreads();
    }
    #pragma unroll
    for (int m = 0; m < TILES; m++) {
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            float whole = SPLIT > 1 ? 0.0f : sum[m][i];
            if (SPLIT > 1) {
                #pragma unroll
                for (int k = 0; k < SPLIT; k++) whole += numbers[k * ROWS + m * 16 + 8 * i + lane / 4];
            } else {
                whole += __shfl_xor_sync(0xffffffffu, whole, 1);
                whole += __shfl_xor_sync(0xffffffffu, whole, 2);
            }
#if SINKS
            if (whole != 0.0f) whole += exp2_fast(fmaf(-maximum[m][i], factor, sink));
#endif
            whole = whole == 0.0f ? 0.0f : __fdividef(1.0f, whole);    // no key at all: zeros, as in ONNX's Attention
            const int row = m * 16 + 8 * i + lane / 4;
            #pragma unroll
            for (int n = 0; n < COLUMNS / 8; n++)
                *reinterpret_cast<u32*>(place + row * ROW_BYTES + (((part * (COLUMNS / 8) + n) ^ swizzle_of(row)) << 4) + lane % 4 * 4) =
                    pack2(out[m][n][2 * i] * whole, out[m][n][2 * i + 1] * whole);
        }
    }
    __syncwarp();
    const long long origin = batch * p.of_output.batch + head * p.of_output.head;
    #pragma unroll
    for (int i = 0; i < ROWS * (COLUMNS / 8) / 32; i++) {
        const int at = i * 32 + lane, row = at / (COLUMNS / 8), chunk = part * (COLUMNS / 8) + at % (COLUMNS / 8);
        if (own + row >= p.query_count || chunk * 8 >= p.value_features) continue;
        const uint4 v = *reinterpret_cast<const uint4*>(place + row * ROW_BYTES + ((chunk ^ swizzle_of(row)) << 4));
        const long long target = origin + (long long)(own + row) * p.of_output.position + chunk * 8;
#if NARROW                                         // from values rounded to 16 bits, so the result equals a quantized 16-bit result
        const uint2 words = {
            narrow_four<NARROW == 2>(p.narrow, low_float(v.x), high_float(v.x), low_float(v.y), high_float(v.y)),
            narrow_four<NARROW == 2>(p.narrow, low_float(v.z), high_float(v.z), low_float(v.w), high_float(v.w))};
        *reinterpret_cast<uint2*>(p.output + target) = words;
#else
        *reinterpret_cast<uint4*>(p.output + 2 * target) = v;
#endif
    }
}
