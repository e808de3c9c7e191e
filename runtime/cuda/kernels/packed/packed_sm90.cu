// Many rows times packed weights on Hopper: wgmma whose operand A are weights that become 16-bit floats in registers. fp32 sums.
//
//   out[m, column] = epilogue(sum_k x[m, k] * (number[column, k] - zero) * scale)
//
// A block takes 128 columns, 16 of each of eight warps in two warpgroups, and BN rows. One warp brings rows by TMA into a ring of STAGES
// stages of 64 of K. Weights come straight from memory to the registers of the warp that multiplies them, DEPTH chunks of each lane in
// flight; the first are on their way before griddepcontrol.wait. An operand is unpacked between two products of an earlier one: a warp whose
// product must wait for tensor cores issues nothing, so products in a row would leave no time to unpack.
// SPLIT blocks share K where tiles are few: their sums go through memory (packed_mma.cu says how), or, CLUSTERED, the blocks of a cluster send
// them to one another, and each block finishes OWN rows.
//
// generated.cuh defines BN, DEPTH, STAGES, SPLIT, CLUSTERED, RESIDENT (blocks of a multiprocessor), HAS_RESIDUAL, wgmma_pixels(), epilogue(), and
// what packed.cuh says.
#include "ptx.cuh"
#include "mma.cuh"
#include "generated.cuh"
#include "stream.cuh"
#include "packed.cuh"
#include "packed_sums.cuh"

struct Params {
    TensorMap x;                                   // [rows][k], in boxes of BN rows x 64 of K
    PackedWeights weights;
    const float* bias;
    const u16* residual;                           // as output
    u16* output;                                   // [rows][out_pitch], aligned to 8 bytes
    float4* partial;
    u32* arrived;
    int rows, columns, out_pitch;
};

constexpr bool WIDE = BN > 128;                    // registers move from the warpgroup that loads to those that multiply
constexpr int WARPS = 8, CONSUMERS = WARPS * 32, THREADS = CONSUMERS + (WIDE ? 128 : 32), COLUMNS = WARPS * 16, FOURS = COLUMNS / 4;
constexpr int BK = 64, SPAN = 128, STAGES_OF_CHUNK = CHUNK_K / BK, STAGE_BYTES = BN * SPAN, BARRIER_BYTES = 1024;
constexpr int PASS = BN % 64 == 0 ? 64 : BN % 48 == 0 ? 48 : BN, SUM_PITCH = COLUMNS + 4;   // rows of sums in shared memory at a time
constexpr int STAGE_STEPS = BK / 16, IN_FLIGHT = 2, LEAD = 2, OPERANDS = IN_FLIGHT + LEAD;   // products that run, operands unpacked ahead of them
static_assert(DEPTH * STEPS % OPERANDS == 0 && LEAD < STEPS, "registers of operand A take turns");
static_assert(IN_FLIGHT <= STAGE_STEPS, "a stage is free within the next one");
static_assert(BN % PASS == 0, "sums go in whole passes");
constexpr int OWN = (BN / 8 + SPLIT - 1) / SPLIT * 8;   // rows that a block of a cluster finishes; the last block may have fewer
static_assert(STAGES * STAGE_BYTES >= (CLUSTERED ? OWN : PASS) * SUM_PITCH * 4, "sums take the place of the ring");

DEVICE void consumers_meet() { named_barrier(1, CONSUMERS); }

// Chunks of a part of K, filled up to whole turns of the ring of weights with chunks of zeros.
struct Part {
    int begin, end, padded;
};
DEVICE Part part_of(const Params& p, int number) {
    const int begin = p.weights.chunks * number / SPLIT, end = p.weights.chunks * (number + 1) / SPLIT;
    return {begin, end, begin + (end - begin + DEPTH - 1) / DEPTH * DEPTH};
}

// Brings the rows of each stage. Beyond K, and beyond the part, are zeros.
DEVICE void produce(const Params& p, const Part& part, u32 full, u32 empty, u32 ring, int first_row) {
    int stage = 0;
    u32 parity = 1;                                // of an empty ring
    for (int chunk = part.begin; chunk < part.padded; chunk++) {
        for (int half = 0; half < STAGES_OF_CHUNK; half++) {
            barrier_wait(empty + 8 * stage, parity);
            barrier_expect(full + 8 * stage, STAGE_BYTES);
            const int k = (chunk < part.end ? chunk : p.weights.chunks) * CHUNK_K + half * BK;
            tma_load_2d(ring + stage * STAGE_BYTES, &p.x, full + 8 * stage, k, first_row);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    }
}

// The sums of PASS rows from ``first`` on to shared memory, [PASS][SUM_PITCH].
DEVICE void put_sums(float* total, const float (&acc)[BN / 2], int first, int warp, int lane) {
    #pragma unroll
    for (int j = 0; j < PASS / 8; j++) {
        #pragma unroll
        for (int i = 0; i < 4; i++)
            total[(j * 8 + lane % 4 * 2 + i % 2) * SUM_PITCH + warp * 16 + lane / 4 + i / 2 * 8] = acc[(first / 8 + j) * 4 + i];
    }
}

// What the blocks of a cluster send one another. Of each eight rows there are fours as threads hold them.
struct SentSums {
    u32 fours, barrier;
    int rank;

    __device__ __forceinline__ int first() const { return rank * OWN; }    // of the own rows
    __device__ __forceinline__ int count() const { return max(0, min(OWN, BN - first())); }

    // By one thread.
    __device__ __forceinline__ void begin() const {
        barrier_init(barrier, 1);
        barrier_init_fence();
        barrier_expect(barrier, SPLIT * count() * COLUMNS * 4);
    }
    __device__ __forceinline__ u32 place(int part, int eight) const { return fours + ((part * (OWN / 8) + eight) * CONSUMERS + threadIdx.x) * 16; }
    // Sends each block, this one among them, the sums of its rows.
    __device__ __forceinline__ void send(const float (&acc)[BN / 2]) const {
        #pragma unroll
        for (int j = 0; j < BN / 8; j++)               // of eight rows
            cluster_store_async(cluster_map(place(rank, j % (OWN / 8)), j * 8 / OWN), cluster_map(barrier, j * 8 / OWN), &acc[j * 4]);
    }
    // The sums of eight of the own rows, in the order of K.
    __device__ __forceinline__ void add(float (&sum)[4], int eight) const {
        #pragma unroll
        for (int part = 0; part < SPLIT; part++) {
            float4 v;
            shared_load(place(part, eight), v);
            sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) packed_sm90(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 shared[];
    const u32 full = smem_address(shared), empty = full + 8 * STAGES, ring = full + BARRIER_BYTES;
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;  // uniform, and known to be
    const int columns = CLUSTERED ? blockIdx.x / SPLIT : blockIdx.x;
    const Part part = part_of(p, CLUSTERED ? blockIdx.x % SPLIT : blockIdx.y);
    const int first_row = blockIdx.z * BN;
    const SentSums sent = {ring + STAGES * STAGE_BYTES, empty + 8 * STAGES, CLUSTERED ? int(cluster_rank()) : 0};
    grid_launch_dependents();
    if (warp == WARPS && lane == 0) {
        tma_prefetch(&p.x);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, WARPS);
        }
        barrier_init_fence();
        async_proxy_fence();
        if (CLUSTERED) sent.begin();
    }
    __syncthreads();
    if (CLUSTERED) cluster_arrive_relaxed();
    if (warp >= WARPS) {
        if (WIDE) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp == WARPS) {
            grid_dependency_wait();
            if (elect_one()) produce(p, part, full, empty, ring, first_row);
        }
        if (CLUSTERED) cluster_wait_together();
        return;
    }
    if (WIDE) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");

    const Stream stream;
    const int tile = min(columns * WARPS + warp, (p.columns + 15) / 16 - 1);
    Chunk ahead[DEPTH];
    #pragma unroll
    for (int d = 0; d < DEPTH; d++) ahead[d] = load_chunk(p.weights, stream, tile, min(part.begin + d, part.end - 1), lane);
    const int column = columns * COLUMNS + threadIdx.x % FOURS * 4;
    const float4 bias = bias_of_four(p.bias, column, p.columns);
    grid_dependency_wait();
    const Masks masks(p.rows >> 31);                // zero
    float acc[BN / 2];
    u32 a[OPERANDS][4];                            // of products that run, and of the next ones
    #pragma unroll
    for (int step = 0; step < LEAD; step++) unpack_operand(a[step], ahead[0], step, masks);
    int stage = 0, previous = -1;
    u32 parity = 0;
    for (int turn = part.begin; turn < part.padded; turn += DEPTH) {
        #pragma unroll
        for (int step = 0; step < DEPTH * STEPS; step++) {
            const int of_stage = step % STAGE_STEPS, next = step + LEAD, own = next / STEPS % DEPTH;
            if (of_stage == 0) barrier_wait(full + 8 * stage, parity);
            wgmma_fence();
            wgmma_pixels(acc, a[step % OPERANDS], wgmma_descriptor<SPAN>(ring + stage * STAGE_BYTES) + 2 * of_stage, (turn - part.begin) | step);
            wgmma_commit();
            wgmma_wait<IN_FLIGHT>();               // registers of the next operand are free
            if (of_stage == IN_FLIGHT - 1 && previous >= 0 && lane == 0) barrier_arrive(empty + 8 * previous);
            unpack_operand(a[next % OPERANDS], ahead[own], next % STEPS, masks);
            if (next % STEPS == STEPS - 1)         // the last one of its chunk
                ahead[own] = load_chunk(p.weights, stream, tile, min(turn + next / STEPS + DEPTH, part.end - 1), lane);
            if (of_stage < STAGE_STEPS - 1) continue;
            previous = stage;
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    }
    wgmma_wait<0>();

    float* total = reinterpret_cast<float*>(shared + BARRIER_BYTES);
#if CLUSTERED
    cluster_wait();                                // all have begun
    sent.send(acc);
    barrier_wait_cluster(sent.barrier, 0);         // nobody sends to a block that has ended: all of its threads wait
    consumers_meet();                              // the ring is read no more: sums take its place
    #pragma unroll
    for (int eight = 0; eight < OWN / 8; eight++) {
        if (eight * 8 >= sent.count()) break;
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        sent.add(sum, eight);
        #pragma unroll
        for (int i = 0; i < 4; i++)
            total[(eight * 8 + lane % 4 * 2 + i % 2) * SUM_PITCH + warp * 16 + lane / 4 + i / 2 * 8] = sum[i];
    }
    consumers_meet();
    const int own_row = first_row + sent.first(), own_count = min(sent.count(), p.rows - own_row) * FOURS;
    for (int i = threadIdx.x; i < own_count; i += CONSUMERS)
        store_four(p, own_row + i / FOURS, column, *reinterpret_cast<const float4*>(total + i / FOURS * SUM_PITCH + i % FOURS * 4), bias);
#else
    consumers_meet();                              // the ring is read no more: sums take its place
    const PartialSums<SPLIT, BN * FOURS> parts = {p.partial, p.arrived, blockIdx.z * gridDim.x + blockIdx.x};
    #pragma unroll
    for (int first = 0; first < BN; first += PASS) {
        put_sums(total, acc, first, warp, lane);
        consumers_meet();
        const int count = min(PASS, p.rows - first_row - first) * FOURS;
        for (int i = threadIdx.x; i < count; i += CONSUMERS) {
            const float4 sum = *reinterpret_cast<const float4*>(total + i / FOURS * SUM_PITCH + i % FOURS * 4);
            if (SPLIT > 1)
                parts.put(blockIdx.y, first * FOURS + i, sum);
            else
                store_four(p, first_row + first + i / FOURS, column, sum, bias);
        }
        consumers_meet();
    }
    if (SPLIT == 1) return;
    __threadfence();
    consumers_meet();
    if (!parts.is_last(reinterpret_cast<u32*>(shared + BARRIER_BYTES), consumers_meet)) return;
    const int count = min(BN, p.rows - first_row) * FOURS;
    for (int i = threadIdx.x; i < count; i += CONSUMERS)
        store_four(p, first_row + i / FOURS, column, parts.sum(i), bias);
#endif
}
