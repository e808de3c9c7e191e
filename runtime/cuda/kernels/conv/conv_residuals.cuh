// The warps of conv_sm90.cu that load residuals, and that find the factors of normalized rows.
#pragma once

struct Walk {                                      // the tiles of a block
    Work first;
    Span span;
    int step, sharer;
};

struct Buffers {                                   // the output buffers, and their barriers: filled, and read
    u32 out, full, empty;
};

constexpr int BUFFERS = OUT_BUFFERS * TURNS;       // the buffers of the two turns alternate

// Called by one thread.
DEVICE void load_residuals(const Params& p, const Walk& walk, const Buffers& buffers) {
    grid_dependency_wait();
    int buffer = 0, parity = 1, issued = 0;
    Work work = walk.first;
    do {
        if (STREAM && work.k_begin > 0) continue;  // another block finishes the tile
        int channel, pixel;
        tile_at(p, work.tile, walk.sharer, channel, pixel);
        const Batch batch = batch_at(p, work.tile);
        if (issued >= BUFFERS) barrier_wait(buffers.empty + 8 * buffer, parity);
        load_residual(p, buffers.out, buffers.full, buffer, channel, pixel, batch);
        issued++;
        if (++buffer == BUFFERS) buffer = 0, parity ^= 1;
    } while (next_work(p, walk.span, work, walk.step));
}

#if ROW_NORM
static_assert(HAS_RESIDUAL == (NORMED_RESIDUAL > 0) && !STREAM && !BATCHED && !PROLOGUE && !WIDE, "rows are normalized behind plain products");

// Called by the FACTOR_WARPS warps behind the loading one. ``factors``: where they go, for each output buffer. The ``leading`` warp also
// loads residuals.
DEVICE void find_row_factors(const Params& p, const Walk& walk, const Buffers& buffers, u32 factors, bool leading, int lane) {
    int buffer = 0, parity = 1, channel, pixel;
    Work work = walk.first;
    tile_at(p, work.tile, walk.sharer, channel, pixel);
    grid_dependency_wait();
#if IMAGE_NORM
    ImageFactor known;
#endif
    for (int issued = 0; issued == 0 || next_work(p, walk.span, work, walk.step); issued++) {
        if (issued) tile_at(p, work.tile, walk.sharer, channel, pixel);
#if IMAGE_NORM
        known.take(p, min(pixel, p.pixel_count - 1) / (8 * p.image_parts), lane);      // while the previous tile is finished
#endif
        if (issued >= BUFFERS) barrier_wait(buffers.empty + 8 * buffer, parity);
        if (RESIDUAL_LOADED && leading && elect_one()) load_residual(p, buffers.out, buffers.full, buffer, channel, pixel, Batch());
#if IMAGE_NORM
        row_factors<TILE_PIXELS>(p, factors + buffer * TILE_PIXELS * 8, pixel, threadIdx.x - CONSUMERS - 32, known);
#else
        row_factors<TILE_PIXELS>(p, factors + buffer * TILE_PIXELS * 8, pixel, threadIdx.x - CONSUMERS - 32);
#endif
        __syncwarp();
        if (lane < TELLERS) barrier_arrive(buffers.full + 8 * buffer);
        if (++buffer == BUFFERS) buffer = 0, parity ^= 1;
    }
}
#endif
