// Depthwise convolution for Hopper where the latency of memory, not its bandwidth, would limit: TMA keeps whole patches in flight.
//
// A block keeps VECTORS vectors of LANES channels and walks over tiles of STRIPS_Y * TILE_H x STRIPS_X * TILE_W output pixels. One
// warp loads the tiles' input patches into a ring of STAGES (zeros in the padding). The other warps convolve from shared memory, each
// thread TILE_H x TILE_W pixels of LANES channels, and store from registers.
//
// With BESIDE, a stage of the ring holds the patches of both convolutions, one after the other.
//
// generated.cuh: see depthwise.cu; also VECTORS, STRIPS_X, STRIPS_Y, STAGES, SHARED_BYTES, PADDED_ZERO (images of 8 bits whose padding
// is not 0).
#include "depthwise_core.cuh"

constexpr int WORKERS = VECTORS * STRIPS_X * STRIPS_Y, CONSUMERS = (WORKERS + 31) / 32 * 32, THREADS = CONSUMERS + 32;
constexpr int CHANNELS = VECTORS * LANES;
constexpr int PATCH_H = (STRIPS_Y * TILE_H - 1) * STRIDE_H + (KERNEL_H - 1) * DILATION_H + 1;
constexpr int PATCH_W = (STRIPS_X * TILE_W - 1) * STRIDE_W + (KERNEL_W - 1) * DILATION_W + 1;
constexpr u32 PATCH_LOAD = PATCH_H * PATCH_W * CHANNELS * OPERAND_ITEM, PATCH_BYTES = (PATCH_LOAD + 127) / 128 * 128;
constexpr u32 STAGE_BYTES = FILTERS * PATCH_BYTES, WEIGHT_BYTES = WEIGHTS_IN_SHARED ? FILTERS * TAPS * VECTORS * sizeof(Vector) : 0;
constexpr u32 SUM_BYTES = SQUEEZE ? STRIPS_X * STRIPS_Y * CHANNELS * sizeof(float) : 0;
static_assert(SHARED_BYTES >= 128 + STAGES * STAGE_BYTES + WEIGHT_BYTES + SUM_BYTES, "the launch reserves what the block uses");

struct Params {
    TensorMap input;                               // (channel, x, y, n)
#if BESIDE
    TensorMap second;
#endif
    u8* output;
    const Weight* weights;                         // [taps][channels]
    const Channel* channel;                        // [channels]: bias, or scale and bias
    const u8* residual;                            // of the output's shape
    float* sums;                                   // SQUEEZE 1: [n][tiles][channels]
    u8* means;                                     // SQUEEZE 2: [n][channels], type of the output
    int vectors, out_h, out_w, pad_h, pad_w;
    Places out, added;                             // of the output, of the residual
    int slabs, tiles_x, tiles, count;              // slabs of channels; tiles of a row of an image, of an image, of the batch
    Narrow mean;                                   // only its factor is used where results are floats
    Requantize requantize;                         // for 8-bit operands
#if BESIDE
    const Weight* second_weights;
    const Channel* second_channel;
#endif
#if PADDED_ZERO
    int height, width;                             // of the input
    u32 padding;                                   // the zero point of an 8-bit image, in each of four bytes
#endif
};

// Where a thread's inputs lie in the image. TMA writes zeros for inputs outside; PADDED_ZERO: ``padding`` replaces them.
struct Place {
    int y, height;                                 // of the first input row, of the image
    u32 left_out;                                  // a bit for each column: whether it lies outside
    u32 padding;                                   // the zero point of an 8-bit image, in each of four bytes

    __device__ __forceinline__ bool outside(int r, int c) const { return u32(y + r) >= u32(height) || (left_out >> c & 1u); }
};
static_assert(!PADDED_ZERO || COLUMNS <= 32, "a word has a bit for each column");

// The weights and constants of a thread's channels. No kernel writes them.
struct Filter {
    Vector own[WEIGHTS_IN_SHARED ? 1 : TAPS];
    const Vector* shared;
    Channel constants[LANES];

    __device__ __forceinline__ Filter(const Params& p, const Weight* weights, const Channel* channel, Vector* place, int slab, int vector, bool live)
        : shared(place) {
        #pragma unroll
        for (int i = 0; i < LANES; i++) constants[i] = no_channel();
        if (live) load_constants(channel + vector * LANES, constants);
        if (WEIGHTS_IN_SHARED) {
            for (int i = threadIdx.x; i < TAPS * VECTORS; i += THREADS) {
                const int v = slab * VECTORS + i % VECTORS;
                place[i] = v < p.vectors ? load_weights(weights + (i / VECTORS * p.vectors + v) * LANES) : zeros();
            }
        } else {
            #pragma unroll
            for (int i = 0; i < TAPS; i++) own[i] = live ? load_weights(weights + (i * p.vectors + vector) * LANES) : zeros();
        }
    }

    // Accumulators of the thread's pixels, from a patch that begins at their first input, which lies at ``place`` in the image.
    __device__ __forceinline__ void convolve(const Element* patch, const Place& place, int local, Tile& acc) const {
        clear(acc);
        accumulate(
            acc,
            [&](int r, Input (&in)[COLUMNS]) {
                #pragma unroll
                for (int c = 0; c < COLUMNS; c++) {
                    in[c] = load_input(patch + (r * PATCH_W + c) * CHANNELS);
                    if (PADDED_ZERO && place.outside(r, c)) in[c] = no_input(place.padding);
                }
            },
            [&](int tap) { return WEIGHTS_IN_SHARED ? shared[tap * VECTORS + local] : own[WEIGHTS_IN_SHARED ? 0 : tap]; });
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) depthwise_sm90(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 base = smem_address(shared), full = base, empty = base + 64;
    u8* ring = shared + 128;
    Vector* shared_weights = reinterpret_cast<Vector*>(ring + STAGES * STAGE_BYTES);
    float* partial = reinterpret_cast<float*>(ring + STAGES * STAGE_BYTES + WEIGHT_BYTES);  // [strips][CHANNELS]
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int slab = blockIdx.x % p.slabs, first = blockIdx.x / p.slabs, step = gridDim.x / p.slabs;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, CONSUMERS / 32);
        }
        barrier_init_fence();
        async_proxy_fence();
    }
    const int local = threadIdx.x % VECTORS, strip = threadIdx.x / VECTORS, vector = slab * VECTORS + local;
    const bool live = threadIdx.x < WORKERS && vector < p.vectors;
    const Filter filter(p, p.weights, p.channel, shared_weights, slab, vector, live);
#if BESIDE
    const Filter second(p, p.second_weights, p.second_channel, shared_weights + TAPS * VECTORS, slab, vector, live);
#endif
    int n = 0, x = 0, y = 0;                       // of the loading warp's tile
    auto find = [&](int tile) { n = tile / p.tiles, x = tile % p.tiles % p.tiles_x, y = tile % p.tiles / p.tiles_x; };
    if (warp == CONSUMERS / 32) find(first);       // before the wait: it takes divisions
    __syncthreads();
    grid_launch_dependents();
    grid_dependency_wait();

    if (warp == CONSUMERS / 32) {
        if (lane == 0) {
            int stage = 0, parity = 1, issued = 0;
            for (int tile = first; tile < p.count; tile += step) {
                if (tile != first) find(tile);
                if (issued >= STAGES) barrier_wait(empty + 8 * stage, parity);
                barrier_expect(full + 8 * stage, FILTERS * PATCH_LOAD);
                const u32 patch = base + 128 + stage * STAGE_BYTES;
                const int left = x * STRIPS_X * TILE_W * STRIDE_W - p.pad_w, top = y * STRIPS_Y * TILE_H * STRIDE_H - p.pad_h;
                tma_load_4d(patch, &p.input, full + 8 * stage, slab * CHANNELS, left, top, n);
#if BESIDE
                tma_load_4d(patch + PATCH_BYTES, &p.second, full + 8 * stage, slab * CHANNELS, left, top, n);
#endif
                issued++;
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        }
        return;
    }

    const Output target = {p.output, p.residual, p.out_h, p.out_w, p.out, p.added, &p.requantize};
    const int strip_x = strip % STRIPS_X, strip_y = strip / STRIPS_X;
    const int own = ((strip_y * TILE_H * STRIDE_H * PATCH_W + strip_x * TILE_W * STRIDE_W) * VECTORS + local) * LANES;
    int stage = 0, parity = 0;
    for (int tile = first; tile < p.count; tile += step) {
        const int n = tile / p.tiles, in_image = tile % p.tiles;
        const int out_x = (in_image % p.tiles_x * STRIPS_X + strip_x) * TILE_W, out_y = (in_image / p.tiles_x * STRIPS_Y + strip_y) * TILE_H;
        const bool inside = live && out_x < p.out_w && out_y < p.out_h;
        Addends added;
        load_addends(target, added, inside, n, out_y, out_x, vector);
        barrier_wait(full + 8 * stage, parity);
        Tile acc;
        const u8* patch = ring + stage * STAGE_BYTES;
        Place place = {};
#if PADDED_ZERO
        place = {out_y * STRIDE_H - p.pad_h, p.height, 0u, p.padding};
        #pragma unroll
        for (int c = 0; c < COLUMNS; c++) place.left_out |= u32(u32(out_x * STRIDE_W - p.pad_w + c) >= u32(p.width)) << c;
#endif
        if (inside) filter.convolve(reinterpret_cast<const Element*>(patch) + own, place, local, acc);
#if BESIDE
        Tile beside;
        if (inside) second.convolve(reinterpret_cast<const Element*>(patch + PATCH_BYTES) + own, place, local, beside);
#endif
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + 8 * stage);
        if (++stage == STAGES) stage = 0, parity ^= 1;
        float sum[LANES];
#if BESIDE
        #pragma unroll
        for (int i = 0; i < SUMS; i++) (&beside[0][0][0])[i] = epilogue_beside((&beside[0][0][0])[i], second.constants[i % LANES], 0.0f);
        finish(target, acc, added, filter.constants, sum, inside, n, out_y, out_x, vector, &beside);
#else
        finish(target, acc, added, filter.constants, sum, inside, n, out_y, out_x, vector);
#endif

#if SQUEEZE
        // The tile's sum of each channel over its strips, in a fixed order.
        named_barrier(1, CONSUMERS);               // the previous tile's sums have been read
        if (threadIdx.x < WORKERS) {
            #pragma unroll
            for (int i = 0; i < LANES; i++) partial[strip * CHANNELS + local * LANES + i] = sum[i];
        }
        named_barrier(1, CONSUMERS);
        for (int c = threadIdx.x; c < CHANNELS; c += CONSUMERS) {
            float total = 0.0f;
            for (int i = 0; i < STRIPS_X * STRIPS_Y; i++) total += partial[i * CHANNELS + c];
            const int channel = slab * CHANNELS + c;
            if (channel < p.vectors * LANES) {
                if (SQUEEZE == 1)
                    p.sums[((long long)n * p.tiles + in_image) * p.vectors * LANES + channel] = total;
                else
                    store_mean(p.means, (long long)n * p.vectors * LANES + channel, total, p.mean);
            }
        }
#endif
    }
}
