// Stride-1 convolution for Hopper that loads each input patch once: NHWC, 16- or 8-bit operands, fp32 accumulators (int32 for
// integers), wgmma and TMA.
//
// im2col loads bring the pixels of a KxK filter K*K times. With few channels the copy engine then sets the pace, not the tensor
// cores. Here a tile of TH x TW output pixels of one image loads its (TH + K - 1) x (TW + K - 1) patch once per block of BK
// channels; filter tap (r, s) reads the same patch from row r * PATCH_W + s on. So wgmma's N runs over padded rows of PATCH_W
// pixels, and the results in columns TW to PATCH_W are discarded: TW / PATCH_W of the work is useful.
//
// Warps: WGM x WGN consumer warpgroups (channels x tiles), then one warp each for patches, weights and residuals. Each of the
// WGN tiles has a ring of its own, so that one group multiplies while another stores.
//
// generated.cuh defines WGM, WGN, TILE_H, TILE_W, TAPS_H, TAPS_W, DILATION_H, DILATION_W, BN, BK, STAGES (patches per group),
// SPLIT (blocks of a cluster that split the channel blocks, one tile per cluster), DIRECT (see DirectStore), WEIGHT_STAGES (0: all
// weights of the channel tile are loaded once and kept), OUT_BUFFERS, MIN_CTAS, POOLED (the maximum of each 2 x 2 pixels is
// stored), HAS_RESIDUAL, SHARED_BYTES (reserved by the launch; only with WEIGHT_STAGES), wgmma_step() and epilogue().
#include "conv_common.cuh"

constexpr int GROUPS = WGM * WGN;
constexpr int CONSUMERS = GROUPS * 128;
constexpr int THREADS = CONSUMERS + 96;
constexpr int TAPS = TAPS_H * TAPS_W;
constexpr int UNROLLED_TAPS = TAPS_W <= 16 ? TAPS_W : 4;       // ptxas takes minutes for 128 of them
constexpr int PATCH_H = TILE_H + (TAPS_H - 1) * DILATION_H, PATCH_W = TILE_W + (TAPS_W - 1) * DILATION_W;
constexpr int SPAN = BK * OPERAND_ITEM;
constexpr u32 PATCH_LOAD = PATCH_H * PATCH_W * SPAN;
constexpr u32 PATCH_BYTES = (PATCH_LOAD + 1023) / 1024 * 1024;
constexpr u32 WEIGHT_BYTES = WGM * 64 * SPAN;
constexpr u32 OUT_LOAD = TILE_H * TILE_W * OUT_ROW;
constexpr u32 OUT_BYTES = (OUT_LOAD + OUT_ROW + 1023) / 1024 * 1024;   // and one row that absorbs the columns outside the tile
constexpr u32 BARRIER_BYTES = 1024;
static_assert((TILE_H - 1) * PATCH_W + TILE_W <= BN, "the tile does not fit the accumulators");

using Direct = DirectStore<1, BN, SPLIT>;
#ifdef SHARED_BYTES                                // if the weights are kept, their size is not known here
constexpr u32 RESULT_BYTES = GROUPS * (DIRECT ? Direct::BYTES : OUT_BUFFERS * OUT_BYTES);
static_assert(SHARED_BYTES >= BARRIER_BYTES + WEIGHT_STAGES * WEIGHT_BYTES + WGN * STAGES * PATCH_BYTES + RESULT_BYTES, "the launch reserves what the block uses");
#endif

struct Tile {
    int channel, n, h, w;
};

DEVICE Tile tile_at(const Params& p, int tile, int group) {
    Tile at;
    at.channel = (tile % p.channel_tiles) * WGM * 64;
    int index = tile / p.channel_tiles;
    if (p.reverse) index = p.tiles / p.channel_tiles - 1 - index;
    index = index * WGN + group;
    const int columns = (p.out_w + TILE_W - 1) / TILE_W, rows = (p.out_h + TILE_H - 1) / TILE_H;
    at.w = index % columns * TILE_W;
    at.h = index / columns % rows * TILE_H;
    at.n = index / columns / rows;
    return at;
}

// The place of a column's pixel within its image, or -1 outside of the tile or the image.
DEVICE int place_of(const Params& p, const Tile& at, int column) {
    const int h = at.h + column / PATCH_W, w = at.w + column % PATCH_W;
    const bool inside = column / PATCH_W < TILE_H && column % PATCH_W < TILE_W && h < p.out_h && w < p.out_w;
    return inside ? h * p.out_w + w : -1;
}

#if EDGED
// Accumulators begin with what the taps outside of the image add. Blocks that split the channels: only in the first of them.
DEVICE void begin_sums(const Params& p, const Tile& at, int first_channel, int rank, int lane, Acc (&acc)[BN / 2]) {
    begin_at_edges<BN>(p, lane, [&](int column) { return rank == 0 ? place_of(p, at, column) : -1; }, [&](int j, int e, int kind) {
        #pragma unroll
        for (int i = 0; i < 2; i++) acc[j * 4 + i * 2 + e] = edge_sum(p, kind, channel_row(first_channel, lane, i));
    });
}
#endif

// The first input channel that the tile reads.
DEVICE int band_of(const Params& p, const Tile& at) { return BANDED ? at.channel / p.band_channels * p.band_inputs : 0; }

// Loads a block of channels. For a volume, the block index also runs over the taps along depth.
DEVICE void load_patch(const Params& p, const Tile& at, int block, u32 target, u32 barrier) {
    const int w = at.w - p.source[0].pad_w, h = at.h - p.source[0].pad_h;
#if VOLUME
    const Depth& d = p.depth[0];
    const int tap = u32(block) / u32(d.channel_blocks), image = u32(at.n) / u32(d.out);
    const int frame = (at.n - image * d.out) * d.stride + d.first + tap * d.dilation;
    tma_load_5d(target, &p.pixels0, barrier, (block - tap * d.channel_blocks) * BK, w, h, frame, image);
#else
    tma_load_4d(target, &p.pixels0, barrier, band_of(p, at) + block * BK, w, h, at.n);
#endif
}

#if VOLUME && TOGETHER > 1
// Stores the frames of a finished tile: each frame is a part of the tile's channels. Eight threads per pixel, as in store_pooled.
DEVICE void store_frames(const Params& p, u32 tile, const Tile& at, int thread) {
    constexpr int CHUNKS = 8 / TOGETHER;           // of eight channels
    const int chunk = thread % 8, channel = chunk % CHUNKS * 8;
    if (channel >= p.frame_channels || at.n * p.out_h * p.out_w >= p.pixel_count) return;
    u8* const image = p.output_pointer + (((long long)at.n * TOGETHER + chunk / CHUNKS) * p.frame + channel) * OUT_ITEM;
    #pragma unroll 4
    for (int pixel = thread / 8; pixel < TILE_H * TILE_W; pixel += 16) {
        const int h = at.h + pixel / TILE_W, w = at.w + pixel % TILE_W;
        if (h < p.out_h && w < p.out_w)
            *reinterpret_cast<uint4*>(image + ((long long)h * p.frame_row + (long long)w * p.frame_column) * OUT_ITEM) =
                shared_load16(tile + pixel * 128 + ((chunk ^ (pixel & 7)) << 4));
    }
}
#endif

#if POOLED
DEVICE u32 larger(u32 a, u32 b) {
    u32 best;
#if defined(DTYPE_BF16)
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(best) : "r"(a), "r"(b));
#else
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(best) : "r"(a), "r"(b));
#endif
    return best;
}

// Stores the maximum of each 2 x 2 pixels of a finished tile. A thread takes eight channels of a pixel; eight lanes cover 128 bytes.
// The barrier before the next tile's results, which every tile has, also protects this read.
DEVICE void store_pooled(const Params& p, u32 tile, const Tile& at, int m, int thread) {
    const int chunk = thread % 8, channel = at.channel + m * 64 + chunk * 8, high = p.out_h / 2, wide = p.out_w / 2;
    u8* const image = p.output_pointer + ((long long)at.n * high * wide * p.channels + channel) * OUT_ITEM;
    if (channel >= p.channels || at.n * p.out_h * p.out_w >= p.pixel_count) return;
    #pragma unroll 2
    for (int pixel = thread / 8; pixel < TILE_H / 2 * (TILE_W / 2); pixel += 16) {
        const int h = pixel / (TILE_W / 2), w = pixel % (TILE_W / 2), to_h = at.h / 2 + h, to_w = at.w / 2 + w;
        uint4 best;
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = (2 * h + i / 2) * TILE_W + 2 * w + i % 2;
            const uint4 v = shared_load16(tile + row * 128 + ((chunk ^ (row & 7)) << 4));
            best = i == 0 ? v : make_uint4(larger(best.x, v.x), larger(best.y, v.y), larger(best.z, v.z), larger(best.w, v.w));
        }
        if (to_h < high && to_w < wide)
            *reinterpret_cast<uint4*>(image + ((long long)to_h * wide + to_w) * p.channels * OUT_ITEM) = best;
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS) conv_patch_sm90(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 shared[];
    const u32 base = smem_address(shared);
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;  // warp-uniform, and the compiler knows it
    const int all_blocks = p.source[0].channel_blocks;
    const int rank = SPLIT > 1 ? int(cluster_rank()) : 0;
    const int first_block = SPLIT > 1 ? all_blocks * rank / SPLIT : 0;
    const int blocks = (SPLIT > 1 ? all_blocks * (rank + 1) / SPLIT : all_blocks) - first_block;
    const int first_tile = SPLIT > 1 ? blockIdx.x / SPLIT : blockIdx.x;
    const int tile_step = SPLIT > 1 ? gridDim.x / SPLIT : gridDim.x;
    const u32 full = base, empty = full + 8 * WGN * STAGES, weights_full = empty + 8 * WGN * STAGES;
    const u32 weights_empty = weights_full + 8 * (WEIGHT_STAGES + 1), residual_full = weights_empty + 8 * (WEIGHT_STAGES + 1);
    const u32 residual_empty = residual_full + 8 * OUT_BUFFERS * WGN;
    const u32 reduced = residual_empty + 8 * OUT_BUFFERS * WGN;
    const u32 weights = base + BARRIER_BYTES;
    const u32 patches = weights + (WEIGHT_STAGES ? WEIGHT_STAGES : (all_blocks + SPLIT - 1) / SPLIT * TAPS) * WEIGHT_BYTES;
    const u32 out = patches + WGN * STAGES * PATCH_BYTES;

    // The loading warps find their tiles while another one initializes barriers: the first loads wait for both.
    Tile own[WGN];
    if (warp == CONSUMERS / 32 || warp == CONSUMERS / 32 + 1) {
        if (lane == 0) tma_prefetch(warp == CONSUMERS / 32 ? &p.pixels0 : &p.weights);
        #pragma unroll
        for (int g = 0; g < WGN; g++) own[g] = tile_at(p, first_tile, g);
    }
    if (warp == CONSUMERS / 32 + 2 && lane == 0) {
        for (int i = 0; i < WGN * STAGES; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, WGM * 4);
        }
        for (int i = 0; i <= WEIGHT_STAGES; i++) {
            barrier_init(weights_full + 8 * i, 1);
            barrier_init(weights_empty + 8 * i, GROUPS * 4);
        }
        for (int i = 0; i < WGN * OUT_BUFFERS; i++) {
            barrier_init(residual_full + 8 * i, 1);
            barrier_init(residual_empty + 8 * i, WGM);
        }
        barrier_init(reduced, 1);
        barrier_init_fence();
        async_proxy_fence();
        if (SPLIT > 1 && Direct::owns(rank)) barrier_expect(reduced, GROUPS * Direct::expected(rank));
    }
    __syncthreads();
    if (SPLIT > 1) cluster_arrive_relaxed();
    grid_launch_dependents();

    if (warp == CONSUMERS / 32) {                                      // patches
        if (elect_one()) {
            mark(0);
            grid_dependency_wait();
            mark(1);
            int stage = 0, parity = 1, issued = 0;
            for (int tile = first_tile; tile < p.tiles; tile += tile_step) {
                #pragma unroll
                for (int g = 0; g < WGN; g++)
                    if (tile != first_tile) own[g] = tile_at(p, tile, g);
                #pragma unroll 1
                for (int b = 0; b < blocks; b++) {
                    #pragma unroll
                    for (int g = 0; g < WGN; g++) {
                        const int slot = g * STAGES + stage;
                        if (issued >= STAGES) barrier_wait(empty + 8 * slot, parity);
                        barrier_expect(full + 8 * slot, PATCH_LOAD);
                        load_patch(p, own[g], first_block + b, patches + slot * PATCH_BYTES, full + 8 * slot);
                    }
                    issued++;
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
                mark(2);
            }
        }
    } else if (warp == CONSUMERS / 32 + 1) {                           // weights: no kernel writes them
        if (elect_one()) {
            if (WEIGHT_STAGES == 0) {
                barrier_expect(weights_full, blocks * TAPS * WEIGHT_BYTES);
                for (int b = 0; b < blocks; b++)
                    for (int tap = 0; tap < TAPS; tap++)
                        tma_load_2d(weights + (b * TAPS + tap) * WEIGHT_BYTES, &p.weights, weights_full, (tap * all_blocks + first_block + b) * BK, own[0].channel);
            } else {
                int stage = 0, parity = 1, issued = 0;
                for (int tile = first_tile; tile < p.tiles; tile += tile_step) {
                    const int channel = tile == first_tile ? own[0].channel : tile_at(p, tile, 0).channel;
                    for (int b = 0; b < blocks; b++) {
                        for (int tap = 0; tap < TAPS; tap++) {
                            if (issued >= WEIGHT_STAGES) barrier_wait(weights_empty + 8 * stage, parity);
                            barrier_expect(weights_full + 8 * stage, WEIGHT_BYTES);
                            tma_load_2d(weights + stage * WEIGHT_BYTES, &p.weights, weights_full + 8 * stage, (tap * all_blocks + first_block + b) * BK, channel);
                            issued++;
                            if (++stage == WEIGHT_STAGES) stage = 0, parity ^= 1;
                        }
                    }
                }
            }
        }
    } else if (warp == CONSUMERS / 32 + 2) {                           // residuals, and prefetches of later launches' weights
        fetch_ahead(p.ahead, lane);
        if (HAS_RESIDUAL && !DIRECT && elect_one()) {
            grid_dependency_wait();
            int buffer = 0, parity = 1, issued = 0;
            for (int tile = first_tile; tile < p.tiles; tile += tile_step) {
                #pragma unroll
                for (int g = 0; g < WGN; g++) {
                    const Tile at = tile_at(p, tile, g);
                    const int slot = g * OUT_BUFFERS + buffer;
                    if (issued >= OUT_BUFFERS) barrier_wait(residual_empty + 8 * slot, parity);
                    barrier_expect(residual_full + 8 * slot, WGM * OUT_LOAD);
                    for (int m = 0; m < WGM; m++)
                        tma_load_4d(out + (slot * WGM + m) * OUT_BYTES, &p.residual, residual_full + 8 * slot, at.channel + m * 64, at.w, at.h, at.n);
                }
                issued++;
                if (++buffer == OUT_BUFFERS) buffer = 0, parity ^= 1;
            }
        }
    } else {
        const int group = warp / 4, quarter = warp % 4, m = group % WGM, g = group / WGM;
        Acc acc[1][BN / 2];
        int stage = 0, parity = 0, weight_stage = 0, weight_parity = 0;
        Tile at = tile_at(p, first_tile, g);
#if DIRECT
        Direct store;
        store.prepare(p, at.channel + m * 64, rank, quarter, lane, [&](int column) {
            const int within = place_of(p, at, column), image = p.out_h * p.out_w;
            return within >= 0 && at.n * image < p.pixel_count ? at.n * image + within : -1;
        });
        grid_dependency_wait();
        store.load_residual(p);
#else
        int buffer = 0, buffer_parity = 0;
        Channel constants[2];
        load_channel_pair(p, at.channel + m * 64 + quarter * 16, lane, constants);
        grid_dependency_wait();
#endif
        if (WEIGHT_STAGES == 0) barrier_wait(weights_full, 0);

        for (int tile = first_tile; tile < p.tiles; tile += tile_step) {
#if !DIRECT
            if (tile != first_tile) {
                at = tile_at(p, tile, g);
                load_channel_pair(p, at.channel + m * 64 + quarter * 16, lane, constants);
            }
#endif
#if EDGED
            begin_sums(p, at, at.channel + m * 64 + quarter * 16, rank, lane, acc[0]);
#endif
            int held_patch = -1, held_weights = -1;
            for (int b = 0; b < blocks; b++) {
                const int slot = g * STAGES + stage;
                barrier_wait(full + 8 * slot, parity);
                if (b == 0 && threadIdx.x == 0) mark(3);
                const u64 patch = wgmma_descriptor<SPAN>(patches + slot * PATCH_BYTES);
                #pragma unroll 1
                for (int tap_h = 0; tap_h < TAPS_H; tap_h++) {
                    #pragma unroll(UNROLLED_TAPS)
                    for (int tap_w = 0; tap_w < TAPS_W; tap_w++) {
                        const int tap = tap_h * TAPS_W + tap_w;
                        if (WEIGHT_STAGES) barrier_wait(weights_full + 8 * weight_stage, weight_parity);
                        const u64 a = wgmma_descriptor<SPAN>(weights + (WEIGHT_STAGES ? weight_stage : b * TAPS + tap) * WEIGHT_BYTES + m * 64 * SPAN);
                        const u64 shifted = patch + (((tap_h * DILATION_H) * PATCH_W + tap_w * DILATION_W) * SPAN >> 4);
                        wgmma_fence();
                        #pragma unroll
                        for (int step = 0; step < SPAN / 32; step++)
                            wgmma_step(acc[0], a + 2 * step, shifted + 2 * step, EDGED || (b | tap | step) != 0);
                        wgmma_commit();
                        if (WEIGHT_STAGES) {
                            if (held_weights >= 0) {
                                wgmma_wait<1>();
                                if (lane == 0) barrier_arrive(weights_empty + 8 * held_weights);
                            }
                            held_weights = weight_stage;
                            if (++weight_stage == WEIGHT_STAGES) weight_stage = 0, weight_parity ^= 1;
                        }
                        if (tap == 0 && held_patch >= 0) {             // the last product of the previous block is complete
                            wgmma_wait<1>();
                            if (lane == 0) barrier_arrive(empty + 8 * held_patch);
                        }
                    }
                }
                held_patch = slot;
                if (STAGES == 1 && b + 1 < blocks) {                   // the next block's patch overwrites this one
                    wgmma_wait<0>();
                    if (lane == 0) barrier_arrive(empty + 8 * held_patch);
                    held_patch = -1;
                }
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
            wgmma_wait<0>();
            if (lane == 0) {
                barrier_arrive(empty + 8 * held_patch);
                if (WEIGHT_STAGES) barrier_arrive(weights_empty + 8 * held_weights);
            }

            if (threadIdx.x == 0) mark(4);
#if !DIRECT
            const int slot = g * OUT_BUFFERS + buffer;
            const u32 own = out + (slot * WGM + m) * OUT_BYTES;
            if (HAS_RESIDUAL) {
                barrier_wait(residual_full + 8 * slot, buffer_parity);
            } else {
                if (quarter == 0 && elect_one()) tma_store_wait_read<OUT_BUFFERS - 1>();
                named_barrier(1 + group, 128);
            }
            const auto row_of = [](int pixel) {
                const int h = pixel / PATCH_W, w = pixel % PATCH_W;
                return h < TILE_H && w < TILE_W ? h * TILE_W + w : TILE_H * TILE_W;
            };
#if OUT_ITEM == 1
            finish_columns<BN>(p, own, quarter, lane, acc[0], constants, row_of);
#else
            // Lane l addresses row l % 8 (a pixel) of matrix l / 8: matrices 0, 1 are channels 0-7, 8-15 of pixels 0-7; 2, 3 of pixels 8-15.
            const int chunk = quarter * 2 + ((lane >> 3) & 1);
            #pragma unroll
            for (int j = 0; j < BN / 8; j += 2) {
                const bool pair = j + 1 < BN / 8;
                const int pixel = j * 8 + (pair ? (lane >> 4) * 8 : 0) + (lane & 7);
                const int row = row_of(pixel);
                const u32 address = own + row * 128 + ((chunk ^ (row & 7)) << 4);
                if (pair)
                    finish_16_pixels(p, address, &acc[0][j * 4], constants, constants);
                else
                    finish_8_pixels(p, address, &acc[0][j * 4], constants);
            }
#endif
#if SCATTER
            named_barrier(1 + group, 128);
            scatter_rows(p.scatter, p.output_pointer, own, TILE_H * TILE_W, at.channel + m * 64, p.channels, threadIdx.x % 128,
                         [&](int row, int& n, int& h, int& w) {
                             n = at.n, h = at.h + row / TILE_W, w = at.w + row % TILE_W;
                             return h < p.out_h && w < p.out_w && n * p.out_h * p.out_w < p.pixel_count;
                         });
#elif VOLUME && TOGETHER > 1
            named_barrier(1 + group, 128);
            store_frames(p, own, at, threadIdx.x % 128);
#elif POOLED
            named_barrier(1 + group, 128);
            store_pooled(p, own, at, m, threadIdx.x % 128);
#else
            async_proxy_fence();
            named_barrier(1 + group, 128);
            if (quarter == 0 && elect_one()) {           // always the same lane: bulk groups belong to a thread
                tma_store_4d(&p.output, own, at.channel + m * 64, at.w, at.h, at.n);
                tma_store_commit();
                if (HAS_RESIDUAL) {                                    // hand back the buffer whose store has been read from shared memory
                    tma_store_wait_read<(OUT_BUFFERS > 1 ? 1 : 0)>();
                    if (OUT_BUFFERS == 1)
                        barrier_arrive(residual_empty + 8 * slot);
                    else if (tile != first_tile)
                        barrier_arrive(residual_empty + 8 * (g * OUT_BUFFERS + (buffer ? buffer - 1 : OUT_BUFFERS - 1)));
                }
            }
#endif
            if (++buffer == OUT_BUFFERS) buffer = 0, buffer_parity ^= 1;
#endif
        }
#if DIRECT
        store.finish(p, acc, out + group * Direct::BYTES, reduced);
#else
        if (threadIdx.x == 0) mark(6);
        if (quarter == 0 && elect_one()) tma_store_wait_read<0>();
#endif
        if (threadIdx.x == 0) mark(7);
    }
}
