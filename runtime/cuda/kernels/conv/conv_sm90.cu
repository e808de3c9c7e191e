// Implicit-GEMM convolution for Hopper: NHWC, 16- or 8-bit operands, fp32 accumulators (int32 for integers), wgmma fed by TMA.
//
// Output channels are wgmma's M, output pixels its N (any multiple of 8: 49 pixels waste 13 % of a tile, not 62 %).
//   out[pixel, channel] = epilogue(sum_k weights[channel, k] * patch[k, pixel])
// K runs over one or two sources, and within a source over filter taps and blocks of BK channels. The second source is the
// downsample convolution of a residual block, which adds to the same accumulators. TMA loads the pixels of a source as rows of a
// matrix (1x1, stride 1) or in im2col mode (every other filter).
//
// One warp issues the loads, one the loads of the residual; WGM*WGN warpgroups multiply. Weights that are loaded before
// griddepcontrol.wait overlap the previous kernel. There are two epilogues. The first goes through shared memory and TMA stores,
// which overlap the loads of the next tile (persistent grid). DIRECT stores one tile per block from registers. With SPLIT > 1 the
// blocks of a cluster split K, and exchange their partial sums before these stores.
//
// ALTERNATE: two warpgroups take whole tiles in turn: one multiplies while the other runs its epilogue.
// SHARE_CHANNELS x SHARE_PIXELS: the blocks of a cluster take neighboring tiles. Each block loads a part of their common operands
// and multicasts it, since the L2 bandwidth of 132 multiprocessors is less than their tensor cores need.
//
// STREAM (stream-K): each block takes an equal span of the K steps of all tiles, so no multiprocessor idles in a last wave. A tile
// that several spans share is finished by the span with its first K steps: see conv_stream.cuh.
//
// BATCHED: a stack of products. Each product has weights of its own, which are an activation tensor. Tensor maps have two more
// axes, and each tile belongs to one product. ACROSS: the rows of that tensor are K (wgmma's MN-major operand). ONE_MATRIX: the
// pixels of all products are one constant matrix, which is loaded before griddepcontrol.wait, as weights are elsewhere.
// ROW_BIAS: a bias per pixel, the initial value of its accumulators. ROW_SCALED: a scale per pixel, which multiplies its integer
// accumulators; the weights too are the result of another kernel. EDGED: accumulators begin with what taps outside of the image would
// add (conv_edges.cuh).
//
// BANDED: output channels come in bands. Each band sums over its own band of input channels alone (a grouped convolution, with
// several groups in a band).
//
// MOMENTS: the kernel writes moments of the result's rows. NORMED, NORMED_RESIDUAL: rows of the product, or of the residual, are
// normalized by such moments (conv_moments.cuh).
//
// TURNED: a rotary embedding of the result's heads, by the positions of their rows (conv_turns.cuh).
//
// IMAGE_SCALED: each image (rows of one product) has a factor per channel, another kernel's result, which multiplies its accumulators.
//
// PROLOGUE: an additional warpgroup applies stages to the pixels of each K step in place, between TMA and the product.
//
// generated.cuh defines the tile (WGM, WGN, MT, BN, BK, STAGES, SPLIT, DIRECT, OUT_BUFFERS, WEIGHTS_STATIONARY, MIN_CTAS, ALTERNATE,
// SHARE_CHANNELS, SHARE_PIXELS, STREAM), BATCHED, ACROSS, BANDED, the sources' modes (MODE0, MODE1: 0 rows, 1 im2col, 2 im2col of a
// volume, -1 none), HAS_RESIDUAL, PROLOGUE, GATED, GATE_ALONE (the prologue is the gate), SHARED_BYTES (reserved by the launch; not with
// WEIGHTS_STATIONARY), prologue(), wgmma_step() and epilogue().
#include "conv_common.cuh"

#include "conv_tile.cuh"
#include "conv_change.cuh"
#include "conv_residuals.cuh"
#include "conv_turns.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS) conv_sm90(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 shared[];
    if (threadIdx.x == 0) mark(8);
    const u32 base = smem_address(shared);
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;  // warp-uniform, and the compiler knows it
    const int rank = SPLIT > 1 ? int(cluster_rank()) : 0;
    const int sharer = SHARERS > 1 ? int(cluster_rank()) : 0;
    const Span span = STREAM ? own_span(p) : Span();
    const Work first = STREAM ? first_work(p, span) : split_work(p, blockIdx.x / (SPLIT * SHARERS), rank);
    const int first_tile = first.tile, k_begin = first.k_begin, k_count = first.k_count, tile_step = gridDim.x / (SPLIT * SHARERS);

    const u32 full = base, empty = full + 8 * STAGES, weights_full = empty + 8 * STAGES;
    const u32 reduced = weights_full + 8, residual_full = reduced + 8, residual_empty = residual_full + 8 * OUT_BUFFERS * TURNS;
    const u32 changed = residual_empty + 8 * OUT_BUFFERS * TURNS, ready = PROLOGUE ? changed : full;
    const u32 stationary = base + BARRIER_BYTES;
    const u32 ring = stationary + (WEIGHTS_STATIONARY ? ((p.k_steps + SPLIT - 1) / SPLIT) * WEIGHT_BYTES : 0);
    const u32 behind_ring = (ring + STAGES * STAGE_BYTES + 1023) / 1024 * 1024, out = FINISHES_IN_RING ? ring : behind_ring;
    const u32 behind_out = out + (DIRECT ? TILE_GROUPS * Direct::BYTES : OUT_BUFFERS * TURNS * TILE_GROUPS * MT * OUT_BYTES);
    // Factors of normalized rows, for each output buffer. They share the barriers of the residual.
    const u32 factors = behind_out > behind_ring ? behind_out : behind_ring;

    // The loading warp finds its tile while another one initializes barriers: the first loads wait for both.
    Place to;
    if (warp == CONSUMERS / 32) {
        if (lane == 0) {
            tma_prefetch(&p.weights);
            tma_prefetch(&p.pixels0);
            if (MODE1 >= 0) tma_prefetch(&p.pixels1);
        }
        to = place(p, first_tile, sharer, k_begin);
    }
    if (warp == CONSUMERS / 32 + 1 && lane == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, TILE_GROUPS * 4 * PEERS * RELEASERS);
            if (PROLOGUE) barrier_init(changed + 8 * i, 1);
        }
        barrier_init(weights_full, 1);
        barrier_init(reduced, 1);
        for (int i = 0; i < OUT_BUFFERS * TURNS; i++) {
            barrier_init(residual_full + 8 * i, ROW_NORM ? FACTOR_WARPS * TELLERS + RESIDUAL_LOADED : 1);
            barrier_init(residual_empty + 8 * i, TILE_GROUPS * (ROW_NORM ? READERS + RESIDUAL_LOADED : 1));
        }
        barrier_init_fence();
        async_proxy_fence();
        if (SPLIT > 1 && Direct::owns(rank))       // bytes of partial sums that this rank will receive
            barrier_expect(reduced, GROUPS * Direct::expected(rank));
    }
    __syncthreads();
    if (SPLIT > 1) cluster_arrive_relaxed();
    if (SHARERS > 1) {                             // the peers' barriers are initialized: loads may be multicast
        cluster_arrive_relaxed();
        cluster_wait();
    }
    grid_launch_dependents();

    if (WIDE && warp >= CONSUMERS / 32) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == CONSUMERS / 32) {
        if (elect_one()) {
            if ((BATCHED && !ONE_MATRIX) || ROW_SCALED) grid_dependency_wait();    // else the first loads are constants
            const int primed = k_count < STAGES ? k_count : STAGES;
            if (WEIGHTS_STATIONARY) {
                barrier_expect(weights_full, k_count * WEIGHT_BYTES);
                for (int k = 0; k < k_count; k++)
                    tma_load_2d(stationary + k * WEIGHT_BYTES, &p.weights, weights_full, (k_begin + k) * BK, to.channel);
            }
            for (int k = 0; k < primed; k++) {
                barrier_expect(full + 8 * k, STAGE_BYTES);
                if (ONE_MATRIX)
                    load_stage(p, to, sharer, ring + k * STAGE_BYTES, full + 8 * k);
                else if (!WEIGHTS_STATIONARY)
                    load_weights(p, ring + k * STAGE_BYTES + WGN * PIXEL_BYTES, full + 8 * k, sharer, k_begin + k, to.channel, to.batch);
            }
            mark(0);
            grid_dependency_wait();
            mark(1);
            #pragma unroll 1
            for (int k = 0; k < primed; k++) {
                if (ONE_MATRIX)
                    load_weights(p, ring + k * STAGE_BYTES + WGN * PIXEL_BYTES, full + 8 * k, sharer, k_begin + k, to.channel, to.batch);
                else
                    load_stage(p, to, sharer, ring + k * STAGE_BYTES, full + 8 * k);
            }
            mark(2);
            int stage = primed == STAGES ? 0 : primed, parity = primed == STAGES ? 0 : 1, fresh = STAGES - primed, k = primed;
            auto await_stage = [&] {
                if (fresh > 0)
                    fresh--;                       // a stage that was never filled
                else
                    barrier_wait(empty + 8 * stage, parity);
            };
            Work work = first;
            do {
                if (work.tile != first_tile) to = place(p, work.tile, sharer, work.k_begin), k = 0;
                #pragma unroll 1
                for (; k < work.k_count; k++) {
                    const u32 target = ring + stage * STAGE_BYTES, barrier = full + 8 * stage;
                    await_stage();
                    barrier_expect(barrier, STAGE_BYTES);
                    if (!WEIGHTS_STATIONARY)
                        load_weights(p, target + WGN * PIXEL_BYTES, barrier, sharer, work.k_begin + k, to.channel, to.batch);
                    load_stage(p, to, sharer, target, barrier);
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
            } while (next_work(p, span, work, tile_step));
#if STREAM
            // The ring carries no more operands: it now brings the partial sums that later spans computed of this span's last tile.
            for (int from = span.number + 1; from <= last_sender(p, span); from++) {
                await_sums(p, from);
                for (int chunk = 0; chunk < Sums::CHUNKS; chunk++) {
                    const u32 bytes = Sums::chunk_bytes(chunk);
                    await_stage();
                    barrier_expect(full + 8 * stage, bytes);
                    bulk_load(ring + stage * STAGE_BYTES, Sums::chunk(p, from, chunk), bytes, full + 8 * stage);
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
            }
#endif
        }
        __syncwarp();
        leave();
#if ROW_NORM
    } else if (warp > CONSUMERS / 32) {
        if (warp == CONSUMERS / 32 + 1) fetch_ahead(p.ahead, lane);
        find_row_factors(p, {first, span, tile_step, sharer}, {out, residual_full, residual_empty}, factors, warp == CONSUMERS / 32 + 1, lane);
        __syncwarp();
        leave();
#endif
    } else if (warp == CONSUMERS / 32 + 1) {
        fetch_ahead(p.ahead, lane);
        if (RESIDUAL_LOADED && elect_one()) load_residuals(p, {first, span, tile_step, sharer}, {out, residual_full, residual_empty});
        __syncwarp();
        leave();
#if PROLOGUE
    } else if (warp >= CONSUMERS / 32 + 2) {
        if (warp < CONSUMERS / 32 + 2 + CHANGERS)
            change_pixels(p, ring, full, changed, first_tile, tile_step, sharer, k_begin, k_count, warp - CONSUMERS / 32 - 2, lane);
#endif
    } else if (!WIDE || warp < CONSUMERS / 32) {
        if (WIDE) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int turn = ALTERNATE ? warp / 4 : 0, group = ALTERNATE ? 0 : warp / 4, quarter = warp % 4;
        const int own_first = first_tile + turn * tile_step, own_step = tile_step * TURNS;
        Work work = first;
        work.tile = own_first;
        const int group_channel = (group % WGM) * MT * 64, group_pixel = (group / WGM) * BN;
        const u32 weights_at = WEIGHTS_STATIONARY ? stationary : ring + WGN * PIXEL_BYTES;
        constexpr u32 WEIGHT_STRIDE = WEIGHTS_STATIONARY ? WEIGHT_BYTES : STAGE_BYTES;
        Acc acc[SETS][MT][BN / 2];
        int stage = 0, parity = 0;
        auto skip_tile = [&] {                     // skips the stages of the other turn's tile
            stage += k_count;
            parity ^= stage / STAGES & 1;
            stage %= STAGES;
        };
        if (ALTERNATE && turn) skip_tile();
        // A released stage is reported to every block that loads into it: lane l signals peer l.
        int peer = channel_rank(lane) + pixel_rank(sharer) * SHARE_CHANNELS;
        if (SHARERS > 1 && lane >= SHARE_CHANNELS)
            peer = (lane - SHARE_CHANNELS + (lane - SHARE_CHANNELS >= pixel_rank(sharer) ? 1 : 0)) * SHARE_CHANNELS + channel_rank(sharer);
        auto release = [&](int which) {
            if (SHARERS == 1) {
                if (RELEASERS > 1 || lane == 0) barrier_arrive(empty + 8 * which);
            } else if (lane < PEERS) {
                cluster_barrier_arrive(cluster_map(empty + 8 * which, peer));
            }
        };

        int tile_channel, tile_pixel;
        tile_at(p, own_first, sharer, tile_channel, tile_pixel);
        float columns[MT][2];                      // of blocks that split K, only the first subtracts the mean
#if ROW_NORM
        auto load_columns = [&] {
            #pragma unroll
            for (int i = 0; i < 2 * MT; i++) {
                const int row = OUT_ITEM == 1 ? lane / 4 * 2 + i % 2 : lane / 4 + i % 2 * 8;       // as in load_channel_pair()
                const int channel = tile_channel + group_channel + i / 2 * 64 + quarter * 16 + row;
                columns[i / 2][i % 2] = (NORMED_RESIDUAL || (NORMED == 1 && rank == 0)) && channel < p.channels ? __ldg(p.columns + channel) : 0.0f;
            }
        };
        if (NORMED || !DIRECT) load_columns();
#endif
#if DIRECT
        Direct store;
        auto prepare = [&] {
            store.prepare(p, tile_channel + group_channel, rank, quarter, lane, [&](int column) {
                const int pixel = tile_pixel + group_pixel + column;
                return pixel < p.pixel_count ? pixel : -1;
            });
        };
        if (!LATE) prepare();
#if ROW_BIAS || EDGED
        begin_sums(p, tile_channel + group_channel + quarter * 16, tile_pixel + group_pixel, k_begin, lane, acc);
#endif
        grid_dependency_wait();
        if (!LATE) store.load_residual(p);
#else
        int buffer = 0, buffer_parity = 0;
        Channel constants[MT][2];
        load_constants(p, tile_channel + group_channel + quarter * 16, lane, constants);
#if ROW_BIAS || EDGED
        begin_sums(p, tile_channel + group_channel + quarter * 16, tile_pixel + group_pixel, k_begin, lane, acc);
#endif
        grid_dependency_wait();
#if IMAGE_SCALED
        load_factors(p, tile_channel + group_channel + quarter * 16, tile_pixel + group_pixel, lane, constants);
#endif
#endif
        if (WEIGHTS_STATIONARY) barrier_wait(weights_full, 0);

        if (!ALTERNATE || own_first < p.tiles) do {
            const int tile = work.tile;
#if !DIRECT
            if (tile != own_first) {
                tile_at(p, tile, sharer, tile_channel, tile_pixel);
                load_constants(p, tile_channel + group_channel + quarter * 16, lane, constants);
#if IMAGE_SCALED
                load_factors(p, tile_channel + group_channel + quarter * 16, tile_pixel + group_pixel, lane, constants);
#endif
#if ROW_NORM
                load_columns();
#endif
#if ROW_BIAS || EDGED
                begin_sums(p, tile_channel + group_channel + quarter * 16, tile_pixel + group_pixel, k_begin, lane, acc);
#endif
            }
#endif
#if ROW_SCALED
            RowScales scales;
            scales.load(p, tile_pixel + group_pixel, lane);
#endif
            // With few columns, the latency of a product exceeds its work. Two sets of accumulators, added at the end, keep two products in flight.
            int previous = 0;
            // ALTERNATE: by now all stages of earlier tiles have been waited for, so the parity of a stage identifies its fill.
            if (ALTERNATE && tile != first_tile) named_barrier(1 + GROUPS + turn, 256);
            for (int k = 0; k < work.k_count; k++) {
                barrier_wait(ready + 8 * stage, parity);
                if (k == 0 && threadIdx.x == 0) mark(3);
                wgmma_fence();
                multiply(acc, weights_at + (WEIGHTS_STATIONARY ? k : stage) * WEIGHT_STRIDE + group_channel * SPAN,
                         ring + stage * STAGE_BYTES + (group / WGM) * PIXEL_BYTES, k);
                wgmma_commit();
                if (k > 0) {                       // the products of the previous step are complete: its stage is free
                    wgmma_wait<1>();
                    release(previous);
                }
                previous = stage;
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
            if (ALTERNATE && tile + tile_step < p.tiles) named_barrier_arrive(1 + GROUPS + (turn ^ 1), 256);
            wgmma_wait<0>();
            release(previous);
            if (ALTERNATE) skip_tile();
            Acc (&sum)[MT][BN / 2] = acc[0];
#if DIRECT
            if (LATE) prepare();
            if (FINISHES_IN_RING) named_barrier(1 + GROUPS, CONSUMERS);        // all warps have read the ring
#endif
            #pragma unroll
            for (int i = 0; SETS == 2 && i < MT * BN / 2; i++) sum[i / (BN / 2)][i % (BN / 2)] += acc[SETS - 1][i / (BN / 2)][i % (BN / 2)];
            if (threadIdx.x == 0) mark(4);

#if STREAM
            if (work.k_begin > 0) {
                Sums::send(p, span.number, sum);
                continue;
            }
            if (work.k_count < p.k_steps)          // partial sums of later spans, in the order of K
                for (int from = span.number + 1; from <= last_sender(p, span); from++)
                    Sums::receive(sum, ring, [&] { barrier_wait(full + 8 * stage, parity); return stage; }, [&] {
                        release(stage);
                        if (++stage == STAGES) stage = 0, parity ^= 1;
                    });
#endif
#if ROW_SCALED && DIRECT
            #pragma unroll
            for (int i = 0; i < MT * BN / 8; i++) scales.apply(&sum[i / (BN / 8)][i % (BN / 8) * 4], i % (BN / 8), lane);
#endif
#if NORMED
#if DIRECT
            constexpr int buffer = 0, buffer_parity = 0;
#endif
            barrier_wait(residual_full + 8 * (buffer * TURNS + turn), buffer_parity);
            normalize(sum, factors + ((buffer * TURNS + turn) * TILE_PIXELS + group_pixel) * 8, columns, lane);
#endif
#if !DIRECT
            const u32 own = out + ((buffer * TURNS + turn) * TILE_GROUPS + group) * MT * OUT_BYTES;
            const u32 residual = 8 * (buffer * TURNS + turn);
            const u32 own_factors = factors + ((buffer * TURNS + turn) * TILE_PIXELS + group_pixel + lane % 4 * 2) * 8;
            if (HAS_RESIDUAL) {
                barrier_wait(residual_full + residual, buffer_parity);
            } else {
                if (quarter == 0 && elect_one()) tma_store_wait_read<OUT_BUFFERS - 1>();
                named_barrier(1 + warp / 4, 128);
            }
            #pragma unroll
            for (int m = 0; m < MT; m++) {
#if OUT_ITEM == 1
                finish_columns<BN>(p, own + m * OUT_BYTES, quarter, lane, sum[m], constants[m], [](int column) { return column; });
#else
                // Lane l addresses row l % 8 (a pixel) of matrix l / 8: matrices 0, 1 are channels 0-7, 8-15 of pixels 0-7; 2, 3 of pixels 8-15.
                const u32 row = own + m * OUT_BYTES + ((lane >> 4) * 8 + (lane & 7)) * 128 +
                                (((quarter * 2 + ((lane >> 3) & 1)) ^ (lane & 7)) << 4);
#if IMAGE_SCALED
                const int first_pixel = tile_pixel + group_pixel, first_channel = tile_channel + group_channel + m * 64 + quarter * 16;
                ImageChannels held = {{constants[m][0], constants[m][1]}, (image_of(p, first_pixel) + 1) * p.image_pixels};
#endif
                #pragma unroll
                for (int j = 0; j < BN / 16; j++) {
#if ROW_SCALED
                    scales.apply(&sum[m][j * 8], 2 * j, lane), scales.apply(&sum[m][j * 8 + 4], 2 * j + 1, lane);   // before each epilogue, else registers spill
#endif
#if IMAGE_SCALED
                    held.move_to(p, first_pixel + j * 16, first_channel, lane);
                    const ImageChannels before = held;
                    held.move_to(p, first_pixel + j * 16 + 8, first_channel, lane);
                    finish_16_pixels(p, row + j * 16 * 128, &sum[m][j * 8], before.c, held.c);
#else
                    finish_16_pixels(p, row + j * 16 * 128, &sum[m][j * 8], constants[m], constants[m], added_residual<4>(own_factors + j * 128, columns[m]));
#endif
                }
#if IMAGE_SCALED
                if (BN % 16) held.move_to(p, first_pixel + BN / 16 * 16, first_channel, lane);
                Channel (&last)[2] = held.c;
#else
                Channel (&last)[2] = constants[m];
#endif
#if ROW_SCALED
                if (BN % 16) scales.apply(&sum[m][BN / 16 * 8], BN / 8 - 1, lane);
#endif
                if (BN % 16)
                    finish_8_pixels(p, row - (lane >> 4) * 8 * 128 + (BN / 16) * 16 * 128, &sum[m][BN / 16 * 8], last,
                                    added_residual<2>(own_factors + BN / 16 * 128, columns[m]));
#endif
            }
#if TURNED
            turn_heads<MT, BN>(p, own, tile_channel + group_channel, tile_pixel + group_pixel, threadIdx.x % 128, [&] { named_barrier(1 + warp / 4, 128); });
#endif
#if SCATTER
            named_barrier(1 + warp / 4, 128);
            #pragma unroll 1
            for (int m = 0; m < MT; m++)
                scatter_rows(p.scatter, p.output_pointer, own + m * OUT_BYTES, BN, tile_channel + group_channel + m * 64, p.channels, threadIdx.x % 128,
                             [&](int row, int& n, int& h, int& w) {
                                 const int pixel = tile_pixel + group_pixel + row;
                                 w = pixel % p.out_w, h = pixel / p.out_w % p.out_h, n = pixel / p.out_w / p.out_h;
                                 return pixel < p.pixel_count;
                             });
#else
            auto hand_back = [&] {                 // the buffer whose store has been read from shared memory
                tma_store_wait_read<(OUT_BUFFERS > 1 ? 1 : 0)>();
                if (OUT_BUFFERS == 1)
                    barrier_arrive(residual_empty + residual);
                else if (tile != own_first)
                    barrier_arrive(residual_empty + 8 * ((buffer ? buffer - 1 : OUT_BUFFERS - 1) * TURNS + turn));
            };
            async_proxy_fence();
            named_barrier(1 + warp / 4, 128);
            if (ROW_NORM && threadIdx.x % 128 < READERS) barrier_arrive(residual_empty + residual);      // all warps have applied the factors
            if (quarter == 0 && elect_one()) {           // always the same lane: bulk groups belong to a thread
                const Batch batch = batch_at(p, tile);
                #pragma unroll
                for (int m = 0; m < MT; m++) {
                    const int channel = tile_channel + group_channel + m * 64, pixel = tile_pixel + group_pixel;
                    if (BATCHED) tma_store_4d(&p.output, own + m * OUT_BYTES, channel, pixel, batch.inner, batch.outer);
                    else tma_store_2d(&p.output, own + m * OUT_BYTES, channel, pixel);
                }
                tma_store_commit();
                if (HAS_RESIDUAL && !MOMENTS) hand_back();
            }
#if MOMENTS
            #pragma unroll 1
            for (int m = 0; m < MT; m++) {
                const int channel = tile_channel + group_channel + m * 64;
                const int before = BATCHED ? tile / p.batch_tiles * p.pixel_count : 0;      // rows of the preceding products
                if (channel < p.channels) tell_moments<BN>(p, own + m * OUT_BYTES, channel / 64, tile_pixel + group_pixel, threadIdx.x % 128, before);
            }
            if (HAS_RESIDUAL) {
                named_barrier(1 + warp / 4, 128);
                if (quarter == 0 && elect_one()) hand_back();
            }
#endif
#endif
            if (++buffer == OUT_BUFFERS) buffer = 0, buffer_parity ^= 1;
#else
            store.finish(p, sum, out + group * Direct::BYTES, reduced, tile_channel + group_channel, tile_pixel + group_pixel, factors + group_pixel * 8,
                         residual_full);
#endif
        } while (next_work(p, span, work, own_step));
#if !DIRECT
        if (threadIdx.x == 0) mark(6);
        if (quarter == 0 && elect_one()) tma_store_wait_read<0>();
#endif
        if (threadIdx.x == 0) mark(7);
        leave();
    } else {
        leave();
    }
}
