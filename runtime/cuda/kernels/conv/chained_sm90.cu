// Two 1x1 convolutions in sequence, in one kernel for Hopper, by wgmma. Each pixel is a row of channels: 16-bit with fp32 accumulators, or
// 8-bit integers with int32 accumulators.
//
//   middle[pixel, c] = round(first_result(sum_k first[c, k] * pixels[pixel, k], added[pixel, c]))
//   out[pixel, o] = second_result(sum_c second[o, c] * middle[pixel, c], added_last[pixel, o])
//
// Example: the last convolution of a bottleneck and the first of the next bottleneck, with a wide tensor in between. That tensor is stored
// where other operators read it (STORED), but the second convolution never reads it back. In a perceptron with one hidden layer it is not
// stored at all.
//
// Each of GROUPS warpgroups has BN pixels of a tile. Their channels (DEPTH_BLOCKS times 128 bytes) stay in shared memory. The warpgroup
// walks over the middle channels in chunks of 128 bytes. Each chunk has three steps: the first product (two tiles of 64 channels in
// sequence, for 8-bit elements); its epilogue into a buffer of shared memory, where TMA has placed the added tensor; and the second product
// from this buffer, whose accumulators stay in registers for the whole tile. TMA stores the same buffer. Channels are wgmma's M and pixels
// its N, so rows of pixels are operand B of both products, as TMA loads and stores them.
//
// One warp loads weights and pixels; one warp per warpgroup loads its added tensor. Weights of all chunks stay in shared memory
// (STATIONARY), or pass for each tile through two rings of WEIGHT_STAGES chunks, one per product: the first product frees its weights
// earlier. The first weights are loaded before griddepcontrol.wait. Blocks are persistent.
//
// generated.cuh defines GROUPS, BN, DEPTH_BLOCKS, OUT_TILES (times 64 output channels), IMAGES (buffers for a warpgroup's pixels), BUFFERS
// (buffers for a chunk of a warpgroup, at least two), WEIGHT_STAGES, STATIONARY, ADDED, ADDED_LAST, STORED, ITEM (bytes of an element),
// DEPTH_STEPS (times 32 bytes of an image's channels), first_result(), second_result(), first_product() and second_product() (wgmma). For
// 8-bit elements it also defines FIRST_ZERO, SECOND_ZERO (whether a zero point is added), ADDED_UNSIGNED and ADDED_LAST_UNSIGNED.
#include "ptx.cuh"
#include "generated.cuh"
#include "chained_results.cuh"

constexpr int CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + 128;
constexpr int CHUNK = 128 / ITEM, TILES = CHUNK / 64;          // channels of a row of shared memory; wgmma tiles of 64 in it
constexpr int OUT_ROWS = (OUT_TILES + TILES - 1) / TILES;      // buffers of a tile's output
constexpr u32 MATRIX_BYTES = 64 * 128;             // 64 output channels x CHUNK input channels
constexpr u32 ROWS_BYTES = BN * 128;               // CHUNK channels of a warpgroup's pixels
constexpr u32 IMAGE_BYTES = DEPTH_BLOCKS * ROWS_BYTES, FIRST_BYTES = TILES * DEPTH_BLOCKS * MATRIX_BYTES, SECOND_BYTES = OUT_TILES * MATRIX_BYTES;
constexpr u32 HEAD_BYTES = 1024;
static_assert(BUFFERS >= 2 && BN % (ITEM == 1 ? 32 : 16) == 0 && GROUPS <= 3, "a form of this kernel");

struct Params {
    TensorMap first, second;                       // weights: (input channel, output channel)
    TensorMap pixels, added, middle, added_last, output;       // (channel, pixel)
    const Channel* first_bias;                     // padded to whole chunks
    const Channel* second_bias;                    // [OUT_TILES * 64]
    int chunks, tiles;
#if ITEM == 1
    Requantize first_numbers, second_numbers;
#endif
};

// The epilogues of the first and of the second product.
struct First {
    static constexpr bool WITH_ADDED = ADDED;
#if ITEM == 1
    static constexpr bool ZERO = FIRST_ZERO, UNSIGNED = ADDED_UNSIGNED;
    const Requantize& numbers;
    __device__ __forceinline__ explicit First(const Params& p) : numbers(p.first_numbers) {}
    __device__ __forceinline__ float operator()(float x, float c, float r) const { return first_result(x, c, r, numbers.constants); }
#else
    __device__ __forceinline__ explicit First(const Params&) {}
    __device__ __forceinline__ float operator()(float x, float c, float r) const { return first_result(x, c, r); }
#endif
};
struct Second {
    static constexpr bool WITH_ADDED = ADDED_LAST;
#if ITEM == 1
    static constexpr bool ZERO = SECOND_ZERO, UNSIGNED = ADDED_LAST_UNSIGNED;
    const Requantize& numbers;
    __device__ __forceinline__ explicit Second(const Params& p) : numbers(p.second_numbers) {}
    __device__ __forceinline__ float operator()(float x, float c, float r) const { return second_result(x, c, r, numbers.constants); }
#else
    __device__ __forceinline__ explicit Second(const Params&) {}
    __device__ __forceinline__ float operator()(float x, float c, float r) const { return second_result(x, c, r); }
#endif
};

// Barriers, as offsets from the beginning of shared memory.
constexpr u32 FIRST_FULL = 0, FIRST_EMPTY = FIRST_FULL + 8 * WEIGHT_STAGES;
constexpr u32 SECOND_FULL = FIRST_EMPTY + 8 * WEIGHT_STAGES, SECOND_EMPTY = SECOND_FULL + 8 * WEIGHT_STAGES;
constexpr u32 IMAGE_FULL = SECOND_EMPTY + 8 * WEIGHT_STAGES, IMAGE_EMPTY = IMAGE_FULL + 8 * IMAGES * GROUPS;
constexpr u32 READY = IMAGE_EMPTY + 8 * IMAGES * GROUPS, FREE = READY + 8 * BUFFERS * GROUPS;
static_assert(FREE + 8 * BUFFERS * GROUPS <= HEAD_BYTES, "room for barriers");
// Then operands: weights, the images of each warpgroup, the buffers of each warpgroup.
constexpr u32 FIRST = HEAD_BYTES, SECOND = FIRST + WEIGHT_STAGES * FIRST_BYTES, IMAGE = SECOND + WEIGHT_STAGES * SECOND_BYTES;
constexpr u32 BUFFER = IMAGE + IMAGES * GROUPS * IMAGE_BYTES;

struct Ring {                                      // a position in a ring of COUNT, and the parity of its pass
    int at = 0, parity = 0;
    template <int COUNT> __device__ __forceinline__ void next() {
        if (++at == COUNT) at = 0, parity ^= 1;
    }
};

// Loads a chunk's weights of the first product.
DEVICE void load_first(const Params& p, u32 base, int stage, int chunk) {
    const u32 full = base + FIRST_FULL + 8 * stage, to = base + FIRST + stage * FIRST_BYTES;
    barrier_expect(full, FIRST_BYTES);
    #pragma unroll 1
    for (int i = 0; i < TILES * DEPTH_BLOCKS; i++)
        tma_load_2d(to + i * MATRIX_BYTES, &p.first, full, i % DEPTH_BLOCKS * CHUNK, chunk * CHUNK + i / DEPTH_BLOCKS * 64);
}

// Loads a chunk's weights of the second product.
DEVICE void load_second(const Params& p, u32 base, int stage, int chunk) {
    const u32 full = base + SECOND_FULL + 8 * stage, to = base + SECOND + stage * SECOND_BYTES;
    barrier_expect(full, SECOND_BYTES);
    #pragma unroll 1
    for (int i = 0; i < OUT_TILES; i++) tma_load_2d(to + i * MATRIX_BYTES, &p.second, full, chunk * CHUNK, i * 64);
}

// The warp that loads weights and pixels.
DEVICE void load_operands(const Params& p, u32 base) {
    const int primed = min(p.chunks, WEIGHT_STAGES);
    for (int i = 0; i < primed; i++) {
        load_first(p, base, i, i);
        load_second(p, base, i, i);
    }
    Ring weights, image;
    for (int i = 0; i < primed; i++) weights.next<WEIGHT_STAGES>();
    grid_dependency_wait();
    for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        #pragma unroll 1
        for (int group = 0; group < GROUPS; group++) {
            const int which = image.at * GROUPS + group;
            barrier_wait(base + IMAGE_EMPTY + 8 * which, image.parity ^ 1);
            barrier_expect(base + IMAGE_FULL + 8 * which, IMAGE_BYTES);
            for (int i = 0; i < DEPTH_BLOCKS; i++)
                tma_load_2d(base + IMAGE + which * IMAGE_BYTES + i * ROWS_BYTES, &p.pixels, base + IMAGE_FULL + 8 * which, i * CHUNK,
                            (tile * GROUPS + group) * BN);
        }
        image.next<IMAGES>();
        if (STATIONARY) continue;
        #pragma unroll 1
        for (int chunk = tile == blockIdx.x ? primed : 0; chunk < p.chunks; chunk++) {
            barrier_wait(base + FIRST_EMPTY + 8 * weights.at, weights.parity ^ 1);
            load_first(p, base, weights.at, chunk);
            barrier_wait(base + SECOND_EMPTY + 8 * weights.at, weights.parity ^ 1);
            load_second(p, base, weights.at, chunk);
            weights.next<WEIGHT_STAGES>();
        }
    }
}

// The warp that passes buffers to a warpgroup, filled with the added tensor.
DEVICE void load_added(const Params& p, u32 base, int group) {
    grid_dependency_wait();
    Ring ring;
    for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        #pragma unroll 1
        for (int i = 0; i < p.chunks + OUT_ROWS; i++) {
            const int which = ring.at * GROUPS + group, last = i - p.chunks;
            barrier_wait(base + FREE + 8 * which, ring.parity ^ 1);
            const u32 ready = base + READY + 8 * which, to = base + BUFFER + which * ROWS_BYTES;
            const int pixel = (tile * GROUPS + group) * BN;
            if (ADDED && last < 0) {
                barrier_expect(ready, ROWS_BYTES);
                tma_load_2d(to, &p.added, ready, i * CHUNK, pixel);
            } else if (ADDED_LAST && last >= 0) {
                barrier_expect(ready, ROWS_BYTES);
                tma_load_2d(to, &p.added_last, ready, last * CHUNK, pixel);
            } else {
                barrier_arrive(ready);
            }
            ring.next<BUFFERS>();
        }
    }
}

// The work of one warpgroup.
DEVICE void convolve(const Params& p, u32 base, int group, int quarter, int lane) {
    Acc sum[BN / 2], last[OUT_TILES][BN / 2];
    Ring weights, image, ring;
    int held = -1;                                 // the last filled buffer
    auto give_back = [&] {                         // once its readers are done
        if (held < 0) return;
        if (quarter == 0 && elect_one()) tma_store_wait_read<0>();       // always the same lane: bulk groups belong to a thread
        __syncwarp();
        if (lane == 0) barrier_arrive(base + FREE + 8 * held);
    };
    auto weights_read = [&](u32 empty) {           // by this warp
        if (!STATIONARY && lane == 0) barrier_arrive(empty);
    };
    auto store = [&](const TensorMap* map, int which, int channel, int tile) {
        if (quarter != 0 || !elect_one()) return;
        tma_store_2d(map, base + BUFFER + which * ROWS_BYTES, channel, (tile * GROUPS + group) * BN);
        tma_store_commit();
    };
    grid_dependency_wait();
    for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        const int own = image.at * GROUPS + group;
        int before = 0;                            // the stage of the previous chunk's weights
        barrier_wait(base + IMAGE_FULL + 8 * own, image.parity);
        #pragma unroll 1
        for (int chunk = 0; chunk < p.chunks; chunk++) {
            const int stage = STATIONARY ? chunk : weights.at, which = ring.at * GROUPS + group;
            const u32 first = base + FIRST + stage * FIRST_BYTES, second = base + SECOND + stage * SECOND_BYTES;
            const u32 rows = base + BUFFER + which * ROWS_BYTES, parity = STATIONARY ? 0 : weights.parity;
            #pragma unroll
            for (int t = 0; t < TILES; t++) {
                Channel bias[2];
                load_bias(p.first_bias, chunk * CHUNK + t * 64 + quarter * 16, lane, bias);
                if (t == 0) barrier_wait(base + FIRST_FULL + 8 * stage, parity);
                wgmma_fence();
                #pragma unroll
                for (int step = 0; step < DEPTH_STEPS; step++) {
                    const int k = step / 4;
                    const u64 a = wgmma_descriptor<128>(first + (t * DEPTH_BLOCKS + k) * MATRIX_BYTES);
                    const u64 b = wgmma_descriptor<128>(base + IMAGE + own * IMAGE_BYTES + k * ROWS_BYTES);
                    first_product(sum, a + step % 4 * 2, b + step % 4 * 2, step != 0);
                }
                wgmma_commit();
                if (t == 0) {
                    wgmma_wait<1>();               // the second product of the previous chunk
                    give_back();
                    if (chunk > 0) weights_read(base + SECOND_EMPTY + 8 * before);
                }
                wgmma_wait<0>();
                if (t == TILES - 1) {
                    weights_read(base + FIRST_EMPTY + 8 * stage);
                    if (chunk == p.chunks - 1 && lane == 0) barrier_arrive(base + IMAGE_EMPTY + 8 * own);
                }
                if (t == 0) barrier_wait(base + READY + 8 * which, ring.parity);
                finish_rows<BN>(rows, t, sum, bias, quarter, lane, First(p));
            }
            async_proxy_fence();
            named_barrier(1 + group, 128);
            if (STORED) store(&p.middle, which, chunk * CHUNK, tile);
            barrier_wait(base + SECOND_FULL + 8 * stage, parity);
            wgmma_fence();
            const u64 b = wgmma_descriptor<128>(rows);
            #pragma unroll
            for (int step = 0; step < 4; step++) {
                #pragma unroll
                for (int m = 0; m < OUT_TILES; m++)
                    second_product(last[m], wgmma_descriptor<128>(second + m * MATRIX_BYTES) + 2 * step, b + 2 * step, (chunk | step) != 0);
            }
            wgmma_commit();
            held = which, before = stage;
            weights.next<WEIGHT_STAGES>();
            ring.next<BUFFERS>();
        }
        wgmma_wait<0>();
        weights_read(base + SECOND_EMPTY + 8 * before);
        #pragma unroll
        for (int r = 0; r < OUT_ROWS; r++) {
            const int which = ring.at * GROUPS + group;
            barrier_wait(base + READY + 8 * which, ring.parity);
            #pragma unroll
            for (int t = 0; t < TILES && r * TILES + t < OUT_TILES; t++) {
                Channel bias[2];
                load_bias(p.second_bias, (r * TILES + t) * 64 + quarter * 16, lane, bias);
                finish_rows<BN>(base + BUFFER + which * ROWS_BYTES, t, last[r * TILES + t], bias, quarter, lane, Second(p));
            }
            async_proxy_fence();
            named_barrier(1 + group, 128);
            give_back();
            store(&p.output, which, r * CHUNK, tile);
            held = which;
            ring.next<BUFFERS>();
        }
        image.next<IMAGES>();
    }
    if (quarter == 0 && elect_one()) tma_store_wait_read<0>();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) chained_sm90(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 shared[];
    const u32 base = smem_address(shared);
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;   // warp-uniform, and the compiler knows it
    if (warp == CONSUMERS / 32 && lane == 0) {
        tma_prefetch(&p.first);
        tma_prefetch(&p.second);
        tma_prefetch(&p.pixels);
        for (int i = 0; i < WEIGHT_STAGES; i++) {
            barrier_init(base + FIRST_FULL + 8 * i, 1);
            barrier_init(base + SECOND_FULL + 8 * i, 1);
            barrier_init(base + FIRST_EMPTY + 8 * i, GROUPS * 4);
            barrier_init(base + SECOND_EMPTY + 8 * i, GROUPS * 4);
        }
        for (int i = 0; i < IMAGES * GROUPS; i++) {
            barrier_init(base + IMAGE_FULL + 8 * i, 1);
            barrier_init(base + IMAGE_EMPTY + 8 * i, 4);
        }
        for (int i = 0; i < BUFFERS * GROUPS; i++) {
            barrier_init(base + READY + 8 * i, 1);
            barrier_init(base + FREE + 8 * i, 4);
        }
        barrier_init_fence();
        async_proxy_fence();
    }
    __syncthreads();
    grid_launch_dependents();
    // The loading warps, a whole warpgroup, give registers to the multiplying warps.
    if (warp >= CONSUMERS / 32) {
        if (GROUPS > 1) give_registers<GROUPS == 2 ? 40 : 32>();
        if (warp == CONSUMERS / 32) {
            if (elect_one()) load_operands(p, base);
        } else if (warp - CONSUMERS / 32 <= GROUPS) {
            if (elect_one()) load_added(p, base, warp - CONSUMERS / 32 - 1);
        }
    } else {
        if (GROUPS > 1) take_registers<GROUPS == 2 ? 232 : 160>();
        convolve(p, base, warp / 4, warp % 4, lane);
    }
}
