// Two 1x1 convolutions, one after the other, in one kernel for Hopper: 16-bit rows of channels, one for each pixel, fp32 sums, wgmma.
//
//   middle[pixel, c] = round(first_result(sum_k first[c, k] * pixels[pixel, k], added[pixel, c]))
//   out[pixel, o] = second_result(sum_c second[o, c] * middle[pixel, c], added_last[pixel, o])
//
// A bottleneck's last convolution and the first one of the next are such: what lies between is wide. It is stored where others read it
// (STORED), but never read again for the second convolution. Of a perceptron with one hidden layer it is not even stored.
//
// Each of GROUPS warpgroups has BN pixels of a tile, whose channels (DEPTH_BLOCKS times 64) stay in shared memory. It walks over the middle
// channels in chunks of 64: the first product, its epilogue into a buffer of shared memory (where TMA has put what is added), and from
// there the second product, whose sums stay in registers for the whole tile. The buffer is what TMA stores as well. Channels lie on wgmma's
// M and pixels on its N, so rows of pixels are operand B of both products, as TMA loads and stores them.
//
// One warp loads weights and pixels, one for each warpgroup what it adds. Weights of all chunks stay in shared memory (STATIONARY), or go
// through two rings of WEIGHT_STAGES chunks for each tile, one for each product: the first product's are free earlier. They come before
// griddepcontrol.wait. Blocks are persistent.
//
// generated.cuh defines GROUPS, BN, DEPTH_BLOCKS, OUT_TILES (times 64 output channels), IMAGES (buffers of a warpgroup's pixels), BUFFERS
// (of 64 channels of them, at least two), WEIGHT_STAGES, STATIONARY, ADDED, ADDED_LAST, STORED, first_result(), second_result() and
// wgmma_step().
#include "ptx.cuh"
#include "generated.cuh"

constexpr int CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + 128;
constexpr u32 MATRIX_BYTES = 64 * 128;             // 64 channels of a result, 64 that are summed
constexpr u32 ROWS_BYTES = BN * 128;               // 64 channels of a warpgroup's pixels
constexpr u32 IMAGE_BYTES = DEPTH_BLOCKS * ROWS_BYTES, FIRST_BYTES = DEPTH_BLOCKS * MATRIX_BYTES, SECOND_BYTES = OUT_TILES * MATRIX_BYTES;
constexpr u32 HEAD_BYTES = 1024;
static_assert(BUFFERS >= 2 && BN % 16 == 0 && GROUPS <= 3, "a form of this kernel");

struct Params {
    TensorMap first, second;                       // weights: (input channel, output channel)
    TensorMap pixels, added, middle, added_last, output;       // (channel, pixel)
    const float* first_bias;                       // of whole chunks
    const float* second_bias;                      // [OUT_TILES * 64]
    int chunks, tiles;
};

// Barriers, by their places from the beginning of shared memory on.
constexpr u32 FIRST_FULL = 0, FIRST_EMPTY = FIRST_FULL + 8 * WEIGHT_STAGES;
constexpr u32 SECOND_FULL = FIRST_EMPTY + 8 * WEIGHT_STAGES, SECOND_EMPTY = SECOND_FULL + 8 * WEIGHT_STAGES;
constexpr u32 IMAGE_FULL = SECOND_EMPTY + 8 * WEIGHT_STAGES, IMAGE_EMPTY = IMAGE_FULL + 8 * IMAGES * GROUPS;
constexpr u32 READY = IMAGE_EMPTY + 8 * IMAGES * GROUPS, FREE = READY + 8 * BUFFERS * GROUPS;
static_assert(FREE + 8 * BUFFERS * GROUPS <= HEAD_BYTES, "room for barriers");
// Then operands: weights, images of each warpgroup, buffers of each.
constexpr u32 FIRST = HEAD_BYTES, SECOND = FIRST + WEIGHT_STAGES * FIRST_BYTES, IMAGE = SECOND + WEIGHT_STAGES * SECOND_BYTES;
constexpr u32 BUFFER = IMAGE + IMAGES * GROUPS * IMAGE_BYTES;

struct Ring {                                      // a place in a ring of COUNT, and how often it was passed
    int at = 0, parity = 0;
    template <int COUNT> __device__ __forceinline__ void next() {
        if (++at == COUNT) at = 0, parity ^= 1;
    }
};

// A chunk's weights of the first product.
DEVICE void load_first(const Params& p, u32 base, int stage, int chunk) {
    const u32 full = base + FIRST_FULL + 8 * stage, to = base + FIRST + stage * FIRST_BYTES;
    barrier_expect(full, FIRST_BYTES);
    #pragma unroll 1
    for (int i = 0; i < DEPTH_BLOCKS; i++) tma_load_2d(to + i * MATRIX_BYTES, &p.first, full, i * 64, chunk * 64);
}

// Of the second.
DEVICE void load_second(const Params& p, u32 base, int stage, int chunk) {
    const u32 full = base + SECOND_FULL + 8 * stage, to = base + SECOND + stage * SECOND_BYTES;
    barrier_expect(full, SECOND_BYTES);
    #pragma unroll 1
    for (int i = 0; i < OUT_TILES; i++) tma_load_2d(to + i * MATRIX_BYTES, &p.second, full, chunk * 64, i * 64);
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
                tma_load_2d(base + IMAGE + which * IMAGE_BYTES + i * ROWS_BYTES, &p.pixels, base + IMAGE_FULL + 8 * which, i * 64, (tile * GROUPS + group) * BN);
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

// The warp that hands buffers to a warpgroup, with what is added.
DEVICE void load_added(const Params& p, u32 base, int group) {
    grid_dependency_wait();
    Ring ring;
    for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        #pragma unroll 1
        for (int i = 0; i < p.chunks + OUT_TILES; i++) {
            const int which = ring.at * GROUPS + group, last = i - p.chunks;
            barrier_wait(base + FREE + 8 * which, ring.parity ^ 1);
            const u32 ready = base + READY + 8 * which, to = base + BUFFER + which * ROWS_BYTES;
            const int pixel = (tile * GROUPS + group) * BN;
            if (ADDED && last < 0) {
                barrier_expect(ready, ROWS_BYTES);
                tma_load_2d(to, &p.added, ready, i * 64, pixel);
            } else if (ADDED_LAST && last >= 0) {
                barrier_expect(ready, ROWS_BYTES);
                tma_load_2d(to, &p.added_last, ready, last * 64, pixel);
            } else {
                barrier_arrive(ready);
            }
            ring.next<BUFFERS>();
        }
    }
}

// Sums of a warp's 16 channels and all pixels -> results in rows of a buffer, which hold what is added before.
template <bool WITH_ADDED, class Finish>
DEVICE void finish_rows(u32 buffer, const float (&sum)[BN / 2], const float (&bias)[2], int quarter, int lane, const Finish& finish) {
    // Lane l names row l % 8 (a pixel) of matrix l / 8: matrices 0, 1 are channels 0-7, 8-15 of pixels 0-7; 2, 3 of 8-15.
    const u32 row = buffer + ((lane >> 4) * 8 + (lane & 7)) * 128 + (((quarter * 2 + ((lane >> 3) & 1)) ^ (lane & 7)) << 4);
    constexpr int ALL = BN / 16, TOGETHER = 4;     // so many loads are on their way at once
    #pragma unroll
    for (int begin = 0; begin < ALL; begin += TOGETHER) {
        u32 r[TOGETHER][4] = {};
        #pragma unroll
        for (int j = begin; WITH_ADDED && j < min(begin + TOGETHER, ALL); j++)
            ldmatrix_x4_trans(row + j * 16 * 128, r[j - begin][0], r[j - begin][1], r[j - begin][2], r[j - begin][3]);
        #pragma unroll
        for (int j = begin; j < min(begin + TOGETHER, ALL); j++) {
            u32 y[4];
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* v = &sum[j * 8 + i * 2];
                const u32 added = r[j - begin][i];
                y[i] = pack2(finish(v[0], bias[i % 2], low_float(added)), finish(v[1], bias[i % 2], high_float(added)));
            }
            stmatrix_x4_trans(row + j * 16 * 128, y[0], y[1], y[2], y[3]);
        }
    }
}

DEVICE void load_bias(const float* from, int channel, int lane, float (&bias)[2]) {
    bias[0] = __ldg(from + channel + lane / 4), bias[1] = __ldg(from + channel + lane / 4 + 8);
}

// A warpgroup's part.
DEVICE void convolve(const Params& p, u32 base, int group, int quarter, int lane) {
    float sum[BN / 2], last[OUT_TILES][BN / 2];
    Ring weights, image, ring;
    int held = -1;                                 // the buffer that was filled last
    auto give_back = [&] {                         // when nothing reads it any more
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
        int before = 0;                            // the stage of the weights before
        barrier_wait(base + IMAGE_FULL + 8 * own, image.parity);
        #pragma unroll 1
        for (int chunk = 0; chunk < p.chunks; chunk++) {
            const int stage = STATIONARY ? chunk : weights.at, which = ring.at * GROUPS + group;
            const u32 first = base + FIRST + stage * FIRST_BYTES, second = base + SECOND + stage * SECOND_BYTES;
            const u32 rows = base + BUFFER + which * ROWS_BYTES, parity = STATIONARY ? 0 : weights.parity;
            float bias[2];
            load_bias(p.first_bias, chunk * 64 + quarter * 16, lane, bias);
            barrier_wait(base + FIRST_FULL + 8 * stage, parity);
            wgmma_fence();
            #pragma unroll
            for (int k = 0; k < DEPTH_BLOCKS; k++) {
                const u64 a = wgmma_descriptor<128>(first + k * MATRIX_BYTES);
                const u64 b = wgmma_descriptor<128>(base + IMAGE + own * IMAGE_BYTES + k * ROWS_BYTES);
                #pragma unroll
                for (int step = 0; step < 4; step++) wgmma_step(sum, a + 2 * step, b + 2 * step, (k | step) != 0);
            }
            wgmma_commit();
            wgmma_wait<1>();                       // the second product of the chunk before
            give_back();
            if (chunk > 0) weights_read(base + SECOND_EMPTY + 8 * before);
            wgmma_wait<0>();
            weights_read(base + FIRST_EMPTY + 8 * stage);
            if (chunk == p.chunks - 1 && lane == 0) barrier_arrive(base + IMAGE_EMPTY + 8 * own);
            barrier_wait(base + READY + 8 * which, ring.parity);
            finish_rows<ADDED>(rows, sum, bias, quarter, lane, [](float x, float c, float r) { return first_result(x, c, r); });
            async_proxy_fence();
            named_barrier(1 + group, 128);
            if (STORED) store(&p.middle, which, chunk * 64, tile);
            barrier_wait(base + SECOND_FULL + 8 * stage, parity);
            wgmma_fence();
            const u64 b = wgmma_descriptor<128>(rows);
            #pragma unroll
            for (int step = 0; step < 4; step++) {
                #pragma unroll
                for (int m = 0; m < OUT_TILES; m++)
                    wgmma_step(last[m], wgmma_descriptor<128>(second + m * MATRIX_BYTES) + 2 * step, b + 2 * step, (chunk | step) != 0);
            }
            wgmma_commit();
            held = which, before = stage;
            weights.next<WEIGHT_STAGES>();
            ring.next<BUFFERS>();
        }
        wgmma_wait<0>();
        weights_read(base + SECOND_EMPTY + 8 * before);
        #pragma unroll
        for (int m = 0; m < OUT_TILES; m++) {
            const int which = ring.at * GROUPS + group;
            float bias[2];
            load_bias(p.second_bias, m * 64 + quarter * 16, lane, bias);
            barrier_wait(base + READY + 8 * which, ring.parity);
            finish_rows<ADDED_LAST>(base + BUFFER + which * ROWS_BYTES, last[m], bias, quarter, lane,
                                    [](float x, float c, float r) { return second_result(x, c, r); });
            async_proxy_fence();
            named_barrier(1 + group, 128);
            give_back();
            store(&p.output, which, m * 64, tile);
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
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;   // uniform, and known to be
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
    // Registers go from the loading warps, a whole warpgroup, to those that multiply.
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
