// What kernels of first convolutions share: the parameter block, weights and pixels on their way into shared memory. See conv_stem.cu.
//
// generated.cuh defines the geometry (see optdnn.kernels.conv.stem_kernel.recipe), word_offset(k, t) (of half K step k, in words, less t) and
// epilogue().
#pragma once
#include "ptx.cuh"
#include "generated.cuh"
#include "stem_instructions.cuh"

#ifndef FRAMES
#define FRAMES 0                                   // under the taps along depth, whose channels are those of one image; 0: no volume
#endif

#ifndef POOL
#define POOL 0                                     // rows and columns of the windows of the max pool behind it; 0: none
#endif

struct Params {
    const u8* image;
    const u16 *weights, *residual;                 // weights: [channels][K_STEPS * 16]
    const float* bias;
    u16* output;
    long long image_pitch;                         // elements from image to image, and (below) from plane to plane, row to row
    int plane_pitch, row_pitch, column_pitch;
    int height, width, out_h, out_w;
    int tiles_x, tiles_y, images;
    int step_x, step_y, step_image;                // from a block's tile to its next, gridDim.x tiles on
    int first_row, first_column;                   // where tile 0 begins to read: not after the padding's edge
    int channels, pitch, residual_pitch;           // channels to store; elements from pixel to pixel
    float factor[4], shift[4];
#if FRAMES
    // Of a volume: elements from frame to frame, its frames, those of the result, and how these walk (Depth of optdnn.kernels.conv.problem).
    int frame_pitch, frames, out_frames, frame_stride, first_frame, frame_dilation;
#endif
#if POOL
    int pooled_h, pooled_w, band, bands;           // rows and columns of the pooled image; tiles of a block, blocks of an image
#endif
};

constexpr int THREADS = WARPS_M * WARPS_N * 32, BLOCK_N = WARPS_N * N_TILES * 8, K = K_STEPS * 16;
constexpr int WEIGHT_ROW = K * 2 + 16;             // bytes: an odd number of 16-byte chunks, so that ldmatrix hits all banks
constexpr u32 BIAS_AT = BLOCK_N * WEIGHT_ROW, IMAGE_AT = BIAS_AT + BLOCK_N * 4;
constexpr bool KEEP = K_STEPS * N_TILES * 2 <= KEPT_REGISTERS;                         // weights stay in registers
constexpr int CHUNKS = HALO_H * ROW_CHUNKS * (PLANES ? CHANNELS : 1);                  // of VEC columns
constexpr int ROUNDS = (CHUNKS + THREADS - 1) / THREADS;
constexpr int SETS = PLANES ? 1 : CHANNELS, RAW = (VEC * IMAGE_ITEM + 3) / 4;

constexpr bool COPIED = !NORMALIZE && IMAGE_KIND == FACTOR_KIND;                       // pixels are factors as they are
static_assert(!BUFFERED || (COPIED && PLANES && AHEAD && VEC > 1));
static_assert(TILE_W % 8 == 0 && TILE_H * TILE_W == WARPS_M * M_TILES * 16);

// ---- rows of weights ---------------------------------------------------------------------------------------------------

// n8 tiles of a warp come in groups of four, two or one; a lane's sums of a group of G are 2 G neighbouring channels.
DEVICE constexpr int group_of(int tile) {
    const int left = N_TILES - tile / 4 * 4;
    return left >= 4 ? 4 : left >= 2 ? (tile % 4 < 2 ? 2 : 1) : 1;
}
DEVICE constexpr int group_start(int tile) {
    return tile / group_of(tile) * group_of(tile);                 // as the larger groups come first
}
DEVICE int row_of(int channel) {                   // of the block
    const int warp = channel / (N_TILES * 8), in_warp = channel % (N_TILES * 8), tile = in_warp / 8;
    const int group = group_of(tile), first = group_start(tile);
    const int c = in_warp - first * 8;
    return warp * N_TILES * 8 + first * 8 + c % (2 * group) / 2 * 8 + c / (2 * group) * 2 + c % 2;
}

// Begins to bring the weights and biases of the block's channels, rows in the order of row_of().
DEVICE void load_weights(const Params& p, u32 base) {
    constexpr int PARTS = K / 8, WIDE = PARTS < 32 ? PARTS : 32, ROWS = 32 / WIDE, WARPS = WARPS_M * WARPS_N;   // a warp copies ROWS at a time
    const int lane = threadIdx.x % 32, part = lane % WIDE;
    const u16* from = p.weights + (long long)blockIdx.y * BLOCK_N * K;
    #pragma unroll 4
    for (int channel = threadIdx.x / 32 * ROWS + lane / WIDE; channel < BLOCK_N; channel += WARPS * ROWS) {
        const bool real = int(blockIdx.y) * BLOCK_N + channel < p.channels;
        if (lane >= ROWS * WIDE) break;
        #pragma unroll
        for (int i = 0; i < PARTS; i += WIDE) {
            if (PARTS % WIDE && i + part >= PARTS) break;
            const u32 to = base + row_of(channel) * WEIGHT_ROW + (i + part) * 16;
            if (real) copy_async<16>(to, from + channel * K + (i + part) * 8);
            else store_zeros(to, 16);
        }
    }
    for (int i = threadIdx.x; i < BLOCK_N; i += THREADS) {
        const int channel = blockIdx.y * BLOCK_N + i;
        if (channel < p.channels) copy_async<4>(base + BIAS_AT + i * 4, p.bias + channel);
        else store_zeros(base + BIAS_AT + i * 4, 4);
    }
    copies_commit();
}

// B fragments of a K step; matrices: channels 0-7 at k 0-7 and 8-15, then channels 8-15. ``address`` is made behind the barrier that the
// weights were waited for at.
DEVICE void load_b(u32 address, u32 (&b)[N_TILES][2]) {
    #pragma unroll
    for (int n = 0; n + 1 < N_TILES; n += 2) load_matrices(address + n * 8 * WEIGHT_ROW, b[n], b[n + 1]);
    if constexpr (N_TILES % 2) load_matrices(address + (N_TILES - 1) * 8 * WEIGHT_ROW, b[N_TILES - 1]);
}

// ---- pixels into shared memory -----------------------------------------------------------------------------------------

struct Chunk { u32 raw[SETS][RAW]; };              // VEC neighbouring columns of a row, of each channel that lies beside

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

// The chunks that a thread copies, the same of every tile: where they lie in the image after the tile's first pixel (elements),
// and in which row and column of the tile.
struct Places { int offset[ROUNDS], row[ROUNDS], column[ROUNDS]; };

// Elements from the first channel (of the first frame) to another one.
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

struct Tile { int x, y, image; };                  // in tiles, and which image

// Where the image of a tile begins; of a volume, the first frame under its taps.
DEVICE long long image_offset(const Params& p, const Tile& tile) {
#if FRAMES
    const int image = u32(tile.image) / u32(p.out_frames), frame = (tile.image - image * p.out_frames) * p.frame_stride + p.first_frame;
    return image * p.image_pitch + (long long)frame * p.frame_pitch;
#else
    return tile.image * p.image_pitch;
#endif
}

// Whether the frame of a channel is one of the volume's.
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

// As 16-bit numbers: cast, normalized, zeros outside (the padding is of the normalized image).
DEVICE void put(const Params& p, u8* pixels, const Tile& tile, const Places& at, const Chunk (&held)[ROUNDS]) {
    #pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        const int chunk = threadIdx.x + i * THREADS;
        if (CHUNKS % THREADS && chunk >= CHUNKS) continue;
        const bool real = COPIED || !NORMALIZE || inside(p, tile, at, i);
        constexpr int LANES = VEC * TOGETHER;                                          // 16-bit numbers of the chunk
        u32 words[(LANES + 1) / 2];
        #pragma unroll
        for (int w = 0; w < (LANES + 1) / 2; w++) {
            float v[2];
            u32 bits[2];
            #pragma unroll
            for (int j = 0; j < 2; j++) {
                const int lane = w * 2 + j, set = lane % TOGETHER, x = lane / TOGETHER;
                v[j] = 0.0f, bits[j] = 0;
                if (set >= SETS || x >= VEC) continue;
                if constexpr (COPIED) bits[j] = held[i].raw[set][x / 2] >> (x % 2 * 16) & 0xffffu;
                else if (real) v[j] = normalized(p, pixel(held[i].raw[set], x), PLANES ? chunk / (ROW_CHUNKS * HALO_H) : set);
            }
            words[w] = COPIED ? bits[0] | bits[1] << 16 : pack2(v[0], v[1]);
        }
        const int first = PITCH == ROW_CHUNKS * VEC ? chunk * VEC : chunk / ROW_CHUNKS * PITCH + chunk % ROW_CHUNKS * VEC;
        u16* to = reinterpret_cast<u16*>(pixels) + first * TOGETHER;
        if constexpr (LANES % 8 == 0) {
            #pragma unroll
            for (int w = 0; w < LANES / 2; w += 4)
                reinterpret_cast<uint4*>(to)[w / 4] = make_uint4(words[w], words[w + 1], words[w + 2], words[w + 3]);
        } else if constexpr (LANES == 4) {
            *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
        } else if constexpr (LANES == 2) {
            *reinterpret_cast<u32*>(to) = words[0];
        } else {
            *to = static_cast<u16>(words[0]);
        }
    }
}

// The same without a way through registers, for planes of the factors' own type.
DEVICE void copy_pixels(const Params& p, u32 pixels, const Tile& tile, const Places& at) {
    const int row = p.first_row + tile.y * (TILE_H * STRIDE_H), column = p.first_column + tile.x * (TILE_W * STRIDE_W);
    const u8* from = p.image + (image_offset(p, tile) + row * p.row_pitch + column * p.column_pitch) * IMAGE_ITEM;
    #pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        const int chunk = threadIdx.x + i * THREADS;
        if (CHUNKS % THREADS && chunk >= CHUNKS) continue;
        const u32 to = pixels + (chunk / ROW_CHUNKS * PITCH + chunk % ROW_CHUNKS * VEC) * 2;
        if (inside(p, tile, at, i)) copy_async<VEC * 2>(to, from + (long long)at.offset[i] * IMAGE_ITEM);
        else store_zeros(to, VEC * 2);
    }
    copies_commit();
}

// A block's first pixels, and after them the weights that stay in registers, from ``weights_at`` on.
DEVICE void begin_block(const Params& p, u8* shared, u32 base, const Tile& tile, const Places& places, u32& weights_at, Chunk (&held)[ROUNDS],
                        u32 (&kept)[KEEP ? K_STEPS : 1][N_TILES][2]) {
    if constexpr (BUFFERED) {
        copy_pixels(p, base + IMAGE_AT, tile, places);
    } else {
        fetch(p, tile, places, held);
        put(p, shared + IMAGE_AT, tile, places, held);
    }
    copies_landed();
    __syncthreads();
    asm volatile("" : "+r"(weights_at)::"memory");
    if constexpr (KEEP) {
        #pragma unroll
        for (int k = 0; k < K_STEPS; k++) load_b(weights_at + k * 32, kept[k]);
    }
}

// ---- results -----------------------------------------------------------------------------------------------------------

// Two neighbouring channels of a pixel, with the pair that is added.
DEVICE u32 finish_pair(float x, float y, u32 added) {
    x = epilogue(x, 0.0f, low_float(added)), y = epilogue(y, 0.0f, high_float(added));
#if FINAL_SILU
    silu_pair(x, y);
#endif
    return pack_results(x, y);
}

// A tile's sums begin with the bias of this lane's channels.
DEVICE void begin_sums(const float* bias, int t, float (&start)[N_TILES][4]) {
    #pragma unroll
    for (int j = 0; j < N_TILES; j++) {
        const float2 c = *reinterpret_cast<const float2*>(bias + (group_start(j) * 4 + t * group_of(j) + j - group_start(j)) * 2);
        start[j][0] = start[j][2] = c.x, start[j][1] = start[j][3] = c.y;
    }
}

// Words of each row of eight pixels (two an m16 tile), and of the words of a K step where these are not neighbours.
struct Words { int rows[M_TILES][2], offsets[K_STEPS][2]; };

// The products of a tile. ``pixels``: offset of its pixels in shared memory, from ``shared`` on.
DEVICE void multiply_tile(const u8* pixels, const Words& at, u32 weights_at, u32 (&kept)[KEEP ? K_STEPS : 1][N_TILES][2],
                          float (&start)[N_TILES][4], float (&acc)[M_TILES][N_TILES][4]) {
    #pragma unroll
    for (int k = 0; k < K_STEPS; k++) {
        u32 fresh[N_TILES][2];
        if (!KEEP) load_b(weights_at + k * 32, fresh);
        #pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            u32 a[4];
            #pragma unroll
            for (int i = 0; i < 4; i++) a[i] = *reinterpret_cast<const u32*>(pixels + at.rows[m][i % 2] + at.offsets[k][i / 2]);
            #pragma unroll
            for (int j = 0; j < N_TILES; j++) {
                const u32(&b)[2] = KEEP ? kept[KEEP ? k : 0][j] : fresh[j];
                multiply(acc[m][j], a, b[0], b[1], k ? acc[m][j] : start[j]);
            }
        }
    }
}
