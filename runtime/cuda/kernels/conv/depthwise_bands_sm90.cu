// Depthwise convolution for Hopper on tensor cores: a row of a channel's filter is a banded matrix.
//
// For one channel, eight results of a row are the product of the sixteen pixels around them with a 16 x 8 matrix. Each column of this
// matrix holds the filter's row, one place below the previous column. mma.sync multiplies sixteen such rows of pixels (A) by it (B).
// Only KERNEL_W of 16 products are useful. That is still more than scalar arithmetic computes in the same time, and 16-bit operands need
// no conversion.
//
// A warp takes a chunk of eight channels. The rows of A are GROUPS rows of the image, ROWS apart, times BLOCKS blocks of eight pixels
// beside each other, times TILE_N images. The same registers serve every row of the filter, so each pixel is loaded once for all of
// them. A lane reads eight channels of a pixel at once, and pairs them with those of a second pixel.
//
// In volumes, the images are frames of the result, and a patch holds all frames under them: one after another meets its part of the filter.
//
// (Zero times infinity is NaN: an element that has overflowed makes NaN of neighboring pixels whose windows do not cover it.)
//
// generated.cuh: see tile_walk.cuh; also ROWS, GROUPS, BLOCKS, GRID_X, GRID_Y (warps beside and below each other), the filter
// (KERNEL_H, KERNEL_W), RELU_BEFORE (a ReLU of the input precedes the filter), MIN_BLOCKS, epilogue() and multiply().
#include "ptx.cuh"
#include "generated.cuh"
#include "tile_walk.cuh"
#include "vectors.cuh"

constexpr int REACH = 8 + KERNEL_W - 1, LOADS = (REACH + 3) / 4;   // pixels under eight windows; pixels that a lane reads
static_assert(REACH <= 16 && GROUPS * BLOCKS * TILE_N == 16 && STRIDE_H == 1 && STRIDE_W == 1, "a row of pixels is a step of K");
static_assert(WARPS == CHUNKS * GRID_X * GRID_Y && TILE_W == GRID_X * BLOCKS * 8 && TILE_H == GRID_Y * GROUPS * ROWS, "tiles of warps");

constexpr int OF_IMAGE = TILE_N > 2 ? 64 / TILE_N : 32;     // lanes that hold pixels of one image, in each half
static_assert(OF_IMAGE >= 8, "a lane for each channel");

// Channel c of two pixels, as a pair.
DEVICE u32 pair_of(const uint4& first, const uint4& second, int c) {
    const u32 a[4] = {first.x, first.y, first.z, first.w}, b[4] = {second.x, second.y, second.z, second.w};
    return __byte_perm(a[c / 2], b[c / 2], c % 2 ? 0x7632 : 0x5410);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) depthwise_bands_sm90(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 shared[];
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32, quad = lane % 4;
    const int chunk = warp % CHUNKS, part = warp / CHUNKS, channel = (blockIdx.x % p.slabs * CHUNKS + chunk) * 8;
    const int warp_x = part % GRID_X * BLOCKS * 8, warp_y = part / GRID_X * GROUPS * ROWS;

    // No kernel writes filters: [taps][channels]. Within K, a lane has pixels quad, quad + 4, quad + 8 and quad + 12.
    u32 filter[KERNEL_H][8][2];
    auto load_filter = [&](int frame) {
        #pragma unroll
        for (int r = 0; r < KERNEL_H; r++) {
            uint4 taps[4];
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const int tap = quad + 4 * i - lane / 4;
                taps[i] = make_uint4(0, 0, 0, 0);
                if (tap >= 0 && tap < KERNEL_W && channel < p.channels)
                    taps[i] = __ldg(reinterpret_cast<const uint4*>(p.weights + ((frame * KERNEL_H + r) * KERNEL_W + tap) * p.channels + channel));
            }
            #pragma unroll
            for (int c = 0; c < 8; c++) filter[r][c][0] = pair_of(taps[0], taps[1], c), filter[r][c][1] = pair_of(taps[2], taps[3], c);
        }
    };
    if (!KERNEL_D) load_filter(0);

    // Row ``lane / 4 + 8 * half`` of A: its image, block of eight pixels, and group of rows.
    int image[2], x[2], y[2], own[2];
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = lane / 4 + half * 8;
        y[half] = warp_y + row % GROUPS * ROWS, x[half] = warp_x + row / GROUPS % BLOCKS * 8, image[half] = row / GROUPS / BLOCKS;
        own[half] = (image[half] * PATCH_H + y[half]) * PATCH_W + x[half];
    }
    int column[LOADS];
    #pragma unroll
    for (int i = 0; i < LOADS; i++) column[i] = min(quad + 4 * i, REACH - 1);    // pixels beyond the windows meet zeros

    uint4 result[ROWS][2][2];
    auto compute = [&](u32 patch, const Place& to) {
        float acc[ROWS][8][4];
        #pragma unroll
        for (int i = 0; i < ROWS * 8 * 4; i++) (&acc[0][0][0])[i] = 0.0f;
        const bool works = to.y + warp_y < p.out_h && to.x + warp_x < p.out_w && channel < p.channels;
        #pragma unroll 1
        for (int frame = 0; works && frame < (KERNEL_D ? KERNEL_D : 1); frame++, patch += PATCH_H * PATCH_W * SPAN) {
            if (KERNEL_D) load_filter(frame);
            u32 from[2][LOADS];                    // this tile's addresses: addresses derived from them are not kept from tile to tile
            #pragma unroll
            for (int i = 0; i < 2 * LOADS; i++) from[i / LOADS][i % LOADS] = patch + chunk * 16 + (own[i / LOADS] + column[i % LOADS]) * SPAN;
            #pragma unroll
            for (int k = 0; k < ROWS + KERNEL_H - 1; k++) {
                uint4 pixels[2][4];
                #pragma unroll
                for (int half = 0; half < 2; half++) {
                    #pragma unroll
                    for (int i = 0; i < LOADS; i++) {
                        const uint4 v = shared_load16(swizzled<CHUNKS>(from[half][i] + k * PATCH_W * SPAN));
                        pixels[half][i] = RELU_BEFORE ? make_uint4(relu2(v.x), relu2(v.y), relu2(v.z), relu2(v.w)) : v;
                    }
                    if (LOADS < 4) pixels[half][3] = pixels[half][2];
                }
                #pragma unroll
                for (int c = 0; c < 8; c++) {
                    const u32 a[4] = {pair_of(pixels[0][0], pixels[0][1], c), pair_of(pixels[1][0], pixels[1][1], c),
                                      pair_of(pixels[0][2], pixels[0][3], c), pair_of(pixels[1][2], pixels[1][3], c)};
                    #pragma unroll
                    for (int o = 0; o < ROWS; o++)
                        if (k >= o && k - o < KERNEL_H) multiply(acc[o][c], a, filter[k - o][c][0], filter[k - o][c][1]);
                }
            }
        }
        float sum[2][8];
        #pragma unroll
        for (int c = 0; c < 16; c++) (&sum[0][0])[c] = 0.0f;
        float bias[8];
        load_floats<8>(bias, p.bias + min(channel, p.channels - 8));
        #pragma unroll
        for (int o = 0; o < ROWS; o++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {          // pixels quad * 2 and the next, in both halves
                const bool inside = to.y + y[i / 2] + o < p.out_h && to.x + x[i / 2] + quad * 2 + i % 2 < p.out_w;
                float value[8];
                #pragma unroll
                for (int c = 0; c < 8; c++) {
                    value[c] = epilogue(acc[o][c][i], bias[c], 0.0f);
                    if (SQUEEZE && inside) sum[i / 2][c] += value[c];
                }
                const Packed<8> packed = pack<8>(value);
                result[o][i / 2][i % 2] = make_uint4(packed.word[0], packed.word[1], packed.word[2], packed.word[3]);
            }
        }
#if SQUEEZE
        float* partial = reinterpret_cast<float*>(shared + HEAD_BYTES + STAGES * PATCH_BYTES + RESULT_BYTES) + part * TILE_N * CHUNKS * 8;
        #pragma unroll
        for (int c = 0; c < 8; c++) {
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                if (TILE_N == 1 && half == 0) continue;
                float total = TILE_N == 1 ? sum[0][c] + sum[1][c] : sum[half][c];
                #pragma unroll
                for (int mask = 1; mask < OF_IMAGE; mask *= 2) total += __shfl_xor_sync(0xffffffffu, total, mask);
                if (lane % OF_IMAGE == c) partial[(image[half] * CHUNKS + chunk) * 8 + c] = total;
            }
        }
#endif
    };
    walk_tiles(p, shared, compute, [&](u32 results) {
        #pragma unroll
        for (int o = 0; o < ROWS; o++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const int half = i / 2, pixel = (image[half] * TILE_H + y[half] + o) * TILE_W + x[half] + quad * 2 + i % 2;
                shared_store16(swizzled<CHUNKS>(results + pixel * SPAN + chunk * 16), result[o][half][i % 2]);
            }
        }
    });
}
