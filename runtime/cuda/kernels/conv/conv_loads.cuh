// Positions of the Hopper convolution's tiles, and the loads of their operands: part of conv_sm90.cu.
#pragma once

struct Cursor {                                    // the producer's position in K
    int source, block, tap_w, tap_h, band;         // band: the first input channel that the tile reads
};

DEVICE void seek(Cursor& at, const Params& p, int k) {
    const int first = p.source[0].channel_blocks * p.source[0].taps_h * p.source[0].taps_w;
    at.source = (MODE1 >= 0 && k >= first) ? 1 : 0;
    const Source& s = p.source[at.source];
    k -= at.source ? first : 0;
    at.block = k % s.channel_blocks;
    at.tap_w = (k / s.channel_blocks) % s.taps_w;
    at.tap_h = k / s.channel_blocks / s.taps_w;
}

DEVICE void advance(Cursor& at, const Params& p) {
    at.block++;
    if (MODE0 == 0 && MODE1 < 0) return;
    const Source& s = p.source[MODE1 >= 0 ? at.source : 0];
    if (at.block < s.channel_blocks) return;
    at.block = 0;
    if (++at.tap_w < s.taps_w) return;
    at.tap_w = 0;
    if (++at.tap_h < s.taps_h) return;
    at.tap_h = 0;
    at.source = 1;
}

// A block's position among its sharers: ranks run over the channels' tiles first.
DEVICE int channel_rank(int sharer) { return sharer % SHARE_CHANNELS; }
DEVICE int pixel_rank(int sharer) { return sharer / SHARE_CHANNELS; }

struct Batch {                                     // the indices of a product in a stack
    int inner, outer;
};

DEVICE Batch batch_at(const Params& p, int tile) {
    if (!BATCHED) return {0, 0};
    const int index = tile / p.batch_tiles;
    return {index % p.inner_batches, index / p.inner_batches};
}

DEVICE void load_rows(u32 target, const TensorMap* map, u32 barrier, int x, int y, const Batch& batch) {
    if (BATCHED) tma_load_4d(target, map, barrier, x, y, batch.inner, batch.outer);
    else tma_load_2d(target, map, barrier, x, y);
}

template <int MODE>
DEVICE void load_pixels(u32 target, const TensorMap* map, u32 barrier, const Source& s, const Cursor& at, int sharer, int first, int n, int h,
                        int w, const Batch& batch) {
    const int c = at.block * BK + (BANDED ? at.band : 0), x = w * s.stride_w - s.pad_w, y = h * s.stride_h - s.pad_h;
    const u16 tap_w = u16(at.tap_w * s.dilation_w), tap_h = u16(at.tap_h * s.dilation_h);
    if (SHARE_CHANNELS > 1) {                      // the blocks with other channels multiply the same pixels
        const u16 to = u16(((1 << SHARE_CHANNELS) - 1) << (pixel_rank(sharer) * SHARE_CHANNELS));
        target += channel_rank(sharer) * PIXEL_PART * SPAN;
        if (MODE == 0) tma_multicast_2d(target, map, barrier, c, first, to);
        else tma_multicast_im2col(target, map, barrier, c, x, y, n, tap_w, tap_h, to);
    } else {
        if (MODE == 0) load_rows(target, map, barrier, c, first, ONE_MATRIX ? Batch() : batch);
        else tma_load_im2col(target, map, barrier, c, x, y, n, tap_w, tap_h);
    }
}

#if VOLUME
// Loads a block of channels of a volume's frames. n counts the result's frames; the block index also runs over the taps along depth.
DEVICE void load_frames(const Params& p, u32 target, const TensorMap* map, u32 barrier, int source, const Cursor& at, int sharer, int n, int h,
                        int w) {
    const Source& s = p.source[source];
    const Depth& d = p.depth[source];
    const int tap = u32(at.block) / u32(d.channel_blocks), c = (at.block - tap * d.channel_blocks) * BK;
    const int x = w * s.stride_w - s.pad_w, y = h * s.stride_h - s.pad_h, image = u32(n) / u32(d.out);
    const int z = (n - image * d.out) * d.stride + d.first;
    const u16 tap_w = u16(at.tap_w * s.dilation_w), tap_h = u16(at.tap_h * s.dilation_h), tap_d = u16(tap * d.dilation);
    if (SHARE_CHANNELS > 1) {
        const u16 to = u16(((1 << SHARE_CHANNELS) - 1) << (pixel_rank(sharer) * SHARE_CHANNELS));
        target += channel_rank(sharer) * PIXEL_PART * SPAN;
        tma_multicast_im2col_5d(target, map, barrier, c, x, y, z, image, tap_w, tap_h, tap_d, to);
    } else {
        tma_load_im2col_5d(target, map, barrier, c, x, y, z, image, tap_w, tap_h, tap_d);
    }
}
#endif

DEVICE void load_weights(const Params& p, u32 target, u32 barrier, int sharer, int k, int channel, const Batch& batch) {
    if (SHARE_PIXELS > 1) {                        // the blocks with other pixels multiply the same weights
        u32 to = 0;
        #pragma unroll
        for (int i = 0; i < SHARE_PIXELS; i++) to |= 1u << (i * SHARE_CHANNELS);
        const int part = pixel_rank(sharer) * WEIGHT_PART;
        tma_multicast_2d(target + part * SPAN, &p.weights, barrier, k * BK, channel + part, u16(to << channel_rank(sharer)));
    } else if (ACROSS) {
        #pragma unroll
        for (int i = 0; i < TILE_CHANNELS / 64; i++)
            load_rows(target + i * 64 * SPAN, &p.weights, barrier, channel + i * 64, k * BK, batch);
    } else {
        load_rows(target, &p.weights, barrier, k * BK, channel, batch);
#if PARTS
        load_rows(target + PART_BYTES, &p.weights, barrier, k * BK, p.channels + channel, batch);
#endif
    }
}

// The first channel and pixel of a tile. p.tiles and p.channel_tiles count the tiles of a whole cluster of sharers as one.
DEVICE void tile_at(const Params& p, int tile, int sharer, int& channel, int& pixel) {
    if (BATCHED) tile %= p.batch_tiles;
    const int place = tile % p.channel_tiles;
    channel = (place * SHARE_CHANNELS + channel_rank(sharer)) * TILE_CHANNELS;
    if (BANDED) {                                  // a band's last tile may reach beyond it
        const int each = (p.band_channels + TILE_CHANNELS - 1) / TILE_CHANNELS;
        channel = place / each * p.band_channels + place % each * TILE_CHANNELS;
    }
    int index = tile / p.channel_tiles;
    if (p.reverse) index = (BATCHED ? p.batch_tiles : p.tiles) / p.channel_tiles - 1 - index;
    pixel = (index * SHARE_PIXELS + pixel_rank(sharer)) * TILE_PIXELS;
}

// Loads a tile's residual into the output buffer of its results.
DEVICE void load_residual(const Params& p, u32 out, u32 full, int buffer, int channel, int pixel, const Batch& batch) {
    barrier_expect(full + 8 * buffer, TILE_GROUPS * MT * OUT_BYTES);
    for (int i = 0; i < TILE_GROUPS * MT; i++) {
        const int group = i / MT;
        load_rows(out + (buffer * TILE_GROUPS * MT + i) * OUT_BYTES, &p.residual, full + 8 * buffer,
                  channel + ((group % WGM) * MT + i % MT) * 64, pixel + (group / WGM) * BN, batch);
    }
}

struct Place {                                     // a tile, in the producer's coordinates
    int channel, pixel, n[WGN], h[WGN], w[WGN];
    Batch batch;
    Cursor at;
};

DEVICE Place place(const Params& p, int tile, int sharer, int k_begin) {
    Place to;
    tile_at(p, tile, sharer, to.channel, to.pixel);
    to.batch = batch_at(p, tile);
    to.pixel += channel_rank(sharer) * PIXEL_PART;
    #pragma unroll
    for (int i = 0; i < WGN; i++) {
        const int first = to.pixel + i * BN;
        to.w[i] = first % p.out_w;
        to.h[i] = first / p.out_w % p.out_h;
        to.n[i] = first / p.out_w / p.out_h;
    }
    to.at.band = BANDED ? to.channel / p.band_channels * p.band_inputs : 0;
    seek(to.at, p, k_begin);
    return to;
}

// Loads pixels of a source, from pixel (n, h, w) of the result on.
template <int MODE>
DEVICE void load_source(const Params& p, int source, u32 target, const TensorMap* map, u32 barrier, const Place& to, int sharer, int i) {
#if VOLUME
    if (MODE == 2) {
        load_frames(p, target, map, barrier, source, to.at, sharer, to.n[i], to.h[i], to.w[i]);
        return;
    }
#endif
    load_pixels<MODE>(target, map, barrier, p.source[source], to.at, sharer, to.pixel + i * BN, to.n[i], to.h[i], to.w[i], to.batch);
}

DEVICE void load_stage(const Params& p, Place& to, int sharer, u32 target, u32 barrier) {
    #pragma unroll
    for (int i = 0; i < WGN; i++) {
        if (MODE1 >= 0 && to.at.source) load_source<MODE1>(p, 1, target + i * PIXEL_BYTES, &p.pixels1, barrier, to, sharer, i);
        else load_source<MODE0>(p, 0, target + i * PIXEL_BYTES, &p.pixels0, barrier, to, sharer, i);
    }
    advance(to.at, p);
}
