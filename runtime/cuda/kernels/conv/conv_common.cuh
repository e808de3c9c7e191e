// Shared by the two Hopper convolution kernels: the parameter block and the epilogue of wgmma's accumulators.
#pragma once
#include "ahead.cuh"
#include "generated.cuh"
#include "conv_element.cuh"
#include "conv_scatter.cuh"

struct Source {
    int channel_blocks, taps_h, taps_w, dilation_h, dilation_w, stride_h, stride_w, pad_h, pad_w;
};

#ifndef PARTS
#define PARTS 0
#endif
#ifndef VOLUME
#define VOLUME 0                  // whether a source is a volume; its frames are then images
#endif
#ifndef MOMENTS
#define MOMENTS 0                 // whether moments of the result's rows are written
#endif
#ifndef MOMENT_ROWS
#define MOMENT_ROWS 1             // rows per moment: 1 or 8
#endif
#ifndef IMAGE_NORM
#define IMAGE_NORM 0              // whether NORMED uses the moments of all rows of an image
#endif
#ifndef NORMED
#define NORMED 0                  // normalization of the product's rows: 1 by mean and variance, 2 by the mean square
#endif
#ifndef NORMED_RESIDUAL
#define NORMED_RESIDUAL 0         // normalization of the residual's rows before they are added, with the same values
#endif
#ifndef ONE_MATRIX
#define ONE_MATRIX 0              // whether all products of a stack share one matrix of pixels that no earlier launch writes
#endif
#ifndef ROW_SCALED
#define ROW_SCALED 0              // whether integer accumulators are multiplied by a scale per pixel
#endif
#ifndef ROW_BIAS
#define ROW_BIAS 0                // whether accumulators begin with a bias per pixel
#endif

#ifndef EDGED
#define EDGED 0                   // whether taps outside of an image read the zero point of 8-bit pixels
#endif
#if EDGED
#include "conv_edges.cuh"
#endif

#ifndef TURNED
#define TURNED 0                  // features of each head that a rotary embedding rotates, by the positions of their rows
#endif

#if VOLUME
struct Depth {                    // depth axis of a volume: see Depth of optdnn.kernels.conv.problem
    int channel_blocks, out, stride, first, dilation;
};
#endif

struct Params {
    TensorMap weights, pixels0, pixels1, output, residual;
    const StoredChannel* channel; // bias, or scale and bias, of every output channel
    u8* output_pointer;           // the reduction of a cluster stores and reads these directly
    const u8* residual_pointer;
    int channels, pixel_count, out_h, out_w;
    int channel_tiles, tiles, k_steps, reverse;
    Source source[2];
    Scatter scatter;              // for results that are blocks of pixels
    Requantize requantize;        // for 8-bit operands
    // Of a prologue: scale and shift per input channel (padded to whole K steps), and a factor per image and channel. IMAGE_SCALED: such
    // factors of the result.
    const float2* before;
    const u16* gate;
    int gate_pitch, image_pixels, images, gate_channels;
    // Of stream-K: partial sums that blocks exchange, and the number of warps of each span that have sent theirs.
    u8* partial;
    u32* arrived;
    Ahead ahead[2];
    int batch_tiles, inner_batches;                // of a stack of products
    int band_channels, band_inputs;                // of bands: channels of the result, and of the pixels that they read
    int output_pitch, residual_pitch;              // elements between consecutive pixels, for stores from registers
#if VOLUME
    Depth depth[2];
    int frame_channels, frame, frame_row, frame_column;    // of TOGETHER frames: channels of one frame, elements between frames
#endif
#if MOMENTS || NORMED || NORMED_RESIDUAL
    float2* moments;                               // moments of 64 channels of each row of the result
    const float2* given;                           // moments of each row that is normalized
    const float* columns;                          // column sums of the scaled matrix; for a residual, the norm's scale
    int given_blocks;
    float epsilon;
#endif
#if IMAGE_NORM
    int image_parts;                               // parts of an image: eight rows each
#endif
#if ROW_BIAS
    const float* row_bias;                         // a bias per pixel of a product; the number of pixels is even
#endif
#if ROW_SCALED
    const float* row_scales;                       // a scale per pixel, likewise
#endif
#if DYNAMIC
    const float* data_scale;                       // scale of all pixels
    const u8* data_zero;
#endif
#if EDGED
    Edges edges;
#endif
#if PARTS
    const float* factors;                          // of each channel's sums
#if EQUALIZED
    const float* input_scales;                     // of each input channel, along K
#endif
#endif
#if TURNED
    const uint4* angles;                           // cosines and sines of each position
    int turned_channels, positions;
#endif
};

#include "conv_moments.cuh"
#if EDGED
#include "edge_columns.cuh"
#endif

constexpr int OUT_ROW = 64 * OUT_ITEM;             // bytes of 64 channels: a row of the tile and, except for fp32, the span of its swizzle

// The channels of a thread's two rows: 8 apart, or neighbors where the weights' rows are permuted.
DEVICE int channel_row(int first, int lane, int i) { return first + (OUT_ITEM == 1 ? lane / 4 * 2 + i : lane / 4 + i * 8); }

// Loads the constants of a thread's two channels.
DEVICE void load_channel_pair(const Params& p, int first, int lane, Channel (&c)[2]) {
    if (DYNAMIC) grid_dependency_wait();           // the scale is another kernel's result
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = channel_row(first, lane, i);
        c[i] = row < p.channels ? channel_at(p, row) : no_channel();
    }
}

#if IMAGE_SCALED
static_assert(OUT_ITEM == 2, "factors are of 16-bit results");
DEVICE int image_of(const Params& p, int pixel) { return min(pixel, p.pixel_count - 1) / p.image_pixels; }

// Loads the factors of a thread's two channels in the image of ``pixel``. After griddepcontrol.wait.
DEVICE void load_factor_pair(const Params& p, int first, int pixel, int lane, Channel (&c)[2]) {
    #pragma unroll
    for (int i = 0; i < 2; i++) load_factor(p, channel_row(first, lane, i), image_of(p, pixel), c[i]);
}

// The constants of a thread's two channels, for eight pixels after another. Eight neighbors belong to one image.
struct ImageChannels {
    Channel c[2];
    int until;                                     // first pixel of the next image

    __device__ __forceinline__ void move_to(const Params& p, int pixel, int first, int lane) {
        if (pixel < until || pixel >= p.pixel_count) return;
        load_factor_pair(p, first, pixel, lane, c);
        until = (image_of(p, pixel) + 1) * p.image_pixels;
    }
};
#endif

#if OUT_ITEM == 2
// Accumulators of 16 channels (this warp's rows lane / 4 and lane / 4 + 8) x 16 pixels -> epilogue -> 16-bit [pixel][channel] rows.
// ``address`` is this lane's row of the four 8x8 matrices: lanes 0-7 and 8-15 address pixels 0-7 of channels 0-7 and 8-15, lanes
// 16-31 pixels 8-15. ``d``: the constants of pixels 8-15. With HAS_RESIDUAL the rows hold the residual and are overwritten in place.
// ``added`` maps an element of the residual to the value that is added.
template <class Added = AsTheyAre>
DEVICE void finish_16_pixels(const Params& p, u32 address, const Acc* v, const Channel (&c)[2], const Channel (&d)[2], const Added& added = Added()) {
    u32 r0 = 0, r1 = 0, r2 = 0, r3 = 0;
    if (HAS_RESIDUAL) ldmatrix_x4_trans(address, r0, r1, r2, r3);
    float y[8];                                    // two channels of one pixel together: a result depends on no other pixel
    finish_two(p.requantize, v[0], v[2], c[0], c[1], added(low_float(r0), 0, 0), added(low_float(r1), 0, 1), y[0], y[2]);
    finish_two(p.requantize, v[1], v[3], c[0], c[1], added(high_float(r0), 1, 0), added(high_float(r1), 1, 1), y[1], y[3]);
    finish_two(p.requantize, v[4], v[6], d[0], d[1], added(low_float(r2), 2, 0), added(low_float(r3), 2, 1), y[4], y[6]);
    finish_two(p.requantize, v[5], v[7], d[0], d[1], added(high_float(r2), 3, 0), added(high_float(r3), 3, 1), y[5], y[7]);
    stmatrix_x4_trans(address, pack2(y[0], y[1]), pack2(y[2], y[3]), pack2(y[4], y[5]), pack2(y[6], y[7]));
}

// The same for eight pixels: lanes 0-15 address the rows (lanes 16-31 repeat valid addresses).
template <class Added = AsTheyAre>
DEVICE void finish_8_pixels(const Params& p, u32 address, const Acc* v, const Channel (&c)[2], const Added& added = Added()) {
    u32 r0 = 0, r1 = 0;
    if (HAS_RESIDUAL) ldmatrix_x2_trans(address, r0, r1);
    float y[4];
    finish_two(p.requantize, v[0], v[2], c[0], c[1], added(low_float(r0), 0, 0), added(low_float(r1), 0, 1), y[0], y[2]);
    finish_two(p.requantize, v[1], v[3], c[0], c[1], added(high_float(r0), 1, 0), added(high_float(r1), 1, 1), y[1], y[3]);
    stmatrix_x2_trans(address, pack2(y[0], y[1]), pack2(y[2], y[3]));
}
#elif OUT_ITEM == 1
// 16 channels x 8 pixels in 8 bits: two neighboring channels (the permuted rows lane / 4 and lane / 4 + 8) form one 16-bit element
// of the 8x8 matrix that stmatrix transposes, so a row of the matrix holds one pixel's 16 channels.
DEVICE u32 finish_fragment(const Params& p, const Acc* v, const Channel (&c)[2], u32 residual) {
#if PAIRED
    return finish_pairs({v[0], v[2]}, c, {v[1], v[3]}, c);
#else
    float r[4];
    widen_residual(p.requantize, residual, r);
    return narrow4(p.requantize, finished(p.requantize, v[0], c[0], r[0]), finished(p.requantize, v[2], c[1], r[1]),
                   finished(p.requantize, v[1], c[0], r[2]), finished(p.requantize, v[3], c[1], r[3]));
#endif
}

// COLUMNS accumulator columns -> 8-bit rows of OUT_ROW bytes. row_of(column) gives the row of the tile for a column's pixel.
// With HAS_RESIDUAL the rows hold the residual and are overwritten in place.
template <int COLUMNS, class RowOf>
DEVICE void finish_columns(const Params& p, u32 tile, int quarter, int lane, const Acc* v, const Channel (&c)[2], const RowOf& row_of) {
    #pragma unroll
    for (int j = 0; j < COLUMNS / 8; j += 4) {
        const int left = COLUMNS / 8 - j;          // matrices of eight pixels; lane l addresses row l % 8 of matrix l / 8
        const int lanes = left >= 4 ? 32 : left >= 2 ? 16 : 8;
        const int row = row_of(j * 8 + lane % lanes);
        const u32 address = tile + row * OUT_ROW + ((quarter ^ ((row >> 1) & 3)) << 4);
        u32 r[4] = {0, 0, 0, 0};
        if (left >= 4) {
            if (HAS_RESIDUAL) ldmatrix_x4_trans(address, r[0], r[1], r[2], r[3]);
            #pragma unroll
            for (int i = 0; i < 4; i++) r[i] = finish_fragment(p, v + (j + i) * 4, c, r[i]);
            stmatrix_x4_trans(address, r[0], r[1], r[2], r[3]);
            continue;
        }
        if (left >= 2) {
            if (HAS_RESIDUAL) ldmatrix_x2_trans(address, r[0], r[1]);
            #pragma unroll
            for (int i = 0; i < 2; i++) r[i] = finish_fragment(p, v + (j + i) * 4, c, r[i]);
            stmatrix_x2_trans(address, r[0], r[1]);
        }
        if (left % 2) {
            const int last = row_of((j + left - 1) * 8 + lane % 8);
            const u32 end = tile + last * OUT_ROW + ((quarter ^ ((last >> 1) & 3)) << 4);
            if (HAS_RESIDUAL) ldmatrix_x1_trans(end, r[0]);
            stmatrix_x1_trans(end, finish_fragment(p, v + (j + left - 1) * 4, c, r[0]));
        }
    }
}
#endif

// ---- the epilogue of short kernels: partial sums of a cluster, direct stores --------------------------------------------

// One warpgroup's tile of 64 * M_TILES channels x COLUMNS pixels. Each of the SPLIT ranks of a cluster holds a partial sum over its
// part of K. Rank r owns the blocks r, r + SPLIT, ... of eight columns: the other ranks send it their accumulators in register
// order, and it adds them in rank order (deterministic). Then each warp transposes its 16 channels x 8 columns in shared memory, and
// a lane finishes and stores four channels of one pixel. With SPLIT == 1 nothing is sent: the stores avoid the barriers and the
// copy engine's latency of a TMA store.
template <int M_TILES, int COLUMNS, int SPLIT_WAYS, bool LATE = false> struct DirectStore {
    static constexpr int SLOTS = (COLUMNS / 8 + SPLIT_WAYS - 1) / SPLIT_WAYS;
    static constexpr u32 INBOX_BYTES = SPLIT_WAYS > 1 ? M_TILES * SLOTS * SPLIT_WAYS * 2048 : 0;   // per warpgroup
    static constexpr u32 SCRATCH_BYTES = 4 * M_TILES * SLOTS * 640;
    static constexpr u32 BYTES = INBOX_BYTES + SCRATCH_BYTES;

    // Bytes that this rank's barrier waits for, per warpgroup.
    static __device__ __forceinline__ u32 expected(int rank) {
        return M_TILES * ((COLUMNS / 8 + SPLIT_WAYS - 1 - rank) / SPLIT_WAYS) * SPLIT_WAYS * 2048;
    }

    // Whether a rank owns columns. A rank without columns receives nothing, waits for nothing and stores nothing.
    static __device__ __forceinline__ bool owns(int rank) { return SPLIT_WAYS <= COLUMNS / 8 || rank < COLUMNS / 8; }

    int channel, rank, lane, quarter;
    int pixel[SLOTS];                              // -1: outside the image
    int until;                                     // IMAGE_SCALED: the constants are those of the image that ends before this pixel
    Channel constants[M_TILES][4];
    Four residual[LATE ? 1 : M_TILES][LATE ? 1 : SLOTS];               // four elements each; LATE: loaded one at a time
#if NORMED_RESIDUAL
    float scale[M_TILES][4];
#endif

    // Before griddepcontrol.wait: addresses and constants. locate(column) gives the pixel, or -1.
    template <class Locate>
    __device__ __forceinline__ void prepare(const Params& p, int first_channel, int rank_, int quarter_, int lane_, const Locate& locate) {
        rank = rank_, lane = lane_, quarter = quarter_;
        channel = first_channel + quarter * 16 + lane % 4 * 4;
        #pragma unroll
        for (int i = 0; i < SLOTS; i++) {
            const int column = (rank + i * SPLIT_WAYS) * 8 + lane / 4;
            pixel[i] = column < COLUMNS ? locate(column) : -1;
        }
        #pragma unroll
        for (int m = 0; m < M_TILES; m++)
            load_four(p, channel + m * 64, p.channels, constants[m]);
#if NORMED_RESIDUAL
        #pragma unroll
        for (int m = 0; m < M_TILES; m++) load_four(p.columns, channel + m * 64, p.channels, scale[m]);
#endif
    }

    __device__ __forceinline__ Four residual_four(const Params& p, int m, int i) const {
        if (pixel[i] < 0 || channel + m * 64 >= p.channels) return Four();
        return *reinterpret_cast<const Four*>(p.residual_pointer + ((long long)pixel[i] * p.residual_pitch + channel + m * 64) * OUT_ITEM);
    }

#if IMAGE_SCALED
    __device__ __forceinline__ void load_factors(const Params& p, int m, int image, Channel (&c)[4]) const {
        #pragma unroll
        for (int i = 0; i < 4; i++) load_factor(p, channel + m * 64 + i, image, c[i]);
    }
#endif

    // After griddepcontrol.wait: the residual, and the factors of the first image.
    __device__ __forceinline__ void load_residual(const Params& p) {
#if IMAGE_SCALED
        const int image = image_of(p, max(pixel[0], 0));
        until = (image + 1) * p.image_pixels;
        #pragma unroll
        for (int m = 0; m < M_TILES; m++) load_factors(p, m, image, constants[m]);
#endif
        if (!HAS_RESIDUAL || LATE) return;
        #pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            #pragma unroll
            for (int i = 0; i < SLOTS; i++) residual[m][i] = residual_four(p, m, i);
        }
    }

    // A lane's four elements of the residual.
    __device__ __forceinline__ Four added_four(const Params& p, int m, int i) const {
        return !HAS_RESIDUAL ? Four() : LATE ? residual_four(p, m, i) : residual[LATE ? 0 : m][LATE ? 0 : i];
    }

    // The four results of a lane. ``r``: the residual; ``factors``: the factors of its rows, in shared memory.
    __device__ __forceinline__ Four finished_four(const Params& p, Acc4 v, Four r, int m, int i, u32 factors) const {
#if NORMED_RESIDUAL
        float2 f;
        shared_load(factors + min((rank + i * SPLIT_WAYS) * 8 + lane / 4, COLUMNS - 1) * 8, f);
        return finish_four(p.requantize, v, constants[m],
                           {normalized(low_float(r.x), f.x, f.y, scale[m][0]), normalized(high_float(r.x), f.x, f.y, scale[m][1]),
                            normalized(low_float(r.y), f.x, f.y, scale[m][2]), normalized(high_float(r.y), f.x, f.y, scale[m][3])});
#else
#if IMAGE_SCALED
        if (pixel[i] >= until) {
            Channel own[4] = {constants[m][0], constants[m][1], constants[m][2], constants[m][3]};
            load_factors(p, m, image_of(p, pixel[i]), own);
            return finish_four(p.requantize, v, own, r);
        }
#endif
        return finish_four(p.requantize, v, constants[m], r);
#endif
    }

    // ``memory``: BYTES of shared memory of this warpgroup, at the same address in every block of the cluster. ``first_channel`` and
    // ``first_pixel`` of the warpgroup are needed for moments. ``factors`` of its pixels and the barrier ``told`` are needed for a
    // normalized residual.
    __device__ __forceinline__ void finish(const Params& p, Acc (&acc)[M_TILES][COLUMNS / 2], u32 memory, u32 reduced, int first_channel = 0,
                                           int first_pixel = 0, u32 factors = 0, u32 told = 0) {
        const u32 own_fragment = (quarter * 32 + lane) * 16;
        if (SPLIT_WAYS > 1) {
            __syncwarp();
            cluster_wait();                        // the peers run and their barriers are initialized: their shared memory may be written
            #pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                #pragma unroll
                for (int j = 0; j < COLUMNS / 8; j++) {
                    const u32 slot = memory + ((m * SLOTS + j / SPLIT_WAYS) * SPLIT_WAYS + rank) * 2048 + own_fragment;
                    cluster_send(slot, reduced, j % SPLIT_WAYS, &acc[m][j * 4]);
                }
            }
            if (!owns(rank)) return;
            if (threadIdx.x == 0) mark(5);
            barrier_wait_cluster(reduced, 0);
            if (threadIdx.x == 0) mark(6);
        }
        const u32 scratch = memory + INBOX_BYTES + quarter * (M_TILES * SLOTS * 640);
        // [8 pixels][16 channels], pitch 20: no bank conflicts. A thread's second row is 8 channels on, or the next channel where permuted.
        const u32 column = scratch + (lane % 4 * 2 * 20 + lane / 4 * (OUT_ITEM == 1 ? 2 : 1)) * 4;
        constexpr u32 NEXT_ROW = OUT_ITEM == 1 ? 4 : 32;
        // Where registers allow it, the loads of several slots come before what depends on them: a lone warp per scheduler would wait for each.
        // All loads of the residual come before the stores, which they would wait for.
        constexpr bool ROOM = M_TILES * COLUMNS <= 128;
        constexpr int ALL = M_TILES * SLOTS, SUMMED = ROOM && SPLIT_WAYS < 12 ? 12 / SPLIT_WAYS : 1, FINISHED = ROOM ? 6 : 1;
        #pragma unroll
        for (int begin = 0; begin < ALL; begin += SUMMED) {
            const int end = begin + SUMMED < ALL ? begin + SUMMED : ALL;
            Acc4 part[SUMMED][SPLIT_WAYS];
            #pragma unroll
            for (int i = begin; i < end; i++) {
                const Acc* own = acc[i / SLOTS] + i % SLOTS * 4;
                if (SPLIT_WAYS == 1) part[i - begin][0].x = own[0], part[i - begin][0].y = own[1], part[i - begin][0].z = own[2], part[i - begin][0].w = own[3];
                #pragma unroll
                for (int r = 0; SPLIT_WAYS > 1 && r < SPLIT_WAYS; r++) shared_load(memory + (i * SPLIT_WAYS + r) * 2048 + own_fragment, part[i - begin][r]);
            }
            #pragma unroll
            for (int i = begin; i < end; i++) {
                Acc4 sum = part[i - begin][0];
                #pragma unroll
                for (int r = 1; r < SPLIT_WAYS; r++) {
                    sum.x += part[i - begin][r].x;
                    sum.y += part[i - begin][r].y;
                    sum.z += part[i - begin][r].z;
                    sum.w += part[i - begin][r].w;
                }
                const u32 target = column + i * 640;
                shared_store(target, sum.x);
                shared_store(target + 80, sum.y);
                shared_store(target + NEXT_ROW, sum.z);
                shared_store(target + 80 + NEXT_ROW, sum.w);
            }
        }
        __syncwarp();
        if (NORMED_RESIDUAL) barrier_wait(told, 0);
        #pragma unroll
        for (int begin = 0; begin < ALL; begin += FINISHED) {
            const int end = begin + FINISHED < ALL ? begin + FINISHED : ALL;
            Acc4 v[FINISHED];
            Four added[FINISHED], stored[FINISHED];
            #pragma unroll
            for (int i = begin; i < end; i++) added[i - begin] = added_four(p, i / SLOTS, i % SLOTS);
            #pragma unroll
            for (int i = begin; i < end; i++) shared_load(scratch + i * 640 + (lane / 4 * 20 + lane % 4 * 4) * 4, v[i - begin]);
            #pragma unroll
            for (int i = begin; i < end; i++) {
                const int m = i / SLOTS, slot = i % SLOTS;
                stored[i - begin] = finished_four(p, v[i - begin], added[i - begin], m, slot, factors);
                if (pixel[slot] < 0 || channel + m * 64 >= p.channels) continue;
#if SCATTER
                u8* const target = scattered(p.scatter, p.output_pointer, OUT_ITEM, channel + m * 64, pixel[slot], p.out_h, p.out_w);
                if (target == nullptr) continue;
#else
                u8* const target = p.output_pointer + ((long long)pixel[slot] * p.output_pitch + channel + m * 64) * OUT_ITEM;
#endif
                *reinterpret_cast<Four*>(target) = stored[i - begin];
            }
#if MOMENTS
            __syncwarp();                          // all lanes have read their rows
            #pragma unroll
            for (int i = begin; i < end; i++) keep_moments(scratch + i * 640, stored[i - begin], lane);
#endif
        }
#if MOMENTS
        named_barrier(1 + threadIdx.x / 128, 128);
        for (int k = threadIdx.x % 128; k < M_TILES * SLOTS * 8; k += 128) {
            const int slot = k / 8, block = first_channel / 64 + slot / SLOTS, column = (rank + slot % SLOTS * SPLIT_WAYS) * 8 + k % 8;
            if (column >= COLUMNS || first_pixel + column >= p.pixel_count || block * 64 >= p.channels || k % MOMENT_ROWS) continue;
            float2 part[4];
            #pragma unroll
            for (int warp = 0; warp < 4; warp++)
                shared_load(memory + INBOX_BYTES + (warp * M_TILES * SLOTS + slot) * 640 + k % 8 * 8, part[warp]);
            put_moments(p, block, first_pixel + column,
                        joint_moments(joint_moments(part[0], part[1], 16.0f * MOMENT_ROWS), joint_moments(part[2], part[3], 16.0f * MOMENT_ROWS),
                                      32.0f * MOMENT_ROWS));
        }
#endif
    }
};
