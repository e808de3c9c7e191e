// Several rows times packed weights (up to 16): a block keeps its rows in shared memory, and each warp streams weights through a ring of its
// own. 16-bit activations, fp32 accumulators.
//
//   out[m, column] = epilogue(sum_k x[m, k] * (number[column, k] - zero) * scale)
//
// SPLIT blocks split K. A block takes a part of the columns and loads the rows of its part of K to shared memory, once. Its warps form TEAMS
// teams of SHARERS warps. A team takes groups of TILES tiles of 16 columns in turn. The warps of a team take chunks of K in turn, and each
// warp has DEPTH chunks of all tiles of the group in flight. The first chunks are requested before griddepcontrol.wait. Each warp loads and
// sums the rows of a piece of K; a barrier per piece signals that its rows are ready. So a warp waits for other warps only for rows, and
// where a team adds its accumulators.
//
// Where a chunk has one scale, numbers are multiplied without conversion (see packed_few.cuh). The chunk's accumulators are then scaled, and
// the zero point times the sums of its rows is subtracted. Where the zero point is a constant, accumulators begin with this term. The
// accumulators of a team's warps, and of the SPLIT blocks, are added in a fixed order: by the last block to arrive, through memory, or
// (CLUSTERED) warps send them to the blocks of a cluster, and each block computes the results of some rows.
//
// PAIRED: the epilogue reads the product with a second matrix of the same form, after stages of its own (gated linear units): a tile of it
// follows each tile of the first matrix.
//
// generated.cuh defines TILES (of both matrices), TEAMS, SHARERS, DEPTH, SPLIT, SET_SHIFT (chunk c has the scales of set c >> SET_SHIFT),
// CHUNKS (most chunks of K in a block), GROUPS_HERE (most groups of tiles in a block), CLUSTERED, RESIDENT (blocks per multiprocessor),
// HAS_RESIDUAL, PAIRED, epilogue() and, PAIRED, epilogue_beside(), and the macros of packed.cuh.
#include "ptx.cuh"
#include "mma.cuh"
#include "generated.cuh"
#include "stream.cuh"
#include "packed.cuh"
#include "packed_sums.cuh"
#include "packed_resident.cuh"

// Pair i of a word, without conversion of its numbers. The multiprocessor shifts and masks at half the rate of multiplications.
DEVICE u32 raw_pair(u32 word, int i) {
#if defined(DTYPE_BF16)
    u32 numbers = 0x00010001u * ((1 << BITS) - 1);
    asm("" : "+r"(numbers));                       // in a register: an instruction holds only one constant
    return (word >> (BITS * i) & numbers) | 0x43004300u;
#elif BITS == 8
    return __byte_perm(word, 0u, i ? 0x4342 : 0x4140);
#else
    const int up = BITS * i % 8;
    const u32 numbers = (BITS * i < 8 ? word : word >> 8) & (0x00010001u * ((1 << BITS) - 1)) << up;
    return up == 0 ? numbers : fma2(numbers, twice(0x3c00u - 0x400u * up), 0u);    // subnormal, and exact
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

// Adds a chunk's accumulators of a tile (in units of 1 / NUMBER), scaled, minus the zero point times the sums of its rows.
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
DEVICE void add_group(Sums& sums, const Chunk (&held)[TILES], u8* shared, int chunk, const LanePlaces& lane) {
    const u32 rows = smem_address(shared) + chunk * (CHUNK_K * 2) + lane.rows;
    float4 row_sum[2];
    Sums own;
    clear(own);
    #pragma unroll
    for (int m = 0; RAW && m < 2; m++) {
        row_sum[m] = *reinterpret_cast<const float4*>(reinterpret_cast<const u8*>(row_sums(shared, chunk, m, 0)) + lane.sums);
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

// Stores the warp's accumulators of a group: [ROWS][SUM_PITCH].
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

// The epilogue operands of four results of a row, besides their accumulators.
struct Around {
    float4 bias, beside, residual;
    __device__ __forceinline__ Around(const Params& p, int row, int column) {
        bias = bias_of_four(p.bias, column, p.columns);
        beside = PAIRED ? bias_of_four(p.beside_bias, column, p.columns) : bias;
        residual = HAS_RESIDUAL && row < p.rows ? residual_of_four(p, row, column) : bias;
    }
};

// Stores four results of a row from their accumulators and, PAIRED, from the accumulators of the second matrix.
DEVICE void store_results(const Params& p, int row, int column, const float4 (&sum)[MATRICES], const Around& around) {
    const float4 &x = sum[0], &z = sum[PAIRED], &c = around.bias, &d = around.beside, &r = around.residual;
#if PAIRED
    const float4 other = make_float4(epilogue_beside(z.x, d.x, 0.0f), epilogue_beside(z.y, d.y, 0.0f), epilogue_beside(z.z, d.z, 0.0f), epilogue_beside(z.w, d.w, 0.0f));
#else
    const float4& other = r;
#endif
    store_values(p, row, column, make_float4(epilogue(x.x, c.x, other.x), epilogue(x.y, c.y, other.y), epilogue(x.z, c.z, other.z), epilogue(x.w, c.w, other.w)));
}

// Prefetches the biases of the block's columns into L2: nobody else has read them in this run.
DEVICE void prefetch_biases(const Params& p, const Part& part) {
    const int column = part.first * 16 + threadIdx.x * 32;
    if (column >= min((part.first + part.tiles) * 16, p.columns)) return;
    prefetch_l2(p.bias + column);
    if (PAIRED) prefetch_l2(p.beside_bias + column);
}

// Completes a group: stores its results, or the block's partial sums.
struct Ends {
    const Params& p;
    const Part& part;
    const PartialSums<SPLIT, PARTIAL_FOURS> partial;
    __device__ __forceinline__ Ends(const Params& p, const Part& part) : p(p), part(part), partial{p.partial, p.arrived, blockIdx.x / SPLIT} {}

    // i: index of four results of a row in a group. Whether their tile exists.
    __device__ __forceinline__ bool is_here(int group, int i) const { return group * EACH + i % FOURS / 4 < part.tiles; }
    __device__ __forceinline__ int column(int group, int i) const { return (part.first + group * EACH) * 16 + i % FOURS * 4; }
    __device__ __forceinline__ Around around(int group, int i) const { return Around(p, i / FOURS, column(group, i)); }
    __device__ __forceinline__ void store(int group, int i, const float4 (&sum)[MATRICES], const Around& around) const {
        store_results(p, i / FOURS, column(group, i), sum, around);
    }
    __device__ __forceinline__ int place(int group, int i, int n) const { return (group * ROWS * FOURS + i) * MATRICES + n; }

    // By all threads of a team, once the accumulators of its warps are stored. first: operands of the thread's first four results.
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
    // By all threads of the last block to arrive.
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

#if CLUSTERED
DEVICE float element(const float4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// The accumulators that the blocks of a cluster exchange: a block gets those of 16 / SPLIT rows. They are sent in groups of four of each
// tile of each warp, in register order: rows 2 pair and 2 pair + 1, columns g and g + 8.
struct SentSums {
    const Params& p;
    const Part& part;
    u8* const fours;
    const u32 barrier;

    // Called by one thread.
    __device__ __forceinline__ void begin() const {
        barrier_init(barrier, 1);
        barrier_init_fence();
        barrier_expect(barrier, part.groups * (SHARERS * TILES * SENT * SPLIT * 16));
    }
    // Offset of the first group of four of tile 0.
    __device__ __forceinline__ u32 place(u32 block, u32 group, u32 sharer) const { return ((block * GROUPS_HERE + group) * SHARERS + sharer) * (TILES * SENT); }
    // Sends the warp's accumulators of a group.
    __device__ __forceinline__ void send(const Sums& sums, int group, int sharer, int lane) const {
        #pragma unroll
        for (int m = 0; m < 2; m++) {
            const u32 pair = m * 4 + lane % 4, to = pair * SPLIT / 8, own = pair % (8 / SPLIT) * 8 + lane / 4;
            const u32 first = cluster_map(smem_address(fours) + (place(cluster_rank(), group, sharer) + own) * 16, to), there = cluster_map(barrier, to);
            #pragma unroll
            for (int n = 0; n < TILES; n++) cluster_store_async(first + n * (SENT * 16), there, sums[n][m]);
        }
    }
    // Adds the accumulators of four results of a tile, after their arrival.
    __device__ __forceinline__ void add(float4 (&sum)[MATRICES], int tile, int own) const {
        #pragma unroll
        for (int n = 0; n < MATRICES; n++) {
            sum[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            #pragma unroll
            for (int w = 0; w < SPLIT * SHARERS; w++)
                add_to(sum[n], reinterpret_cast<const float4*>(fours)[place(w / SHARERS, tile / EACH, w % SHARERS) + (tile % EACH * MATRICES + n) * SENT + own]);
        }
    }
    // Computes the results; called by all threads. Nobody may send to a block that has ended, so all its threads wait.
    __device__ __forceinline__ void finish() const {
        bool waited = false;
        for (int i = threadIdx.x; i < part.tiles * SENT; i += THREADS) {
            const int own = i % SENT, tile = i / SENT, row = (cluster_rank() * (8 / SPLIT) + own / 8) * 2, column = (part.first + tile) * 16 + own % 8;
            const u64 at = (u64)row * p.out_pitch + column;
            float bias[4], beside[4], residual[4];
            bool here[4];
            #pragma unroll
            for (int j = 0; j < 4; j++) {
                here[j] = column + j / 2 * 8 < p.columns && row + j % 2 < p.rows;
                bias[j] = here[j] ? __ldg(p.bias + column + j / 2 * 8) : 0.0f, beside[j] = PAIRED && here[j] ? __ldg(p.beside_bias + column + j / 2 * 8) : 0.0f;
                residual[j] = HAS_RESIDUAL && here[j] ? unpack1(p.residual[at + j % 2 * p.out_pitch + j / 2 * 8]) : 0.0f;
            }
            if (!waited) barrier_wait_cluster(barrier, 0);
            waited = true;
            float4 sum[MATRICES];
            add(sum, tile, own);
            #pragma unroll
            for (int j = 0; j < 4; j++) {
                constexpr float UNIT = RAW ? NUMBER : 1.0f;
#if PAIRED
                residual[j] = epilogue_beside(element(sum[1], j) * UNIT, beside[j], 0.0f);
#endif
                if (here[j]) p.output[at + j % 2 * p.out_pitch + j / 2 * 8] = pack1(epilogue(element(sum[0], j) * UNIT, bias[j], residual[j]));
            }
        }
        if (!waited) barrier_wait_cluster(barrier, 0);
    }
};
#endif

// Adds the products of the next chunk in the ring.
DEVICE void add_step(Sums& sums, const Rows& rows, Ring& ring, u8* behind, const u8* own_place, int chunk, const LanePlaces& lane) {
    ring.wait();
    Chunk held[TILES];
    #pragma unroll
    for (int n = 0; n < TILES; n++) held[n] = shared_chunk(own_place + ring.slot * SLOT_BYTES + n * TILE_BYTES, lane);
    __syncwarp();                                  // the slot is free
    ring.ask();
    rows.wait(chunk);
    add_group(sums, held, behind, chunk, lane);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) packed_resident(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 shared[];
    u8* const behind = shared + ROWS_AT;
    grid_launch_dependents();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;   // warp-uniform, and the compiler knows it
    const int team = warp / SHARERS, sharer = warp % SHARERS;
    const Part part(p);
    const Rows rows(p, part, behind, warp, lane);
    Ring ring(p, part, smem_address(behind) + WARPS_AT + warp * WARP_BYTES, smem_address(shared) + (2 * WARPS + warp * DEPTH) * 8, team, sharer);
    rows.begin();
    ring.begin(lane);
    prefetch_biases(p, part);
#if CLUSTERED
    const SentSums sent = {p, part, behind + SENT_AT, smem_address(shared) + ROWS_AT - 8};
    if (threadIdx.x == 0) sent.begin();
    cluster_arrive_relaxed();
#endif
    __syncthreads();
    grid_dependency_wait();
    rows.ask();
    rows.bring();

    const Ends ends(p, part);
    const LanePlaces places(lane);
    u8* const own_place = behind + WARPS_AT + warp * WARP_BYTES;
    u8* const sums_of_team = own_place - sharer * WARP_BYTES + OWN_SUMS_AT;
    #pragma unroll 1
    for (int group = team; group < part.groups; group += TEAMS) {
        Sums sums;
        clear(sums);
        #pragma unroll 1
        for (int chunk = sharer; chunk < part.count; chunk += SHARERS) add_step(sums, rows, ring, behind, own_place, chunk, places);
#if CLUSTERED
        cluster_wait();                            // all blocks have started
        sent.send(sums, group, sharer, lane);
#else
        const Around first = ends.around(group, threadIdx.x % TEAM_THREADS);
        put_sums(reinterpret_cast<float*>(own_place + OWN_SUMS_AT), sums, lane);
        team_barrier(team);
        ends.team(sums_of_team, group, threadIdx.x % TEAM_THREADS, first);
        if (group + TEAMS < part.groups) team_barrier(team);           // the space of the accumulators is free
#endif
    }
#if CLUSTERED
    if (team >= part.groups) cluster_wait();       // a team without tiles
    sent.finish();
#elif SPLIT > 1
    __threadfence();
    __syncthreads();                               // nobody reads the rows any more: their first word holds whether this block is the last
    if (ends.partial.is_last(reinterpret_cast<u32*>(behind), [] { __syncthreads(); })) ends.block();
#endif
}
