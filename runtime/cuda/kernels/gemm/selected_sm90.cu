// selected_tiles.cu on Hopper, for 16-bit operands: wgmma, the weights by TMA.
//
// Each of one or two warpgroups multiplies 64 rows of a tile. Two more warps fill the ring: their threads gather the rows by cp.async, in the
// order in which TMA would store them, and one thread loads the weights. Sums take the place of the ring before they are stored.
//
// generated.cuh defines BM (64 or 128), BN, STAGES, RESIDENT (blocks per multiprocessor), RESULT_FLOAT, VECTORS and wgmma_step().
#include "ptx.cuh"
#include "mma.cuh"
#include "generated.cuh"

struct Params {
    TensorMap weights;                             // [matrices * n][k], in boxes of BN columns x 64 of K
    void* y;                                       // [rows][y_pitch]
    const u16* x;                                  // [rows / times][x_pitch]
    const long long* index;                        // [rows]; counted from the end if negative
    int rows, n, k, times, x_pitch;
    long long matrices, y_pitch;
};

constexpr int GROUPS = BM / 64, CONSUMERS = 128 * GROUPS, LOADERS = 2, THREADS = CONSUMERS + 32 * LOADERS;   // LOADERS: warps
constexpr int SPAN = 128, BK = SPAN / 2, ROW_BYTES = BM * SPAN, STAGE_BYTES = ROW_BYTES + BN * SPAN, BARRIER_BYTES = 1024;
// Steps that a loading thread has in flight beside the last one. A stage is given back after the next step has arrived, so one is left over.
constexpr int LAG = STAGES - 2;
constexpr int APART = 4 * LOADERS, LINES = BM / APART;   // such a thread copies 16 bytes of LINES rows
constexpr int INDICES = 4, LANES = 8, PITCH = BN + LANES;
constexpr u32 NOWHERE = ~0u;
#if RESULT_FLOAT
typedef float Result;
#else
typedef u16 Result;
#endif
static_assert(BM * PITCH * int(sizeof(Result)) <= STAGES * STAGE_BYTES, "sums take the place of the ring");

DEVICE void meet() { named_barrier(1, THREADS); }
#include "selected_rows.cuh"

struct Ring {
    u32 full, empty, stages;
    int index = 0;                                 // of the current stage, and the parity of its fill
    u32 parity = 0;

    __device__ __forceinline__ u32 rows() const { return stages + index * STAGE_BYTES; }
    __device__ __forceinline__ u32 weights() const { return rows() + ROW_BYTES; }
    __device__ __forceinline__ void next() {
        if (++index == STAGES) index = 0, parity ^= 1;
    }
};

// The rows of step - LAG, or earlier, have arrived: says so to the multiplying warpgroups.
DEVICE void announce(const Ring& ring, int stage) {
    async_proxy_fence();
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(ring.full + 8 * stage);
}

// Loads a tile's rows, ``count`` of the list, and weights.
DEVICE void load_tile(const Params& p, Ring& ring, const int* list, int count) {
    const int thread = threadIdx.x - CONSUMERS, piece = thread % 8, line = thread / 8, steps = (p.k + BK - 1) / BK;
    u32 source[LINES];
    #pragma unroll
    for (int i = 0; i < LINES; i++) {
        const int row = line + APART * i;
        source[i] = row < count ? u32(list[row]) / u32(p.times) * u32(p.x_pitch) + piece * 8 : NOWHERE;
    }
    const u32 place = line * SPAN + ((piece ^ (line & 7)) << 4);           // rows APART apart are swizzled alike
    int ready = ring.index;
    for (int step = 0; step < steps; step++, ring.next()) {
        barrier_wait(ring.empty + 8 * ring.index, ring.parity ^ 1);
        if (thread / 32 == 0 && elect_one()) {
            barrier_expect(ring.full + 8 * ring.index, BN * SPAN);
            tma_load_2d(ring.weights(), &p.weights, ring.full + 8 * ring.index, step * BK, int(blockIdx.y) * p.n + int(blockIdx.x) * BN);
        }
        __syncwarp();
        const bool inside = step * BK + piece * 8 < p.k;
        #pragma unroll
        for (int i = 0; i < LINES; i++) {
            const bool valid = inside && source[i] != NOWHERE;
            copy_16_or_zeros(ring.rows() + place + i * APART * SPAN, valid ? p.x + source[i] + step * BK : p.x, valid ? 16 : 0);
        }
        copies_commit();
        if (step >= LAG) {
            copies_wait_but<LAG>();
            announce(ring, ready);
            ready = ready + 1 == STAGES ? 0 : ready + 1;
        }
    }
    copies_wait_but<0>();
    for (int i = 0; i < min(LAG, steps); i++) {
        announce(ring, ready);
        ready = ready + 1 == STAGES ? 0 : ready + 1;
    }
}

DEVICE void put(float* to, float a, float b) { *reinterpret_cast<float2*>(to) = make_float2(a, b); }
DEVICE void put(u16* to, float a, float b) { *reinterpret_cast<u32*>(to) = pack2(a, b); }

// Multiplies a tile, and stores its sums.
DEVICE void multiply_tile(const Params& p, Ring& ring, u8* shared, const int* list, int count) {
    const int group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = thread % 32, steps = (p.k + BK - 1) / BK;
    float acc[BN / 2];
    int last = 0;                                  // the stage of the step before
    for (int step = 0; step < steps; step++, ring.next()) {
        barrier_wait(ring.full + 8 * ring.index, ring.parity);
        const u64 a = wgmma_descriptor<SPAN>(ring.rows() + group * 64 * SPAN), b = wgmma_descriptor<SPAN>(ring.weights());
        wgmma_fence();
        #pragma unroll
        for (int i = 0; i < 4; i++) wgmma_step(acc, a + 2 * i, b + 2 * i, step || i);
        wgmma_commit();
        wgmma_wait<1>();
        if (step && thread == 0) barrier_arrive(ring.empty + 8 * last);
        last = ring.index;
    }
    wgmma_wait<0>();
    if (thread == 0) barrier_arrive(ring.empty + 8 * last);
    named_barrier(2, CONSUMERS);                   // nobody reads the ring any more
    Result* const sums = reinterpret_cast<Result*>(shared + BARRIER_BYTES) + group * 64 * PITCH;
    Result* const own = sums + (thread / 32 * 16 + lane / 4) * PITCH + lane % 4 * 2;
    #pragma unroll
    for (int j = 0; j < BN / 8; j++) {
        put(own + j * 8, acc[4 * j], acc[4 * j + 1]);
        put(own + j * 8 + 8 * PITCH, acc[4 * j + 2], acc[4 * j + 3]);
    }
    named_barrier(3 + group, 128);
    const int first = blockIdx.x * BN;
    for (int at = thread; at < 64 * BN / LANES; at += 128) {
        const int i = at / (BN / LANES), j = at % (BN / LANES) * LANES, row = group * 64 + i, left = p.n - first - j;
        if (row >= count || left <= 0) continue;
        const Result* from = sums + i * PITCH + j;
        Result* to = static_cast<Result*>(p.y) + list[row] * p.y_pitch + first + j;
        if (VECTORS) {
            #pragma unroll
            for (int k = 0; k < LANES * int(sizeof(Result)) / 16; k++) reinterpret_cast<uint4*>(to)[k] = reinterpret_cast<const uint4*>(from)[k];
        } else {
            for (int k = 0; k < min(left, LANES); k++) to[k] = from[k];
        }
    }
    async_proxy_fence();                           // TMA fills the ring again
}

template <bool LOADS> DEVICE void run(const Params& p, Ring ring, u8* shared) {
    int* const list = reinterpret_cast<int*>(shared + BARRIER_BYTES + STAGES * STAGE_BYTES);
    Rows rows = {list, list + BM + CHUNK, 0, 0, int(blockIdx.y)};
    for (int tile = 0;; tile++, rows.drop()) {
        const int count = rows.find(p);
        if (!count) return;
        if (tile % gridDim.z != blockIdx.z) continue;
        if (LOADS) load_tile(p, ring, list, count);
        else multiply_tile(p, ring, shared, list, count);
        meet();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) selected_sm90(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 shared[];
    const u32 base = smem_address(shared);
    const Ring ring = {base, base + 8 * STAGES, base + BARRIER_BYTES};
    grid_launch_dependents();
    if (threadIdx.x == 0) {
        tma_prefetch(&p.weights);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(ring.full + 8 * i, LOADERS + 1);
            barrier_init(ring.empty + 8 * i, GROUPS);
        }
        barrier_init_fence();
        async_proxy_fence();
    }
    __syncthreads();
    grid_dependency_wait();
    if (threadIdx.x >= CONSUMERS) run<true>(p, ring, shared);
    else run<false>(p, ring, shared);
}
