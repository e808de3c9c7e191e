// Some rows times packed weights (up to 16): a block keeps its rows in shared memory, and each warp streams weights from memory straight to
// registers. 16-bit activations, fp32 sums.
//
//   out[m, column] = epilogue(sum_k x[m, k] * (number[column, k] - zero) * scale)
//
// SPLIT blocks share K. A block takes a part of the columns and brings the rows of its part of K to shared memory, once. Its warps are TEAMS
// teams of SHARERS warps. A team takes groups of TILES tiles of 16 columns in turn; its warps take chunks of K in turn, and each has DEPTH
// chunks of all tiles of the group on their way to its registers. The first are on their way before griddepcontrol.wait. Warps bring rows in
// turn, too, WARPS chunks of K at a time, and sum them. A barrier for each chunk tells that its rows are there. So products begin with the
// first rows, and no warp waits for another but for rows, and where a team adds its sums.
//
// Where a chunk has one scale, numbers are multiplied as they lie (packed_few.cuh says how), and the chunk's sums are scaled, less the
// zero point times the sums of its rows. Where the zero point is a constant, sums begin with that. The sums of a team's warps, and of the
// SPLIT blocks (through memory, by the last one to come), are added in a fixed order.
//
// PAIRED: the epilogue reads the product with a second matrix of the same form, after stages of its own (gated linear units): a tile of it
// follows each tile of the first matrix.
//
// generated.cuh defines TILES (of both matrices), TEAMS, SHARERS, DEPTH, SPLIT, SET_SHIFT (chunk c has the scales of set c >> SET_SHIFT), CHUNKS (of K, of a block, at most), GROUPS_HERE (of tiles, of
// a block, at most), RESIDENT (blocks of a multiprocessor), HAS_RESIDUAL, PAIRED, epilogue() and, PAIRED, epilogue_beside(), and what
// packed.cuh says.
#include "ptx.cuh"
#include "mma.cuh"
#include "generated.cuh"
#include "stream.cuh"
#include "packed.cuh"
#include "packed_sums.cuh"

struct Params {
    const u16* x;                                  // [rows][x_pitch], rows aligned to 16 bytes
    PackedWeights weights;
    const float* bias;
    const u16* residual;                           // as output
    u16* output;                                   // [rows][out_pitch], aligned to 8 bytes
    PackedWeights beside;                          // the second matrix, and its bias
    const float* beside_bias;
    float4* partial;                               // SPLIT > 1: sums of blocks, and how many of them have come
    u32* arrived;
    int rows, columns, k, x_pitch, out_pitch, parts;                   // parts: of the columns
};

constexpr int MATRICES = 1 + PAIRED, EACH = TILES / MATRICES;          // tiles of results of a group
constexpr int WARPS = TEAMS * SHARERS, THREADS = WARPS * 32, TEAM_THREADS = SHARERS * 32, ROWS = 16;
constexpr int PITCH = CHUNKS * CHUNK_K * 2 + 16;   // bytes of a row: the eight rows of an ldmatrix lie in other banks
constexpr int FOURS = EACH * 4, SUM_PITCH = TILES * 16 + 4;            // fours of results of a row of a group; floats of its sums
constexpr int ROWS_AT = (CHUNKS + WARPS * DEPTH + 15) / 16 * 128;      // behind the barriers
constexpr int SCALE_SET = 16 * GROUPS * SCALE_BYTES, ZERO_SET = 16 * GROUPS * ZERO_BYTES;  // bytes
constexpr int TILE_BYTES = CHUNK_BYTES + SCALE_SET + ZERO_SET, SLOT_BYTES = TILES * TILE_BYTES, RING_BYTES = DEPTH * SLOT_BYTES;
constexpr int SUM_BYTES = ROWS * SUM_PITCH * 4;
constexpr bool ALIASED = GROUPS_HERE <= TEAMS;     // sums take the place of the ring, which nothing more comes to
constexpr int OWN_SUMS_AT = ALIASED ? 0 : RING_BYTES, WARP_BYTES = ALIASED ? (RING_BYTES > SUM_BYTES ? RING_BYTES : SUM_BYTES) : RING_BYTES + SUM_BYTES;
constexpr int ROW_SUMS_AT = ROWS * PITCH, WARPS_AT = (ROW_SUMS_AT + CHUNKS * ROWS * 8 + 127) / 128 * 128;  // behind the rows' beginning
constexpr int PARTIAL_FOURS = GROUPS_HERE * ROWS * FOURS * MATRICES;   // of a block
#if defined(DTYPE_BF16)
constexpr bool RAW = GROUPS == 1 && !FLOAT_CODES && BITS < 8;
constexpr float NUMBER = 1.0f, OFFSET = 128.0f;    // what an operand counts, and the constant that is added to each number
#else
constexpr bool RAW = GROUPS == 1 && !FLOAT_CODES;
constexpr float NUMBER = 16777216.0f, OFFSET = 0.0f;
#endif
constexpr float START = (ZEROS ? 1.0f : -(float(1 << (BITS - 1)) + OFFSET)) / NUMBER;  // what sums of rows are multiplied by

static_assert(TILES % MATRICES == 0, "tiles of two matrices come in pairs");

// What a block computes: its tiles of results, in groups, and its chunks of K.
struct Part {
    int first, tiles, groups, begin, count;
    __device__ __forceinline__ explicit Part(const Params& p) {
        const int all = (p.columns + 15) / 16, part = blockIdx.x % SPLIT, block = blockIdx.x / SPLIT;
        first = all * block / p.parts, tiles = all * (block + 1) / p.parts - first, groups = (tiles + EACH - 1) / EACH;
        begin = p.weights.chunks * part / SPLIT, count = p.weights.chunks * (part + 1) / SPLIT - begin;
    }
};

// The chunks of a warp, group by group, on their way through its ring.
struct Ring {
    const Params& p;
    const Part& part;
    const u32 at, full;                            // shared addresses: slots, and their barriers
    int group, step;                               // what is asked for next
    int slot;
    u32 parity;
    __device__ __forceinline__ Ring(const Params& p, const Part& part, u32 at, u32 full, int team) : p(p), part(part), at(at), full(full), group(team), step(0), slot(0), parity(0) {}

    // Asks for the first chunks.
    template <class Order> __device__ __forceinline__ void begin(int own, int sharer, int lane, const Order& order) {
        if (own == 0) group = part.groups;         // there are none
        if (lane == 0) {
            #pragma unroll
            for (int d = 0; d < DEPTH; d++) barrier_init(full + d * 8, 1);
            barrier_init_fence();
            async_proxy_fence();
        }
        __syncwarp();
        #pragma unroll 1
        for (int d = 0; d < DEPTH; d++) ask(own, sharer, order);
        parity = 0;
    }
    // Asks for a chunk of each tile of a group, by one lane.
    __device__ __forceinline__ void load(int chunk) const {
        const u32 barrier = full + slot * 8;
        barrier_expect(barrier, SLOT_BYTES);
        #pragma unroll
        for (int n = 0; n < TILES; n++) {
            const PackedWeights& matrix = n % MATRICES ? p.beside : p.weights;
            const u32 tile = part.first + min(group * EACH + n / MATRICES, part.tiles - 1), to = at + slot * SLOT_BYTES + n * TILE_BYTES;
            const u32 set = tile * matrix.sets + (chunk >> SET_SHIFT);
            bulk_load(to, matrix.tiles + u64(tile * matrix.chunks + chunk) * CHUNK_BYTES, CHUNK_BYTES, barrier);
            bulk_load(to + CHUNK_BYTES, matrix.scales + u64(set) * SCALE_SET, SCALE_SET, barrier);
            if (ZERO_SET > 0) bulk_load(to + CHUNK_BYTES + SCALE_SET, matrix.zeros + u64(set) * ZERO_SET, ZERO_SET, barrier);
        }
    }
    // Asks for what comes next, into the slot that was read last. By whole warps.
    template <class Order> __device__ __forceinline__ void ask(int own, int sharer, const Order& order) {
        if (group < part.groups) {
            if (elect_one()) load(part.begin + order.chunk(sharer + step * SHARERS));
            if (++step == own) step = 0, group += TEAMS;
        }
        if (++slot == DEPTH) slot = 0, parity ^= 1;
    }
    __device__ __forceinline__ void wait() const { barrier_wait(full + slot * 8, parity); }
};

// Brings the rows of a chunk, with zeros beyond K. What lies in the place of rows that there are not counts for no other row.
DEVICE void bring_rows(const Params& p, const Part& part, u32 rows, int chunk, int lane) {
    constexpr int VECTORS = CHUNK_K / 8, STEP = 32 / VECTORS;          // rows that the lanes copy at once
    const int k = (part.begin + chunk) * CHUNK_K + lane % VECTORS * 8, bytes = max(0, min(16, (p.k - k) * 2));
    int m = lane / VECTORS;
    u32 to = rows + m * PITCH + chunk * (CHUNK_K * 2) + lane % VECTORS * 16;
    const u16* from = bytes > 0 ? p.x + (long long)m * p.x_pitch + k : p.x;
    #pragma unroll
    for (int i = 0; i < ROWS / STEP; i++, m += STEP, to += STEP * PITCH) {
        if (m < p.rows) copy_16_or_zeros(to, from, bytes);
        if (bytes > 0) from += STEP * p.x_pitch;
    }
}

// Where a lane's 16 bytes of ldmatrix begin: of both tiles of eight rows.
DEVICE u32 lane_rows(u32 rows, int chunk, int lane) { return rows + chunk * (CHUNK_K * 2) + (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 16; }

// The sums of a chunk's rows 2 pair and 2 pair + 1 of a tile of eight rows, twice: as the sums of a tile begin.
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

// The rows of the block, which warps bring in turn: those of chunks ``at`` to at + WARPS - 1 at a time.
struct Rows {
    const Params& p;
    const Part& part;
    u8* const shared;
    const int warp, lane, turned;
    int asked, here;                               // chunks that the warp has no more to ask for, and to bring
    __device__ __forceinline__ Rows(const Params& p, const Part& part, u8* shared, int warp, int lane)
        : p(p), part(part), shared(shared), warp(warp), lane(lane), turned(blockIdx.x / SPLIT % part.count), asked(0), here(0) {}

    // The chunk that comes at a place: blocks ask L2 for other rows first.
    __device__ __forceinline__ int chunk(int at) const { return at + turned < part.count ? at + turned : at + turned - part.count; }
    __device__ __forceinline__ u32 barrier(int at) const { return smem_address(shared) - ROWS_AT + at * 8; }
    __device__ __forceinline__ void ask() {
        if (asked + warp < part.count) bring_rows(p, part, smem_address(shared), chunk(asked + warp), lane);
        copies_commit();
        asked += WARPS;
    }
    // Brings the warp's chunk of those that come next.
    __device__ __forceinline__ void bring() {
        copies_wait_but<1>();
        __syncwarp();
        if (here + warp < part.count) {
            if (RAW) sum_rows(shared, chunk(here + warp), lane);
            __syncwarp();
            if (lane == 0) barrier_arrive(barrier(here + warp));
        }
        here += WARPS;
        ask();
    }
    // Waits for the rows of the chunk at a place.
    __device__ __forceinline__ void wait(int at) {
        while (here <= at) bring();
        barrier_wait(barrier(at), 0);
    }
};

template <int BYTES> DEVICE Words<BYTES> shared_words(const u8* at) {
    Words<BYTES> v;
    if constexpr (BYTES == 1) {
        v.word[0] = *at;
    } else if constexpr (BYTES == 2) {
        v.word[0] = *reinterpret_cast<const u16*>(at);
    } else {
        #pragma unroll
        for (int i = 0; i < BYTES / 4; i++) v.word[i] = reinterpret_cast<const u32*>(at)[i];
    }
    return v;
}

// What a lane holds of a chunk, from its place in the ring.
DEVICE Chunk shared_chunk(const u8* at, int lane) {
    Chunk c;
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        const int channel = lane / 4 + h * 8;
        c.weights[h] = *reinterpret_cast<const uint4*>(at + h * 512 + lane * 16);
        c.scales[h] = shared_words<GROUPS * SCALE_BYTES>(at + CHUNK_BYTES + channel * (GROUPS * SCALE_BYTES));
#if ZEROS
        c.zeros[h] = shared_words<GROUPS * ZERO_BYTES>(at + CHUNK_BYTES + SCALE_SET + channel * (GROUPS * ZERO_BYTES));
#endif
    }
    return c;
}

// Pair i of a word: numbers as they lie.
DEVICE u32 raw_pair(u32 word, int i) {
#if defined(DTYPE_BF16)
    u32 numbers = 0x00010001u * ((1 << BITS) - 1);
    asm("" : "+r"(numbers));                       // in a register: an instruction has room for one constant
    return (word >> (BITS * i) & numbers) | 0x43004300u;
#elif BITS == 8
    return __byte_perm(word, 0u, i ? 0x4342 : 0x4140);
#else
    return word >> (BITS * i) & 0x00010001u * ((1 << BITS) - 1);
#endif
}
DEVICE void operand_of(u32 (&a)[4], const Chunk& chunk, int step) {
    if constexpr (RAW) {
        const int word = step * 4 / STEPS, at = step % (STEPS / 4) * 2;
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const u32 numbers = word_of(chunk.weights[h], word);
            a[h] = raw_pair(numbers, at), a[h + 2] = raw_pair(numbers, at + 1);
        }
    } else {
        unpack_operand(a, chunk, step);
    }
}

typedef float Sums[TILES][2][4];                   // of both tiles of eight rows

DEVICE void clear(Sums& sums) {
    #pragma unroll
    for (int i = 0; i < TILES * 8; i++) sums[i / 8][i / 4 % 2][i % 4] = 0.0f;
}

// Adds a chunk's sums of a tile (in 1 / NUMBER), scaled, less the zero point times the sums of its rows.
DEVICE void add_scaled(float (&sums)[2][4], const float (&own)[2][4], const float4 (&row_sum)[2], const Chunk& chunk) {
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        const Zero zero = zero_at(chunk, h, 0);
        const float scale = scale_at(chunk.scales[h], 0), less = -scale * ((ZEROS == 2 ? zero.rest : float(zero.whole)) + OFFSET);
        #pragma unroll
        for (int m = 0; m < 2; m++) {
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                float& sum = sums[m][2 * h + i];
                if (ZEROS > 0) sum = fmaf(less, i ? row_sum[m].y : row_sum[m].x, sum);
                sum = fmaf(scale, own[m][2 * h + i], sum);
            }
        }
    }
}

// Adds the products of a chunk of each tile of a group.
DEVICE void add_group(Sums& sums, const Chunk (&held)[TILES], u8* shared, int chunk, int lane) {
    const u32 rows = lane_rows(smem_address(shared), chunk, lane);
    float4 row_sum[2];
    Sums own;
    clear(own);
    #pragma unroll
    for (int m = 0; RAW && m < 2; m++) {
        row_sum[m] = *row_sums(shared, chunk, m, lane % 4);
        #pragma unroll
        for (int n = 0; ZEROS == 0 && n < TILES; n++) own[n][m][0] = row_sum[m].x, own[n][m][1] = row_sum[m].y, own[n][m][2] = row_sum[m].z, own[n][m][3] = row_sum[m].w;
    }
    #pragma unroll
    for (int step = 0; step < STEPS; step++) {
        u32 b[4];
        ldmatrix_x4(rows + step * 32, b[0], b[1], b[2], b[3]);
        #pragma unroll
        for (int n = 0; n < TILES; n++) {
            u32 a[4];
            operand_of(a, held[n], step);
            multiply(RAW ? own[n][0] : sums[n][0], a, b[0], b[1]);
            multiply(RAW ? own[n][1] : sums[n][1], a, b[2], b[3]);
        }
    }
    #pragma unroll
    for (int n = 0; RAW && n < TILES; n++) add_scaled(sums[n], own[n], row_sum, held[n]);
}

// The warp's sums of a group: [ROWS][SUM_PITCH].
DEVICE void put_sums(float* to, const Sums& sums, int lane) {
    #pragma unroll
    for (int n = 0; n < TILES; n++) {
        #pragma unroll
        for (int i = 0; i < 8; i++) to[(i / 4 * 8 + lane % 4 * 2 + i % 2) * SUM_PITCH + n * 16 + lane / 4 + i / 2 % 2 * 8] = sums[n][i / 4][i % 4] * (RAW ? NUMBER : 1.0f);
    }
}

DEVICE void add_to(float4& sum, const float4& v) { sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w; }

// Waits for the team's warps.
DEVICE void team_barrier(int team) {
    if (SHARERS > 1)
        named_barrier(1 + team, TEAM_THREADS);
    else
        __syncwarp();
}

// What four results of a row are made of beside their sums.
struct Around {
    float4 bias, beside, residual;
    __device__ __forceinline__ Around(const Params& p, int row, int column) {
        bias = bias_of_four(p.bias, column, p.columns);
        beside = PAIRED ? bias_of_four(p.beside_bias, column, p.columns) : bias;
        residual = HAS_RESIDUAL && row < p.rows ? residual_of_four(p, row, column) : bias;
    }
};

// Stores four results of a row, from their sums; PAIRED: and from those of the second matrix.
DEVICE void store_results(const Params& p, int row, int column, const float4 (&sum)[MATRICES], const Around& around) {
    const float4 &x = sum[0], &z = sum[PAIRED], &c = around.bias, &d = around.beside, &r = around.residual;
#if PAIRED
    const float4 other = make_float4(epilogue_beside(z.x, d.x, 0.0f), epilogue_beside(z.y, d.y, 0.0f), epilogue_beside(z.z, d.z, 0.0f), epilogue_beside(z.w, d.w, 0.0f));
#else
    const float4& other = r;
#endif
    store_values(p, row, column, make_float4(epilogue(x.x, c.x, other.x), epilogue(x.y, c.y, other.y), epilogue(x.z, c.z, other.z), epilogue(x.w, c.w, other.w)));
}

// Brings the biases of the block's columns into L2: nobody else has read them in this run.
DEVICE void prefetch_biases(const Params& p, const Part& part) {
    const int column = part.first * 16 + threadIdx.x * 32;
    if (column >= min((part.first + part.tiles) * 16, p.columns)) return;
    prefetch_l2(p.bias + column);
    if (PAIRED) prefetch_l2(p.beside_bias + column);
}

// The ends of a group: its results, or the block's part of their sums.
struct Ends {
    const Params& p;
    const Part& part;
    const PartialSums<SPLIT, PARTIAL_FOURS> partial;
    __device__ __forceinline__ Ends(const Params& p, const Part& part) : p(p), part(part), partial{p.partial, p.arrived, blockIdx.x / SPLIT} {}

    // Four i of a group: of a row. Whether there is such a tile.
    __device__ __forceinline__ bool is_here(int group, int i) const { return group * EACH + i % FOURS / 4 < part.tiles; }
    __device__ __forceinline__ int column(int group, int i) const { return (part.first + group * EACH) * 16 + i % FOURS * 4; }
    __device__ __forceinline__ Around around(int group, int i) const { return Around(p, i / FOURS, column(group, i)); }
    __device__ __forceinline__ void store(int group, int i, const float4 (&sum)[MATRICES], const Around& around) const {
        store_results(p, i / FOURS, column(group, i), sum, around);
    }
    __device__ __forceinline__ int place(int group, int i, int n) const { return (group * ROWS * FOURS + i) * MATRICES + n; }

    // By all threads of a team, once its warps' sums are there. first: of the thread's first four.
    __device__ __forceinline__ void team(const u8* sums, int group, int thread, const Around& first) const {
        for (int i = thread; i < p.rows * FOURS; i += TEAM_THREADS) {
            if (!is_here(group, i)) continue;
            float4 sum[MATRICES];
            #pragma unroll
            for (int n = 0; n < MATRICES; n++) {
                const u8* const from = sums + i / FOURS * (SUM_PITCH * 4) + (i % FOURS / 4 * MATRICES + n) * 64 + i % 4 * 16;
                sum[n] = *reinterpret_cast<const float4*>(from);
                #pragma unroll
                for (int w = 1; w < SHARERS; w++) add_to(sum[n], *reinterpret_cast<const float4*>(from + w * WARP_BYTES));
                if (SPLIT > 1) partial.put(blockIdx.x % SPLIT, place(group, i, n), sum[n]);
            }
            if (SPLIT == 1) store(group, i, sum, i == thread ? first : around(group, i));
        }
    }
    // By all threads of the last block to come.
    __device__ __forceinline__ void block() const {
        for (int i = threadIdx.x; i < part.groups * ROWS * FOURS; i += THREADS) {
            const int group = i / (ROWS * FOURS), at = i % (ROWS * FOURS);
            if (at >= p.rows * FOURS || !is_here(group, at)) continue;
            float4 sum[MATRICES];
            #pragma unroll
            for (int n = 0; n < MATRICES; n++) sum[n] = partial.sum(place(group, at, n));
            store(group, at, sum, around(group, at));
        }
    }
};

// Adds the products of the chunk that the ring holds next, number ``step`` of the warp's.
DEVICE void add_step(Sums& sums, Rows& rows, Ring& ring, u8* behind, const u8* own_place, int own, int sharer, int step, int lane) {
    const int at = sharer + step * SHARERS;
    ring.wait();
    Chunk held[TILES];
    #pragma unroll
    for (int n = 0; n < TILES; n++) held[n] = shared_chunk(own_place + ring.slot * SLOT_BYTES + n * TILE_BYTES, lane);
    __syncwarp();                                  // the slot is free
    ring.ask(own, sharer, rows);
    rows.wait(at);
    add_group(sums, held, behind, rows.chunk(at), lane);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) packed_resident(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 shared[];
    u8* const behind = shared + ROWS_AT;
    grid_launch_dependents();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;   // uniform, and known to be
    const int team = warp / SHARERS, sharer = warp % SHARERS;
    const Part part(p);
    Rows rows(p, part, behind, warp, lane);
    const int own = (part.count - sharer + SHARERS - 1) / SHARERS;     // the warp's chunks of a group
    Ring ring(p, part, smem_address(behind) + WARPS_AT + warp * WARP_BYTES, smem_address(shared) + (CHUNKS + warp * DEPTH) * 8, team);
    ring.begin(own, sharer, lane, rows);
    prefetch_biases(p, part);
    for (int i = threadIdx.x; i < part.count; i += THREADS) barrier_init(rows.barrier(i), 1);
    __syncthreads();
    grid_dependency_wait();
    rows.ask();
    rows.ask();

    const Ends ends(p, part);
    u8* const own_place = behind + WARPS_AT + warp * WARP_BYTES;
    u8* const sums_of_team = own_place - sharer * WARP_BYTES + OWN_SUMS_AT;
    #pragma unroll 1
    for (int group = team; group < part.groups; group += TEAMS) {
        Sums sums;
        clear(sums);
        #pragma unroll 1
        for (int step = 0; step < own; step++) add_step(sums, rows, ring, behind, own_place, own, sharer, step, lane);
        while (rows.here < part.count) rows.bring();                   // for others
        const Around first = ends.around(group, threadIdx.x % TEAM_THREADS);
        put_sums(reinterpret_cast<float*>(own_place + OWN_SUMS_AT), sums, lane);
        team_barrier(team);
        ends.team(sums_of_team, group, threadIdx.x % TEAM_THREADS, first);
        if (group + TEAMS < part.groups) team_barrier(team);           // the sums' places are free
    }
    while (rows.here < part.count) rows.bring();                       // of a team that has no tiles
    copies_wait_but<0>();
#if SPLIT > 1
    __threadfence();
    __syncthreads();                               // the rows are read no more: their first word tells who was last
    if (ends.partial.is_last(reinterpret_cast<u32*>(behind), [] { __syncthreads(); })) ends.block();
#endif
}
