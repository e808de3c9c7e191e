// Shared by all kernels of first convolutions: the parameter block, and the copies of pixels (one to four channels) into shared memory.
// See conv_stem.cu.
//
// generated.cuh defines the geometry (see optdnn.kernels.conv.stem_kernel.recipe) and epilogue().
#pragma once
#include "ptx.cuh"
#include "generated.cuh"
#include "stem_instructions.cuh"

#ifndef FRAMES
#define FRAMES 0                                   // frames under the depth taps, as channels of one image; 0: no volume
#endif

#ifndef POOL
#define POOL 0                                     // rows and columns of a window of the max pool that follows; 0: no pool
#endif

#ifndef IN_BANDS
#define IN_BANDS 0                                 // whether a block walks down a band of one image
#endif

#if FACTOR_ITEM == 4
using Number = float;                              // a factor, a result
#else
using Number = u16;
#endif

struct Params {
    const u8* image;
    const Number *weights, *residual;              // weights: [channels][K]
    const float* bias;
    Number* output;
    long long image_pitch;                         // elements between images; below: between planes, rows, columns
    int plane_pitch, row_pitch, column_pitch;
    int height, width, out_h, out_w;
    int tiles_x, tiles_y, images;
    int step_x, step_y, step_image;                // from a block's tile to its next tile, gridDim.x tiles further
    int first_row, first_column;                   // first row and column that tile 0 reads: at or before the edge of the padding
    int channels, pitch, residual_pitch;           // channels to store; elements between consecutive pixels
    float factor[4], shift[4];
#if FRAMES
    // Of a volume: elements between frames, number of input and of output frames, and the walk along depth (Depth of
    // optdnn.kernels.conv.problem).
    int frame_pitch, frames, out_frames, frame_stride, first_frame, frame_dilation;
#endif
#if IN_BANDS
    int pooled_h, pooled_w, band, bands;           // rows and columns of the pooled image; tiles of a block; bands of an image
#endif
};

constexpr int THREADS = WARPS_M * WARPS_N * 32, K = K_STEPS * 32 / FACTOR_ITEM;
constexpr int PER_WORD = 4 / FACTOR_ITEM;                                              // factors of a 32-bit word
constexpr int CHUNKS = HALO_H * ROW_CHUNKS * (PLANES ? CHANNELS : 1);                  // of VEC columns
constexpr int ROUNDS = (CHUNKS + THREADS - 1) / THREADS;
constexpr int SETS = PLANES ? 1 : CHANNELS, RAW = (VEC * IMAGE_ITEM + 3) / 4;
constexpr bool COPIED = !NORMALIZE && IMAGE_KIND == FACTOR_KIND;                       // pixels need no conversion
static_assert(TILE_W % 8 == 0);

struct Chunk { u32 raw[SETS][RAW]; };              // VEC neighboring columns of a row, of every interleaved channel

DEVICE void load_raw(const u8* at, u32 (&raw)[RAW]) {
    if constexpr (VEC * IMAGE_ITEM == 16) {
        const uint4 v = __ldg(reinterpret_cast<const uint4*>(at));
        raw[0] = v.x, raw[1] = v.y, raw[2] = v.z, raw[3] = v.w;
    } else if constexpr (VEC * IMAGE_ITEM == 8) {
        const uint2 v = __ldg(reinterpret_cast<const uint2*>(at));
        raw[0] = v.x, raw[1] = v.y;
    } else if constexpr (VEC * IMAGE_ITEM == 4) {
        raw[0] = __ldg(reinterpret_cast<const u32*>(at));
    } else if constexpr (VEC * IMAGE_ITEM == 2) {
        raw[0] = __ldg(reinterpret_cast<const u16*>(at));
    } else {
        raw[0] = __ldg(at);
    }
}

DEVICE float pixel(const u32 (&raw)[RAW], int i) {
#if IMAGE_KIND == 0    // fp32
    return __uint_as_float(raw[i]);
#elif IMAGE_KIND == 1  // fp16
    return i % 2 ? high_half(raw[i / 2]) : low_half(raw[i / 2]);
#elif IMAGE_KIND == 2  // bf16
    return __uint_as_float(i % 2 ? raw[i / 2] & 0xffff0000u : raw[i / 2] << 16);
#elif IMAGE_KIND == 3  // uint8
    return float((raw[i / 4] >> (i % 4 * 8)) & 255u);
#else                  // int8
    return float(static_cast<signed char>((raw[i / 4] >> (i % 4 * 8)) & 255u));
#endif
}

// The chunks that a thread copies; the same for every tile. ``offset``: elements from the tile's first pixel in the image.
// ``row``, ``column``: position in the tile.
struct Places { int offset[ROUNDS], row[ROUNDS], column[ROUNDS]; };

// Elements from the first channel (of the first frame) to another channel.
DEVICE int plane_offset(const Params& p, int channel) {
#if FRAMES
    constexpr int EACH = CHANNELS / FRAMES;
    return channel / EACH * p.frame_dilation * p.frame_pitch + channel % EACH * p.plane_pitch;
#else
    return channel * p.plane_pitch;
#endif
}

DEVICE Places places_of(const Params& p) {
    Places at;
    #pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        const int chunk = threadIdx.x + i * THREADS, channel = PLANES ? chunk / (ROW_CHUNKS * HALO_H) : 0;
        at.row[i] = chunk / ROW_CHUNKS % HALO_H, at.column[i] = chunk % ROW_CHUNKS * VEC;
        at.offset[i] = plane_offset(p, channel) + at.row[i] * p.row_pitch + at.column[i] * p.column_pitch;
    }
    return at;
}

struct Tile { int x, y, image; };                  // x, y in tiles; the image's index

// Offset of a tile's image; for a volume, of the first frame under its taps.
DEVICE long long image_offset(const Params& p, const Tile& tile) {
#if FRAMES
    const int image = u32(tile.image) / u32(p.out_frames), frame = (tile.image - image * p.out_frames) * p.frame_stride + p.first_frame;
    return image * p.image_pitch + (long long)frame * p.frame_pitch;
#else
    return tile.image * p.image_pitch;
#endif
}

// Whether the frame of a channel lies in the volume.
DEVICE bool in_volume(const Params& p, const Tile& tile, int channel) {
#if FRAMES
    const int frame = int(u32(tile.image) % u32(p.out_frames)) * p.frame_stride + p.first_frame;
    return unsigned(frame + channel / (CHANNELS / FRAMES) * p.frame_dilation) < unsigned(p.frames);
#else
    return true;
#endif
}

DEVICE bool inside(const Params& p, const Tile& tile, const Places& at, int i) {
    const int row = p.first_row + tile.y * (TILE_H * STRIDE_H) + at.row[i], column = p.first_column + tile.x * (TILE_W * STRIDE_W) + at.column[i];
    return (CHUNKS % THREADS == 0 || i + 1 < ROUNDS || threadIdx.x + i * THREADS < CHUNKS) && unsigned(row) < unsigned(p.height) &&
           unsigned(column) < unsigned(p.width) && (!PLANES || in_volume(p, tile, (threadIdx.x + i * THREADS) / (ROW_CHUNKS * HALO_H)));
}

DEVICE void fetch(const Params& p, const Tile& tile, const Places& at, Chunk (&held)[ROUNDS]) {
    const int row = p.first_row + tile.y * (TILE_H * STRIDE_H), column = p.first_column + tile.x * (TILE_W * STRIDE_W);
    const u8* from = p.image + (image_offset(p, tile) + row * p.row_pitch + column * p.column_pitch) * IMAGE_ITEM;
    #pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        const bool real = inside(p, tile, at, i);
        #pragma unroll
        for (int s = 0; s < SETS; s++) {
            #pragma unroll
            for (int r = 0; r < RAW; r++) held[i].raw[s][r] = 0;
            if (real && (PLANES || in_volume(p, tile, s)))
                load_raw(from + (long long)(at.offset[i] + plane_offset(p, s)) * IMAGE_ITEM, held[i].raw[s]);
        }
    }
}

DEVICE float normalized(const Params& p, float v, int channel) {
    return NORMALIZE ? __fadd_rn(__fmul_rn(v, p.factor[channel]), p.shift[channel]) : v;
}

// Writes factors to shared memory: cast and normalized, zeros outside the image (the padding follows the normalization).
DEVICE void put(const Params& p, u8* pixels, const Tile& tile, const Places& at, const Chunk (&held)[ROUNDS]) {
    #pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        const int chunk = threadIdx.x + i * THREADS;
        if (CHUNKS % THREADS && chunk >= CHUNKS) continue;
        const bool real = COPIED || !NORMALIZE || inside(p, tile, at, i);
        constexpr int LANES = VEC * TOGETHER, WORDS = (LANES + PER_WORD - 1) / PER_WORD;   // factors of the chunk, and their words
        u32 words[WORDS];
        #pragma unroll
        for (int w = 0; w < WORDS; w++) {
            float v[2];
            u32 bits[2];
            #pragma unroll
            for (int j = 0; j < PER_WORD; j++) {
                const int lane = w * PER_WORD + j, set = lane % TOGETHER, x = lane / TOGETHER;
                v[j] = 0.0f, bits[j] = 0;
                if (set >= SETS || x >= VEC) continue;
                if constexpr (COPIED) bits[j] = PER_WORD == 1 ? held[i].raw[set][x] : held[i].raw[set][x / 2] >> (x % 2 * 16) & 0xffffu;
                else if (real) v[j] = normalized(p, pixel(held[i].raw[set], x), PLANES ? chunk / (ROW_CHUNKS * HALO_H) : set);
            }
            if (PER_WORD == 1) words[w] = COPIED ? bits[0] : __float_as_uint(v[0]);
            else words[w] = COPIED ? bits[0] | bits[1] << 16 : pack2(v[0], v[1]);
        }
        const int first = PITCH == ROW_CHUNKS * VEC ? chunk * VEC : chunk / ROW_CHUNKS * PITCH + chunk % ROW_CHUNKS * VEC;
        u8* to = pixels + first * TOGETHER * FACTOR_ITEM;
        if constexpr (WORDS % 4 == 0) {
            #pragma unroll
            for (int w = 0; w < WORDS; w += 4)
                reinterpret_cast<uint4*>(to)[w / 4] = make_uint4(words[w], words[w + 1], words[w + 2], words[w + 3]);
        } else if constexpr (WORDS == 2) {
            *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
        } else if constexpr (LANES == PER_WORD) {
            *reinterpret_cast<u32*>(to) = words[0];
        } else {
            *reinterpret_cast<u16*>(to) = static_cast<u16>(words[0]);
        }
    }
}

// The same by asynchronous copies, without registers, for planes of the factors' own type.
DEVICE void copy_pixels(const Params& p, u32 pixels, const Tile& tile, const Places& at) {
    const int row = p.first_row + tile.y * (TILE_H * STRIDE_H), column = p.first_column + tile.x * (TILE_W * STRIDE_W);
    const u8* from = p.image + (image_offset(p, tile) + row * p.row_pitch + column * p.column_pitch) * IMAGE_ITEM;
    #pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        const int chunk = threadIdx.x + i * THREADS;
        if (CHUNKS % THREADS && chunk >= CHUNKS) continue;
        const u32 to = pixels + (chunk / ROW_CHUNKS * PITCH + chunk % ROW_CHUNKS * VEC) * FACTOR_ITEM;
        if (inside(p, tile, at, i)) copy_async<VEC * FACTOR_ITEM>(to, from + (long long)at.offset[i] * IMAGE_ITEM);
        else store_zeros(to, VEC * FACTOR_ITEM);
    }
    copies_commit();
}

// ---- results -----------------------------------------------------------------------------------------------------------

#if FACTOR_ITEM == 2
// Two neighboring channels of a pixel, with the added pair.
DEVICE u32 finish_pair(float x, float y, u32 added) {
    x = epilogue(x, 0.0f, low_float(added)), y = epilogue(y, 0.0f, high_float(added));
#if FINAL_SILU
    silu_pair(x, y);
#endif
    return pack_results(x, y);
}
#endif
