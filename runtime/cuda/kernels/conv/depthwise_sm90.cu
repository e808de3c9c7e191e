// Depthwise convolution for Hopper where the latency of memory, not its bandwidth, would limit: TMA keeps whole patches in flight.
//
// A block keeps VECTORS vectors of LANES channels and walks over tiles of STRIPS_Y * TILE_H x STRIPS_X * TILE_W output pixels. One
// warp loads the tiles' input patches into a ring of STAGES (zeros in the padding). The other warps convolve from shared memory, each
// thread TILE_H x TILE_W pixels of LANES channels, and store from registers.
//
// generated.cuh: see depthwise.cu; also VECTORS, STRIPS_X, STRIPS_Y, STAGES.
#include "depthwise_core.cuh"

constexpr int WORKERS = VECTORS * STRIPS_X * STRIPS_Y, CONSUMERS = (WORKERS + 31) / 32 * 32, THREADS = CONSUMERS + 32;
constexpr int CHANNELS = VECTORS * LANES;
constexpr int PATCH_H = (STRIPS_Y * TILE_H - 1) * STRIDE_H + (KERNEL_H - 1) * DILATION_H + 1;
constexpr int PATCH_W = (STRIPS_X * TILE_W - 1) * STRIDE_W + (KERNEL_W - 1) * DILATION_W + 1;
constexpr u32 PATCH_LOAD = PATCH_H * PATCH_W * CHANNELS * OPERAND_ITEM, PATCH_BYTES = (PATCH_LOAD + 127) / 128 * 128;

struct Params {
    TensorMap input;                               // (channel, x, y, n)
    u8* output;
    const Weight* weights;                         // [taps][channels]
    const Channel* channel;                        // [channels]: bias, or scale and bias
    const u8* residual;                            // shaped as the output
    float* sums;                                   // SQUEEZE 1: [n][tiles][channels]
    u8* means;                                     // SQUEEZE 2: [n][channels], type of the output
    int vectors, out_h, out_w, pad_h, pad_w, out_pitch;  // out_pitch: elements between consecutive pixels of the result
    int slabs, tiles_x, tiles, count;              // slabs of channels; tiles of a row of an image, of an image, of the batch
    Narrow mean;                                   // only its factor is used where results are floats
    Requantize requantize;                         // for 8-bit operands
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) depthwise_sm90(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 base = smem_address(shared), full = base, empty = base + 64;
    u8* ring = shared + 128;
    Vector* shared_weights = reinterpret_cast<Vector*>(ring + STAGES * PATCH_BYTES);
    float* partial = reinterpret_cast<float*>(shared_weights + (WEIGHTS_IN_SHARED ? TAPS * VECTORS : 0));  // [strips][CHANNELS]
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
    // No kernel writes weights and bias.
    const int local = threadIdx.x % VECTORS, strip = threadIdx.x / VECTORS, vector = slab * VECTORS + local;
    const bool live = threadIdx.x < WORKERS && vector < p.vectors;
    Vector own_weights[WEIGHTS_IN_SHARED ? 1 : TAPS];
    Channel constants[LANES];
    #pragma unroll
    for (int i = 0; i < LANES; i++) constants[i] = no_channel();
    if (live) load_constants(p.channel + vector * LANES, constants);
    if (WEIGHTS_IN_SHARED) {
        for (int i = threadIdx.x; i < TAPS * VECTORS; i += THREADS) {
            const int v = slab * VECTORS + i % VECTORS;
            shared_weights[i] = v < p.vectors ? load_weights(p.weights + (i / VECTORS * p.vectors + v) * LANES) : zeros();
        }
    } else {
        #pragma unroll
        for (int i = 0; i < TAPS; i++) own_weights[i] = live ? load_weights(p.weights + (i * p.vectors + vector) * LANES) : zeros();
    }
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
                barrier_expect(full + 8 * stage, PATCH_LOAD);
                tma_load_4d(base + 128 + stage * PATCH_BYTES, &p.input, full + 8 * stage, slab * CHANNELS,
                            x * STRIPS_X * TILE_W * STRIDE_W - p.pad_w, y * STRIPS_Y * TILE_H * STRIDE_H - p.pad_h, n);
                issued++;
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        }
        return;
    }

    const Output target = {p.output, p.residual, p.out_h, p.out_w, p.out_pitch, p.vectors, &p.requantize};
    const int strip_x = strip % STRIPS_X, strip_y = strip / STRIPS_X;
    const int own = ((strip_y * TILE_H * STRIDE_H * PATCH_W + strip_x * TILE_W * STRIDE_W) * VECTORS + local) * LANES;
    int stage = 0, parity = 0;
    for (int tile = first; tile < p.count; tile += step) {
        const int n = tile / p.tiles, in_image = tile % p.tiles;
        const int out_x = (in_image % p.tiles_x * STRIPS_X + strip_x) * TILE_W, out_y = (in_image / p.tiles_x * STRIPS_Y + strip_y) * TILE_H;
        const bool inside = live && out_x < p.out_w && out_y < p.out_h;
        barrier_wait(full + 8 * stage, parity);
        Tile acc;
        if (inside) {
            clear(acc);
            const Element* patch = reinterpret_cast<const Element*>(ring + stage * PATCH_BYTES) + own;
            accumulate(
                acc,
                [&](int r, Input (&in)[COLUMNS]) {
                    #pragma unroll
                    for (int c = 0; c < COLUMNS; c++) in[c] = load_input(patch + (r * PATCH_W + c) * CHANNELS);
                },
                [&](int tap) { return WEIGHTS_IN_SHARED ? shared_weights[tap * VECTORS + local] : own_weights[WEIGHTS_IN_SHARED ? 0 : tap]; });
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + 8 * stage);
        if (++stage == STAGES) stage = 0, parity ^= 1;
        float sum[LANES];
        finish(target, acc, constants, sum, inside, n, out_y, out_x, vector);

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
