// Many rows times packed weights on Hopper: wgmma whose operand A is weights, converted to 16-bit floats in registers. fp32 accumulators.
//
//   out[m, column] = epilogue(sum_k x[m, k] * (number[column, k] - zero) * scale)
//
// A block takes 16 columns for each of WARPS warps (one warpgroup or two), and BN rows. One warp loads a chunk of K into each stage of a
// ring: rows, weights and scales, by TMA. The first weights are loaded before griddepcontrol.wait. (Loads to registers cannot be waited for
// one by one: the compiler gives all of them one scoreboard.) An operand is unpacked between two products of earlier operands: a warp whose
// product waits for tensor cores issues nothing, so back-to-back products would leave no time to unpack.
// SPLIT blocks split K where tiles are few. They form a cluster and exchange their accumulators; each block finishes OWN rows.
// Two teams of WARPS warps may take the chunks of a block in turn: while one unpacks, tensor cores run products of the other. Then they
// exchange accumulators; each team finishes half of the rows.
//
// generated.cuh defines WARPS, TEAMS, BN, STAGES, SPLIT, RESIDENT (blocks per multiprocessor), IN_FLIGHT (products of a team), HAS_RESIDUAL,
// wgmma_pixels(), epilogue(), and the macros of packed.cuh.
#include "ptx.cuh"
#include "mma.cuh"
#include "generated.cuh"
#include "stream.cuh"
#include "packed.cuh"
#include "packed_sums.cuh"

struct Params {
    TensorMap x;                                   // [rows][k], in boxes of BN rows x 64 of K
    TensorMap tiles, scales;                       // PackedWeights: a chunk of WARPS tiles, its set of scales
#if ZEROS
    TensorMap zeros;
#endif
    const float* bias;
    const u16* residual;                           // shaped as the output
    u16* output;                                   // [rows][out_pitch], aligned to 8 bytes
    int rows, columns, out_pitch, chunks, set_shift;
};

constexpr bool WIDE = BN > 128 && WARPS > 4;       // registers move from the loading warpgroup to the multiplying warpgroups
constexpr int TEAM = WARPS * 32, CONSUMERS = TEAMS * TEAM, THREADS = CONSUMERS + (WIDE ? 128 : 32), COLUMNS = WARPS * 16, FOURS = COLUMNS / 4;
constexpr int SPAN = 128, BOX_K = SPAN / 2, BOX_BYTES = BN * SPAN, BARRIER_BYTES = 1024;
constexpr int X_BYTES = CHUNK_K / BOX_K * BOX_BYTES, SCALES = 16 * GROUPS * SCALE_BYTES, ZERO_POINTS = 16 * GROUPS * ZERO_BYTES;   // of a tile
constexpr int SCALES_AT = X_BYTES + WARPS * CHUNK_BYTES, ZEROS_AT = SCALES_AT + WARPS * SCALES;
constexpr int LOADED = ZEROS_AT + WARPS * ZERO_POINTS, STAGE_BYTES = (LOADED + 1023) / 1024 * 1024;
constexpr int LEAD = IN_FLIGHT, OPERANDS = IN_FLIGHT + LEAD;          // operands unpacked ahead of the products in flight
constexpr int ROWS = BN / TEAMS;                                                  // that a team finishes, of all blocks of a cluster
constexpr int OWN = (ROWS / 8 + SPLIT - 1) / SPLIT * 8, SUM_PITCH = COLUMNS + 4;  // of a block; the last one may have fewer
constexpr int PASS = SPLIT > 1 ? OWN : TEAMS > 1 ? ROWS : BN % 64 == 0 ? 64 : BN % 48 == 0 ? 48 : BN;   // rows of sums in shared memory at a time
constexpr int EXCHANGED = TEAMS > 1 ? BN * COLUMNS * 4 : 0;                        // bytes of accumulators that teams exchange
static_assert(STEPS % OPERANDS == 0, "registers of operand A take turns");
static_assert(STAGES * STAGE_BYTES >= EXCHANGED + TEAMS * PASS * SUM_PITCH * 4, "sums take the place of the ring");
// If teams shared stages, one that runs ahead could take the previous fill of a stage for the next one: parities are equal.
static_assert(STAGES % TEAMS == 0 && STAGES > TEAMS, "each team has two stages or more of its own");
static_assert(TEAMS == 1 || (TEAMS == 2 && BN % 16 == 0 && !WIDE), "teams halve the rows, and no registers move between warpgroups");

DEVICE void team_meets(int team) { named_barrier(1 + team, TEAM); }
DEVICE void teams_meet() { named_barrier(1 + TEAMS, CONSUMERS); }

// A stage of the ring, and the parity of its fill.
struct Stage {
    int index = 0;
    u32 parity = 0;

    __device__ __forceinline__ void next(int steps = 1) {
        index += steps;
        if (index >= STAGES) index -= STAGES, parity ^= 1;
    }
};

struct Ring {
    u32 full, empty, stages;

    __device__ __forceinline__ u32 stage(int i) const { return stages + i * STAGE_BYTES; }
};

DEVICE void load_weights(const Params& p, const Ring& ring, int stage, int chunk, int tile) {
    const u32 full = ring.full + 8 * stage, at = ring.stage(stage);
    barrier_expect(full, LOADED);
    tma_load_4d(at + X_BYTES, &p.tiles, full, 0, 2 * chunk, tile, 0);
    tma_load_4d(at + SCALES_AT, &p.scales, full, 0, chunk >> p.set_shift, tile, 0);
#if ZEROS
    tma_load_4d(at + ZEROS_AT, &p.zeros, full, 0, chunk >> p.set_shift, tile, 0);
#endif
}
DEVICE void load_rows(const Params& p, const Ring& ring, int stage, int chunk, int first_row) {
    #pragma unroll
    for (int box = 0; box < CHUNK_K / BOX_K; box++)
        tma_load_2d(ring.stage(stage) + box * BOX_BYTES, &p.x, ring.full + 8 * stage, chunk * CHUNK_K + box * BOX_K, first_row);
}

// Fills the ring with the chunks of K from ``begin`` to ``end``. Elements beyond K, the rows, and the columns are zeros.
DEVICE void produce(const Params& p, const Ring& ring, int begin, int end, int tile, int first_row) {
    const int first = min(STAGES, end - begin);
    for (int i = 0; i < first; i++) load_weights(p, ring, i, begin + i, tile);
    grid_dependency_wait();
    for (int i = 0; i < first; i++) load_rows(p, ring, i, begin + i, first_row);
    Stage stage;
    for (int chunk = begin + first; chunk < end; chunk++) {
        barrier_wait(ring.empty + 8 * stage.index, stage.parity);
        load_weights(p, ring, stage.index, chunk, tile);
        load_rows(p, ring, stage.index, chunk, first_row);
        stage.next();
    }
}

// A lane's part of its warp's tile in a stage.
DEVICE Chunk chunk_of(const u8* stage, int warp, int lane) {
    Chunk c;
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        const int channel = lane / 4 + h * 8;
        c.weights[h] = *reinterpret_cast<const uint4*>(stage + X_BYTES + warp * CHUNK_BYTES + h * 512 + lane * 16);
        c.scales[h] = shared_words<GROUPS * SCALE_BYTES>(stage + SCALES_AT + warp * SCALES + channel * (GROUPS * SCALE_BYTES));
#if ZEROS
        c.zeros[h] = shared_words<GROUPS * ZERO_BYTES>(stage + ZEROS_AT + warp * ZERO_POINTS + channel * (GROUPS * ZERO_BYTES));
#endif
    }
    return c;
}

// Adds the products of a team's chunks, of ``count``: each TEAMS-th one. A team has at least one.
DEVICE void multiply(float (&acc)[BN / 2], const Params& p, const Ring& ring, const u8* stages, int count, int team, int warp, int lane) {
    const Masks masks(p.rows >> 31);               // zero
    u32 a[OPERANDS][4];                            // of products in flight, and of the next ones
    Stage stage = {team}, ahead = {team};
    barrier_wait(ring.full + 8 * team, 0);
    Chunk chunk = chunk_of(stages + team * STAGE_BYTES, warp, lane);
    #pragma unroll
    for (int step = 0; step < LEAD; step++) unpack_operand(a[step], chunk, step, masks);
    for (int i = team; i < count; i += TEAMS) {
        ahead.next(TEAMS);
        #pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const int next = (step + LEAD) % STEPS;
            const u64 rows = wgmma_descriptor<SPAN>(ring.stage(stage.index) + step / 4 * BOX_BYTES) + step % 4 * 2;
            wgmma_fence();
            wgmma_pixels(acc, a[step % OPERANDS], rows, i >= TEAMS || step);
            wgmma_commit();
            wgmma_wait<IN_FLIGHT>();               // the registers of the next operand are free
            if (step == IN_FLIGHT - 1 && i >= TEAMS && lane == 0)   // the team no longer reads its previous stage
                barrier_arrive(ring.empty + 8 * (stage.index < TEAMS ? stage.index + STAGES - TEAMS : stage.index - TEAMS));
            if (next == 0 && i + TEAMS < count) {
                barrier_wait(ring.full + 8 * ahead.index, ahead.parity);
                chunk = chunk_of(stages + ahead.index * STAGE_BYTES, warp, lane);
            }
            unpack_operand(a[next % OPERANDS], chunk, next, masks);   // after the last chunk: values that nothing multiplies
        }
        stage.next(TEAMS);
    }
    wgmma_wait<0>();
}

// Gives the accumulators of half of the rows to the other team (the second half belongs to team 1), and adds its accumulators of the own half.
template <int OTHER> DEVICE void exchange(float (&sum)[ROWS / 2], const float (&acc)[BN / 2], float4* boxes) {
    constexpr int EIGHTS = ROWS / 8;
    teams_meet();                                  // nobody reads the ring any more: accumulators take its place
    #pragma unroll
    for (int j = 0; j < EIGHTS; j++) {
        const float* give = &acc[(OTHER * EIGHTS + j) * 4];
        boxes[(OTHER * EIGHTS + j) * TEAM] = make_float4(give[0], give[1], give[2], give[3]);
    }
    teams_meet();
    #pragma unroll
    for (int j = 0; j < EIGHTS; j++) {
        const float* own = &acc[((TEAMS - 1 - OTHER) * EIGHTS + j) * 4];
        const float4 v = boxes[((TEAMS - 1 - OTHER) * EIGHTS + j) * TEAM];
        sum[4 * j] = own[0] + v.x, sum[4 * j + 1] = own[1] + v.y, sum[4 * j + 2] = own[2] + v.z, sum[4 * j + 3] = own[3] + v.w;
    }
}

// Stores eight rows of accumulators, in register order, to shared memory: [PASS][SUM_PITCH].
DEVICE void put_eight(float* total, int eight, const float* sum, int warp, int lane) {
    #pragma unroll
    for (int i = 0; i < 4; i++) total[(eight * 8 + lane % 4 * 2 + i % 2) * SUM_PITCH + warp * 16 + lane / 4 + i / 2 * 8] = sum[i];
}
DEVICE void store_rows(const Params& p, const float* total, int first_row, int count, int column, const float4& bias) {
    for (int i = threadIdx.x % TEAM; i < min(count, p.rows - first_row) * FOURS; i += TEAM)
        store_four(p, first_row + i / FOURS, column, *reinterpret_cast<const float4*>(total + i / FOURS * SUM_PITCH + i % FOURS * 4), bias);
}

// The sums that a team exchanges with the other blocks of a split K: four per thread and eight rows, in register order.
struct SentSums {
    u32 fours, barrier;
    int part;

    __device__ __forceinline__ int first() const { return part * OWN; }    // the first own row
    __device__ __forceinline__ int count() const { return max(0, min(OWN, ROWS - first())); }
    // Called by one thread.
    __device__ __forceinline__ void begin() const {
        barrier_init(barrier, 1);
        barrier_init_fence();
        barrier_expect(barrier, SPLIT * count() * COLUMNS * 4);
    }
    __device__ __forceinline__ u32 place(int part, int eight) const { return fours + ((part * (OWN / 8) + eight) * TEAM + threadIdx.x % TEAM) * 16; }
    // Sends each block, including this one, the sums of its rows.
    __device__ __forceinline__ void send(const float (&acc)[ROWS / 2]) const {
        #pragma unroll
        for (int j = 0; j < ROWS / 8; j++)
            cluster_send(place(part, j % (OWN / 8)), barrier, j * 8 / OWN, &acc[j * 4]);
    }
    // The sums of eight own rows, in the order of K.
    __device__ __forceinline__ void add(float (&sum)[4], int eight) const {
        #pragma unroll
        for (int part = 0; part < SPLIT; part++) {
            float4 v;
            shared_load(place(part, eight), v);
            sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
        }
    }
};

DEVICE SentSums sums_of(const Ring& ring, int part, int team) {
    return {ring.stage(STAGES) + team * SPLIT * OWN * COLUMNS * 4, ring.empty + 8 * (STAGES + team), part};
}

// Finishes a team's rows from their accumulators in this block.
DEVICE void finish(
    const Params& p, const float (&acc)[ROWS / 2], float* total, const SentSums& sent, int first_row, int column, const float4& bias, int team, int warp,
    int lane) {
    grid_dependency_wait();                        // before this, other launches may read or write the memory of the results
#if SPLIT > 1
    cluster_wait();                                // all blocks have started
    sent.send(acc);
    barrier_wait_cluster(sent.barrier, 0);         // nobody may send to a block that has ended, so all its threads wait
    if (TEAMS == 1) team_meets(team);              // nobody reads the ring any more: accumulators take its place
    #pragma unroll
    for (int eight = 0; eight < OWN / 8; eight++) {
        if (eight * 8 >= sent.count()) break;
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        sent.add(sum, eight);
        put_eight(total, eight, sum, warp, lane);
    }
    team_meets(team);
    store_rows(p, total, first_row + sent.first(), sent.count(), column, bias);
#else
    #pragma unroll
    for (int first = 0; first < ROWS; first += PASS) {
        if (TEAMS == 1) team_meets(team);          // nobody reads the ring, or the previous rows, any more: accumulators take their place
        #pragma unroll
        for (int eight = 0; eight < PASS / 8; eight++) put_eight(total, eight, &acc[(first / 8 + eight) * 4], warp, lane);
        team_meets(team);
        store_rows(p, total, first_row + first, PASS, column, bias);
    }
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) packed_sm90(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 shared[];
    const Ring ring = {smem_address(shared), smem_address(shared) + 8 * STAGES, smem_address(shared) + BARRIER_BYTES};
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;  // warp-uniform, and the compiler knows it
    const int part = blockIdx.x % SPLIT, first_column = blockIdx.x / SPLIT * COLUMNS, first_row = blockIdx.y * BN;
    const int begin = p.chunks * part / SPLIT, end = p.chunks * (part + 1) / SPLIT;
    grid_launch_dependents();
    if (warp == TEAMS * WARPS && lane == 0) {
        tma_prefetch(&p.x);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(ring.full + 8 * i, 1);
            barrier_init(ring.empty + 8 * i, WARPS);
        }
        barrier_init_fence();
        async_proxy_fence();
        if (SPLIT > 1)
            for (int team = 0; team < TEAMS; team++) sums_of(ring, part, team).begin();
    }
    __syncthreads();
    if (SPLIT > 1) cluster_arrive_relaxed();
    if (warp >= TEAMS * WARPS) {
        if (WIDE) give_registers<40>();
        if (warp == TEAMS * WARPS && elect_one()) produce(p, ring, begin, end, first_column / 16, first_row);
        if (SPLIT > 1) cluster_wait_together();
        return;
    }
    if (WIDE) take_registers<232>();

    const int team = TEAMS > 1 ? warp / WARPS : 0, of_team = warp - team * WARPS, column = first_column + threadIdx.x % FOURS * 4;
    const float4 bias = bias_of_four(p.bias, column, p.columns);
    float acc[BN / 2];
    multiply(acc, p, ring, shared + BARRIER_BYTES, end - begin, team, of_team, lane);
    float* const total = reinterpret_cast<float*>(shared + BARRIER_BYTES + EXCHANGED) + team * PASS * SUM_PITCH;
    const SentSums sent = sums_of(ring, part, team);
#if TEAMS > 1
    float sum[ROWS / 2];
    float4* const boxes = reinterpret_cast<float4*>(shared + BARRIER_BYTES) + threadIdx.x % TEAM;
    if (team) exchange<0>(sum, acc, boxes);
    else exchange<1>(sum, acc, boxes);
    finish(p, sum, total, sent, first_row + team * ROWS, column, bias, team, of_team, lane);
#else
    finish(p, acc, total, sent, first_row, column, bias, team, of_team, lane);
#endif
}
