// Many rows times packed weights on Hopper: wgmma whose operand A are weights that become 16-bit floats in registers. fp32 sums.
//
//   out[m, column] = epilogue(sum_k x[m, k] * (number[column, k] - zero) * scale)
//
// A block takes 128 columns, 16 of each of eight warps in two warpgroups, and BN rows. One warp brings rows by TMA into a ring of STAGES
// stages of 64 of K. Weights come straight from memory to the registers of the warp that multiplies them, DEPTH chunks of each lane in
// flight; the first are on their way before griddepcontrol.wait. While the products of a stage run, the next stage's weights are unpacked.
// SPLIT blocks share K where tiles are few: their sums go through memory (packed_mma.cu says how), or, CLUSTERED, the blocks of a cluster send
// them to one another, each of which finishes BN / SPLIT rows.
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
constexpr int PASS = BN < 64 ? BN : 64, SUM_PITCH = COLUMNS + 4;   // rows of sums in shared memory at a time
static_assert(DEPTH * STAGES_OF_CHUNK % 2 == 0, "registers of operand A take turns");
static_assert(BN % PASS == 0, "sums go in whole passes");
static_assert(STAGES * STAGE_BYTES >= PASS * SUM_PITCH * 4, "sums take the place of the ring");
constexpr int OWN = BN / SPLIT;                    // rows that a block of a cluster finishes
static_assert(!CLUSTERED || (OWN % 8 == 0 && OWN <= PASS), "rows of a block go in one pass");

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

    // By one thread.
    __device__ __forceinline__ void begin() const {
        barrier_init(barrier, 1);
        barrier_init_fence();
        barrier_expect(barrier, BN * COLUMNS * 4);
    }
    __device__ __forceinline__ u32 place(int part, int eight) const { return fours + ((part * (OWN / 8) + eight) * CONSUMERS + threadIdx.x) * 16; }
    // Sends each block, this one among them, the sums of its rows.
    __device__ __forceinline__ void send(const float (&acc)[BN / 2]) const {
        #pragma unroll
        for (int j = 0; j < BN / 8; j++)
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
    float acc[BN / 2];
    u32 a[2][4][4];                                // of products that run, and of the next ones
    int stage = 0, previous = -1;
    u32 parity = 0;
    for (int turn = part.begin; turn < part.padded; turn += DEPTH) {
        #pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            #pragma unroll
            for (int half = 0; half < STAGES_OF_CHUNK; half++) {
                barrier_wait(full + 8 * stage, parity);
                u32 (&own)[4][4] = a[(d * STAGES_OF_CHUNK + half) % 2];
                #pragma unroll
                for (int i = 0; i < 4; i++) unpack_operand(own[i], ahead[d], half * 4 + i);
                const u64 rows = wgmma_descriptor<SPAN>(ring + stage * STAGE_BYTES);
                wgmma_fence();
                #pragma unroll
                for (int i = 0; i < 4; i++) wgmma_pixels(acc, own[i], rows + 2 * i, (turn - part.begin) | d | half | i);
                wgmma_commit();
                wgmma_wait<1>();                   // the products before these: their stage is free, and their registers
                if (previous >= 0 && lane == 0) barrier_arrive(empty + 8 * previous);
                previous = stage;
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
            ahead[d] = load_chunk(p.weights, stream, tile, min(turn + d + DEPTH, part.end - 1), lane);
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
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        sent.add(sum, eight);
        #pragma unroll
        for (int i = 0; i < 4; i++)
            total[(eight * 8 + lane % 4 * 2 + i % 2) * SUM_PITCH + warp * 16 + lane / 4 + i / 2 * 8] = sum[i];
    }
    consumers_meet();
    const int own_row = first_row + sent.rank * OWN, own_count = min(OWN, p.rows - own_row) * FOURS;
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
