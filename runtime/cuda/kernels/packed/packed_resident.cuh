// packed_resident.cu: its parameters and sizes, and the data that a block loads while it multiplies: the weights, through a ring per warp,
// and the rows.
#pragma once

struct Params {
    const u16* x;                                  // [rows][x_pitch], rows aligned to 16 bytes
    PackedWeights weights;
    const float* bias;
    const u16* residual;                           // shaped as the output
    u16* output;                                   // [rows][out_pitch], aligned to 8 bytes
    PackedWeights beside;                          // the second matrix, and its bias
    const float* beside_bias;
    float4* partial;                               // SPLIT > 1: partial sums of blocks, and the number of blocks that have arrived
    u32* arrived;
    int rows, columns, k, x_pitch, out_pitch, parts;                   // parts: of the columns
};

constexpr int MATRICES = 1 + PAIRED, EACH = TILES / MATRICES;          // tiles of results per group
constexpr int WARPS = TEAMS * SHARERS, THREADS = WARPS * 32, TEAM_THREADS = SHARERS * 32, ROWS = 16;
constexpr int PITCH = CHUNKS * CHUNK_K * 2 + 16;   // bytes of a row: the eight rows of an ldmatrix are on different banks
constexpr int FOURS = EACH * 4, SUM_PITCH = TILES * 16 + 4;            // fours of results in a row of a group; floats of its accumulators
constexpr int PIECE = (CHUNKS + WARPS - 1) / WARPS;                    // chunks of K whose rows a warp loads
constexpr int ROWS_AT = (1 + WARPS * (2 + DEPTH) + 15) / 16 * 128;         // after the barriers
constexpr int SCALE_SET = 16 * GROUPS * SCALE_BYTES, ZERO_SET = 16 * GROUPS * ZERO_BYTES;  // bytes
constexpr int TILE_BYTES = CHUNK_BYTES + SCALE_SET + ZERO_SET, SLOT_BYTES = TILES * TILE_BYTES, RING_BYTES = DEPTH * SLOT_BYTES;
constexpr int SUM_BYTES = ROWS * SUM_PITCH * 4;
constexpr bool ALIASED = GROUPS_HERE <= TEAMS;     // accumulators take the place of the ring when its last load is consumed
constexpr int OWN_SUMS_AT = ALIASED ? 0 : RING_BYTES, WARP_BYTES = ALIASED ? (RING_BYTES > SUM_BYTES ? RING_BYTES : SUM_BYTES) : RING_BYTES + SUM_BYTES;
constexpr int ROW_SUMS_AT = ROWS * PITCH, WARPS_AT = (ROW_SUMS_AT + CHUNKS * ROWS * 8 + 127) / 128 * 128;  // relative to the beginning of the rows
constexpr int SENT_AT = WARPS_AT + WARPS * WARP_BYTES, SENT = 64 / SPLIT;   // fours of a warp's tile that a cluster's block receives
constexpr int PARTIAL_FOURS = GROUPS_HERE * ROWS * FOURS * MATRICES;   // per block
#if defined(DTYPE_BF16)
constexpr bool RAW = GROUPS == 1 && !FLOAT_CODES && BITS < 8;
constexpr float NUMBER = 1.0f, OFFSET = 128.0f;    // the inverse unit of an operand, and the constant added to each number
#else
constexpr bool RAW = GROUPS == 1 && !FLOAT_CODES;
constexpr float NUMBER = 16777216.0f, OFFSET = 0.0f;
#endif
constexpr float START = (ZEROS ? 1.0f : -(float(1 << (BITS - 1)) + OFFSET)) / NUMBER;  // factor of the sums of rows

static_assert(TILES % MATRICES == 0, "tiles of two matrices come in pairs");
static_assert(!CLUSTERED || ALIASED, "the blocks of a cluster add their sums once");

// The work of a block: its tiles of results, in groups, and its chunks of K.
struct Part {
    int first, tiles, groups, begin, count;
    __device__ __forceinline__ explicit Part(const Params& p) {
        const int all = (p.columns + 15) / 16, part = blockIdx.x % SPLIT, block = blockIdx.x / SPLIT;
        first = all * block / p.parts, tiles = all * (block + 1) / p.parts - first, groups = (tiles + EACH - 1) / EACH;
        begin = p.weights.chunks * part / SPLIT, count = p.weights.chunks * (part + 1) / SPLIT - begin;
    }
};

// The chunks of a warp, group by group, as they pass through its ring.
struct Ring {
    const Params& p;
    const Part& part;
    const u32 at, full;                            // shared addresses of the slots and of their barriers
    const int sharer;
    int group, chunk;                              // the next request
    int slot;
    u32 parity;
    const u8 *tile[TILES], *scale[TILES], *zero[TILES];                // of the group
    __device__ __forceinline__ Ring(const Params& p, const Part& part, u32 at, u32 full, int team, int sharer) : p(p), part(part), at(at), full(full), sharer(sharer), group(team), slot(0), parity(0) {}

    __device__ __forceinline__ void begin_group() {
        chunk = part.begin + sharer;
        #pragma unroll
        for (int n = 0; n < TILES; n++) {
            const PackedWeights& matrix = n % MATRICES ? p.beside : p.weights;
            const u32 index = part.first + min(group * EACH + n / MATRICES, part.tiles - 1), set = index * matrix.sets;
            tile[n] = matrix.tiles + u64(index * matrix.chunks) * CHUNK_BYTES;
            scale[n] = matrix.scales + u64(set) * SCALE_SET;
            if (ZERO_SET > 0) zero[n] = matrix.zeros + u64(set) * ZERO_SET;
        }
    }
    // Requests the first chunks.
    __device__ __forceinline__ void begin(int lane) {
        if (sharer >= part.count) group = part.groups;                 // no chunks
        if (lane == 0) {
            #pragma unroll
            for (int d = 0; d < DEPTH; d++) barrier_init(full + d * 8, 1);
            barrier_init_fence();
            async_proxy_fence();
        }
        __syncwarp();
        begin_group();
        #pragma unroll 1
        for (int d = 0; d < DEPTH; d++) ask();
        parity = 0;
    }
    // Requests a chunk of each tile of a group; called by one lane.
    __device__ __forceinline__ void load() const {
        const u32 barrier = full + slot * 8, to = at + slot * SLOT_BYTES, set = chunk >> SET_SHIFT;
        barrier_expect(barrier, SLOT_BYTES);
        #pragma unroll
        for (int n = 0; n < TILES; n++) {
            const u32 scales_at = to + n * TILE_BYTES + CHUNK_BYTES;
            bulk_load(to + n * TILE_BYTES, tile[n] + u64(u32(chunk)) * CHUNK_BYTES, CHUNK_BYTES, barrier);
            bulk_load(scales_at, scale[n] + u64(set) * SCALE_SET, SCALE_SET, barrier);
            if (ZERO_SET > 0) bulk_load(scales_at + SCALE_SET, zero[n] + u64(set) * ZERO_SET, ZERO_SET, barrier);
        }
    }
    // Requests the next chunk, into the slot that was read last. Called by whole warps.
    __device__ __forceinline__ void ask() {
        if (group < part.groups) {
            if (elect_one()) load();
            chunk += SHARERS;
            if (chunk >= part.begin + part.count) group += TEAMS, begin_group();
        }
        if (++slot == DEPTH) slot = 0, parity ^= 1;
    }
    __device__ __forceinline__ void wait() const { barrier_wait(full + slot * 8, parity); }
};

// Address of a lane's 16 bytes for ldmatrix, for both tiles of eight rows.
DEVICE u32 lane_rows(u32 rows, int chunk, int lane) { return rows + chunk * (CHUNK_K * 2) + (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 16; }

// The sums of a chunk's rows 2 pair and 2 pair + 1 of a tile of eight rows, twice: the initial accumulators of a tile.
DEVICE float4* row_sums(u8* shared, int chunk, int m, int pair) { return reinterpret_cast<float4*>(shared + ROW_SUMS_AT) + (chunk * 2 + m) * 4 + pair; }

// Sums a chunk's rows: their product with ones.
DEVICE void sum_rows(u8* shared, int chunk, int lane) {
    const u32 rows = lane_rows(smem_address(shared), chunk, lane);
    float sums[2][4] = {};
    #pragma unroll
    for (int step = 0; step < STEPS; step++) {
        u32 a[4];                                  // the same matrices as operand A
        ldmatrix_x4(rows + step * 32, a[0], a[2], a[1], a[3]);
        multiply(sums[step % 2], a, ONE2, ONE2);
    }
    if (lane % 4 > 0) return;
    #pragma unroll
    for (int m = 0; m < 2; m++) {
        float* const to = reinterpret_cast<float*>(row_sums(shared, chunk, m, lane / 8)) + lane / 4 % 2;
        to[0] = to[2] = (sums[0][m * 2] + sums[1][m * 2]) * START;
    }
}

// The rows of the block: each warp loads the rows of a piece of K.
struct Rows {
    const Params& p;
    const Part& part;
    u8* const shared;
    const int warp, lane, first, count;            // the warp's chunks; there may be none
    __device__ __forceinline__ Rows(const Params& p, const Part& part, u8* shared, int warp, int lane)
        : p(p), part(part), shared(shared), warp(warp), lane(lane), first(warp * PIECE), count(min(PIECE, part.count - first)) {}

    // Shared addresses of barriers: the warp's rows have landed; a piece is ready.
    __device__ __forceinline__ u32 landed() const { return smem_address(shared) - ROWS_AT + warp * 8; }
    __device__ __forceinline__ u32 ready(int piece) const { return smem_address(shared) - ROWS_AT + (WARPS + piece) * 8; }
    __device__ __forceinline__ void begin() const {
        if (lane == 0) barrier_init(landed(), 1), barrier_init(ready(warp), 1);
    }
    // Requests the warp's rows, with zeros beyond K. The places of missing rows stay uninitialized: they affect no other row.
    __device__ __forceinline__ void ask() const {
        if (count <= 0) return;
        const int k = (part.begin + first) * CHUNK_K, vectors = count * (CHUNK_K / 8), whole = max(0, min(vectors, (p.k - k) / 8));
        const u32 to = smem_address(shared) + first * (CHUNK_K * 2);
        if (elect_one()) {
            barrier_expect(landed(), p.rows * whole * 16);
            const u16* from = p.x + k;
            #pragma unroll 4
            for (int m = 0; m < (whole > 0 ? p.rows : 0); m++, from += p.x_pitch) bulk_load(to + m * PITCH, from, whole * 16, landed());
        }
        for (int i = lane; i < (vectors - whole) * p.rows; i += 32) {  // around the end of K
            const int m = i % p.rows, v = whole + i / p.rows, bytes = max(0, min(16, (p.k - k - v * 8) * 2));
            copy_16_or_zeros(to + m * PITCH + v * 16, bytes > 0 ? p.x + (long long)m * p.x_pitch + k + v * 8 : p.x, bytes);
        }
        copies_commit();
    }
    // Waits for these rows, sums them, and signals that they are ready.
    __device__ __forceinline__ void bring() const {
        if (count <= 0) return;
        copies_wait_but<0>();
        barrier_wait(landed(), 0);
        __syncwarp();
        #pragma unroll 1
        for (int c = 0; RAW && c < count; c++) sum_rows(shared, first + c, lane);
        __syncwarp();
        if (lane == 0) barrier_arrive(ready(warp));
    }
    // Waits for the rows of a chunk.
    __device__ __forceinline__ void wait(int chunk) const { barrier_wait(ready(chunk / PIECE), 0); }
};

// Read offsets of a lane from a common base. They are computed once, and not again for each chunk.
struct LanePlaces {
    u32 weights, scales, zeros, rows, sums;
    __device__ __forceinline__ explicit LanePlaces(int lane)
        : weights(lane * 16), scales(lane / 4 * (GROUPS * SCALE_BYTES)), zeros(lane / 4 * (GROUPS * ZERO_BYTES)), rows(lane_rows(0, 0, lane)), sums(lane % 4 * 16) {
        if (THREADS <= 512) asm volatile("" : "+r"(weights), "+r"(scales), "+r"(zeros), "+r"(rows), "+r"(sums));   // registers suffice for them
    }
};

// A lane's part of a chunk in the ring.
DEVICE Chunk shared_chunk(const u8* at, const LanePlaces& lane) {
    Chunk c;
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        c.weights[h] = *reinterpret_cast<const uint4*>(at + lane.weights + h * 512);
        c.scales[h] = shared_words<GROUPS * SCALE_BYTES>(at + lane.scales + (CHUNK_BYTES + h * (8 * GROUPS * SCALE_BYTES)));
#if ZEROS
        c.zeros[h] = shared_words<GROUPS * ZERO_BYTES>(at + lane.zeros + (CHUNK_BYTES + SCALE_SET + h * (8 * GROUPS * ZERO_BYTES)));
#endif
    }
    return c;
}
