// A 1x1 convolution, then a depthwise one, in one kernel for Hopper: the intermediate result never leaves a multiprocessor.
//
//   out[pixel, c] = after(sum over taps of filter[c, tap] * between(sum over k of expansion[c, k] * in[pixel + tap, k]))
//
// mma.sync computes both convolutions. A block keeps CHANNELS channels of the result and walks over tiles of output pixels. TMA keeps
// the patches of STAGES tiles in flight, with all DEPTH channels of their pixels. The warps multiply a patch (pixels are M), round the
// result and write it to shared memory, with zeros in the padding. Then they filter it as separable_sm90.cu does: 16 pixels x 8
// channels of one or two taps, times diagonal matrices. A warp has 16 channels: of every WARPS-th band of 16 pixels in the first
// convolution, and of every WARPS-th group of STRIPS strips in the second. A strip is 16 output pixels (STRIP_W x STRIP_H); the strips
// of a group lie one below the other, and a tile has GRID_X x GRID_Y groups. A row of the patch is loaded once for all strips. Several
// blocks on a multiprocessor fill one another's stalls.
//
// (Zero times infinity is NaN: an element that has overflowed makes NaN of the neighboring channels of its pixel.)
//
// generated.cuh defines CHANNELS (a multiple of 16), WARPS, STRIPS, STRIP_W, GRID_X, GRID_Y, STAGES, MIN_BLOCKS, the filter (KERNEL_H,
// KERNEL_W, STRIDE_*, DILATION_*), DEPTH (a multiple of 8), SWIZZLE (TMA's: 0, 64 or 128), SQUEEZE (1: sums of tiles, 2: means of images),
// between() and after() (of two neighboring channels of either convolution, to a pair of 16-bit elements) and multiply().
#include "taps.cuh"
#include "generated.cuh"
#include "strips.cuh"

constexpr int PAIRS = CHANNELS / 16, THREADS = PAIRS * WARPS * 32, STEPS = (DEPTH + 15) / 16;
constexpr int TAPS = KERNEL_H * KERNEL_W;
constexpr int TILE_W = GRID_X * STRIP_W, TILE_H = GRID_Y * STRIPS * STRIP_H;
constexpr int PATCH_H = (TILE_H - 1) * STRIDE_H + (KERNEL_H - 1) * DILATION_H + 1;
constexpr int PATCH_W = (TILE_W - 1) * STRIDE_W + (KERNEL_W - 1) * DILATION_W + 1;
constexpr int PIXELS = PATCH_H * PATCH_W, BANDS = (PIXELS + 15) / 16;
constexpr bool HELD = STEPS <= 4;                                          // a band's operand stays in registers
// The patch of the input: parts of SWIZZLE bytes of a pixel's channels, or whole pixels, which start on different banks where DEPTH
// is no multiple of 32.
constexpr int ROW = SWIZZLE ? SWIZZLE : DEPTH * 2, PARTS = DEPTH * 2 / ROW;
constexpr u32 PART_BYTES = (BANDS * 16 * ROW + 1023) / 1024 * 1024, STAGE_BYTES = PARTS * PART_BYTES, STAGE_LOAD = PIXELS * DEPTH * 2;
// A pitch of an odd number of 16-byte units has no bank conflicts.
constexpr u32 MATRIX_PITCH = (STEPS * 2 | 1) * 16, MATRIX_BYTES = CHANNELS * MATRIX_PITCH;
constexpr u32 PITCH = (CHANNELS / 8 | 1) * 16, PATCH_BYTES = BANDS * 16 * PITCH, OUT_PITCH = 48, OUT_BYTES = PAIRS * WARPS * 16 * OUT_PITCH;
constexpr int FILTER = (TAPS + 7) / 8 * 8, WORDS = (TAPS + 1) / 2;         // elements of a channel's filter; its 32-bit words in use
// The taps of a filter row are loaded in pairs. An odd last tap is loaded alone, for both groups of eight channels.
constexpr int TAP_PAIRS = KERNEL_W / 2, LOADS = TAP_PAIRS + KERNEL_W % 2;

struct Params {
    TensorMap input;                               // (channel, x, y, n)
    u16* output;
    const u16* filters;                            // [channels, padded to a multiple of 16][FILTER]
    const float* bias;                             // [channels]: bias of the depthwise convolution
    float* sums;                                   // SQUEEZE 1: [n][tiles][channels]
    u16* means;                                    // SQUEEZE 2: [n][channels]
    const u16* expansion;                          // [channels][STEPS * 16]
    const float* shifts;                           // [channels]: bias of the 1x1 convolution
    int height, width, channels, out_h, out_w, pad_h, pad_w, pitch;      // pitch: elements between consecutive pixels of the result
    int slabs, tiles_x, tiles, count;              // slabs of CHANNELS; tiles of a row of an image, of an image, of the batch
    float mean;                                    // 1 / pixels of an image
};


// The place of a pixel in the expanded patch. With a stride of 2, even columns precede odd ones: pixels of one tap are then adjacent.
constexpr int EVEN = STRIDE_W == 2 ? (PATCH_W + 1) / 2 : 0;
DEVICE int placed(int pixel) {
    const int x = pixel % PATCH_W;
    return STRIDE_W == 2 ? pixel - x + x % 2 * EVEN + x / 2 : pixel;
}
constexpr __device__ int tap_at(int tap) { return STRIDE_W == 2 ? tap % 2 * EVEN + tap / 2 : tap * DILATION_W; }

// Offset of 16-byte column ``column`` of a pixel, under TMA's swizzle.
DEVICE u32 column_at(int pixel, int column) {
    const int part = SWIZZLE ? column * 16 / ROW : 0, within = column * 16 - part * ROW;
    const u32 row = part * PART_BYTES + pixel * ROW;
    return SWIZZLE == 128 ? row + (within ^ (pixel & 7) << 4) : SWIZZLE == 64 ? row + (within ^ (pixel >> 1 & 3) << 4) : row + within;
}

// The 1x1 convolution of the patch at ``image`` into ``patch``: a warp's bands and 16 channels. ``masks``: zero where a pixel lies in
// the padding.
DEVICE void expand(u32 image, u32 matrix, u32 patch, const float (&shift)[4], const u32* masks, int place) {
    const int lane = threadIdx.x % 32;
    const u32 rows = matrix + (lane / 16 * 8 + lane % 8) * MATRIX_PITCH + lane / 8 % 2 * 16;
    u32 held[HELD ? STEPS : 1][4];                 // fragments of the weights
    #pragma unroll
    for (int k = 0; HELD && k < STEPS; k++) ldmatrix_x4(rows + k * 32, held[k][0], held[k][1], held[k][2], held[k][3]);
    #pragma unroll 2
    for (int band = place; band < BANDS; band += WARPS) {
        float sum[2][4];
        #pragma unroll
        for (int i = 0; i < 4; i++) sum[i / 2][i % 2] = sum[i / 2][i % 2 + 2] = shift[i];
        #pragma unroll
        for (int k = 0; k < STEPS; k++) {
            u32 a[4];
            ldmatrix_x4(image + column_at(band * 16 + lane % 16, 2 * k + lane / 16), a[0], a[1], a[2], a[3]);
            if (DEPTH % 16 && k == STEPS - 1) a[2] = a[3] = 0u;   // these would be the next pixel's channels
            u32 (&b)[4] = held[HELD ? k : 0];
            if (!HELD) ldmatrix_x4(rows + k * 32, b[0], b[1], b[2], b[3]);
            multiply(sum[0], a, b[0], b[1]);
            multiply(sum[1], a, b[2], b[3]);
        }
        const u32 mask[2] = {masks[band * 16 + lane / 4], masks[band * 16 + lane / 4 + 8]};
        stmatrix_x4(patch + placed(band * 16 + lane % 16) * PITCH + lane / 16 * 16,
                    between(sum[0][0], sum[0][1]) & mask[0], between(sum[0][2], sum[0][3]) & mask[1],
                    between(sum[1][0], sum[1][1]) & mask[0], between(sum[1][2], sum[1][3]) & mask[1]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) expanded_sm90(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 shared[];
    const u32 base = smem_address(shared), full = base, ring = base + 1024;
    const u32 matrix = ring + STAGES * STAGE_BYTES, patch = matrix + MATRIX_BYTES, out = patch + PATCH_BYTES;
    u32* const masks = reinterpret_cast<u32*>(shared + (out - base) + OUT_BYTES);          // one per pixel of the patch
    float* const partial = reinterpret_cast<float*>(masks + BANDS * 16);                   // [WARPS][CHANNELS]
    const int slab = blockIdx.x % p.slabs, first = blockIdx.x / p.slabs, step = gridDim.x / p.slabs;
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;   // warp-uniform, and the compiler knows it
    const int pair = warp % PAIRS, place = warp / PAIRS, channel = slab * CHANNELS + pair * 16;
    if (threadIdx.x == 0) {
        tma_prefetch(&p.input);
        for (int i = 0; i < STAGES; i++) barrier_init(full + 8 * i, 1);
        barrier_init_fence();
        async_proxy_fence();
    }
    // No kernel writes weights and biases.
    for (int i = threadIdx.x; i < CHANNELS * STEPS * 2; i += THREADS) {
        const int row = i / (STEPS * 2), column = i % (STEPS * 2), c = slab * CHANNELS + row;
        const uint4* from = reinterpret_cast<const uint4*>(p.expansion) + (long long)c * (STEPS * 2) + column;
        shared_store16(matrix + row * MATRIX_PITCH + column * 16, c < p.channels ? __ldg(from) : make_uint4(0, 0, 0, 0));
    }
    u32 filter[2][(WORDS + 3) / 4 * 4];
    float shift[4], bias[4];                       // of two channels, from 2 * (lane % 4) on, in both groups of eight
    #pragma unroll
    for (int g = 0; g < 2; g++) {
        const bool live = channel + g * 8 < p.channels;
        const uint4* from = reinterpret_cast<const uint4*>(p.filters + (long long)(channel + g * 8 + lane / 4) * FILTER);
        #pragma unroll
        for (int i = 0; i < WORDS; i += 4) {
            const uint4 v = live ? __ldg(from + i / 4) : make_uint4(0, 0, 0, 0);
            filter[g][i] = v.x, filter[g][i + 1] = v.y, filter[g][i + 2] = v.z, filter[g][i + 3] = v.w;
        }
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            shift[g * 2 + i] = live ? __ldg(p.shifts + channel + g * 8 + lane % 4 * 2 + i) : 0.0f;
            bias[g * 2 + i] = live ? __ldg(p.bias + channel + g * 8 + lane % 4 * 2 + i) : 0.0f;
        }
    }
    // Diagonal matrices: this lane holds rows 2 * (lane % 4) and the next of column lane / 4; at most one of these elements is not zero.
    const bool diagonal = lane / 8 == lane % 4, odd = lane / 4 % 2;
    const u32 even_tap = !diagonal ? 0x4444 : odd ? 0x1044 : 0x4410, odd_tap = !diagonal ? 0x4444 : odd ? 0x3244 : 0x4432;
    auto weight = [&](int g, int tap) { return __byte_perm(filter[g][tap / 2], 0u, tap % 2 ? odd_tap : even_tap); };
    // The first pixel of a tile's patch; negative in the padding.
    auto begin = [&](int tile, int& x, int& y) {
        x = tile % p.tiles % p.tiles_x * TILE_W * STRIDE_W - p.pad_w, y = tile % p.tiles / p.tiles_x * TILE_H * STRIDE_H - p.pad_h;
    };
    auto outline = [&](int tile) {
        int first_x, first_y;
        begin(tile, first_x, first_y);
        for (int i = threadIdx.x; i < BANDS * 16; i += THREADS) {
            const int y = first_y + i / PATCH_W, x = first_x + i % PATCH_W;
            masks[i] = u32(y) < u32(p.height) && u32(x) < u32(p.width) ? 0xffffffffu : 0u;
        }
    };
    outline(first);
    int own_x, own_y;
    begin(first, own_x, own_y);                    // before the wait: it takes divisions
    const int own_image = first / p.tiles;
    __syncthreads();
    grid_launch_dependents();
    grid_dependency_wait();

    auto request = [&](int tile, int stage) {
        int x = own_x, y = own_y, image = own_image;
        if (tile != first) begin(tile, x, y), image = tile / p.tiles;
        barrier_expect(full + 8 * stage, STAGE_LOAD);
        #pragma unroll
        for (int part = 0; part < PARTS; part++)
            tma_load_4d(ring + stage * STAGE_BYTES + part * PART_BYTES, &p.input, full + 8 * stage, part * (ROW / 2), x, y, image);
    };
    if (threadIdx.x == 0)
        for (int i = 0, tile = first; i < STAGES && tile < p.count; i++, tile += step) request(tile, i);

    // This lane's row addresses for ldmatrix: lanes 0-15 address the pixels of a pair's first tap, lanes 16-31 those of its second tap.
    // Of a single tap, they address channels 0-7 and channels 8-15.
    const int pixel = lane % 16, upper = lane / 16;
    const u32 staged = out + warp * 16 * OUT_PITCH + pixel * OUT_PITCH + upper * 16;
    int stage = 0, parity = 0;
    for (int tile = first; tile < p.count; tile += step) {
        const int n = tile / p.tiles, in_image = tile % p.tiles;
        const int tile_x = in_image % p.tiles_x * TILE_W, tile_y = in_image / p.tiles_x * TILE_H;
        barrier_wait(full + 8 * stage, parity);
        expand(ring + stage * STAGE_BYTES, matrix + pair * 16 * MATRIX_PITCH, patch + pair * 32, shift, masks, place);
        __syncthreads();                           // the expanded patch is complete, and its input no longer needed
        if (threadIdx.x == 0 && tile + STAGES * step < p.count) request(tile + STAGES * step, stage);
        if (++stage == STAGES) stage = 0, parity ^= 1;
        if (tile + step < p.count) outline(tile + step);

        float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        #pragma unroll 1
        for (int at = place; at < GRID_X * GRID_Y; at += WARPS) {
            const int strip_x = at % GRID_X * STRIP_W, strip_y = at / GRID_X * STRIPS * STRIP_H;
            const int corner = (strip_y + pixel / STRIP_W) * STRIDE_H * PATCH_W + (strip_x + pixel % STRIP_W) * (STRIDE_W == 2 ? 1 : STRIDE_W);
            const u32 own = patch + pair * 32 + corner * PITCH;
            const u32 two = own + upper * tap_at(1) * PITCH, one = own + tap_at(KERNEL_W - 1) * PITCH + upper * 16;
            float sum[STRIPS][2][4];
            #pragma unroll
            for (int i = 0; i < STRIPS * 8; i++) sum[i / 8][i / 4 % 2][i % 4] = bias[i / 4 % 2 * 2 + i % 2];
            #pragma unroll
            for (int r = 0; r < ROWS; r++) {
                if (!used(r)) continue;
                u32 in[LOADS][2][4];
                #pragma unroll
                for (int i = 0; i < TAP_PAIRS * 2; i++) {
                    u32 (&v)[4] = in[i / 2][i % 2];
                    ldmatrix_x4(two + (r * PATCH_W + tap_at(i / 2 * 2)) * PITCH + i % 2 * 16, v[0], v[1], v[2], v[3]);
                }
                if (LOADS > TAP_PAIRS) {
                    u32 (&v)[4] = in[LOADS - 1][0];
                    ldmatrix_x4(one + r * PATCH_W * PITCH, v[0], v[1], v[2], v[3]);
                }
                #pragma unroll
                for (int i = 0; i < LOADS * STRIPS * 2; i++) {
                    const int load = i / (STRIPS * 2), m = i / 2 % STRIPS, g = i % 2;
                    if (!meets(r, m)) continue;
                    const int tap = (r - m * STRIP_H * STRIDE_H) / DILATION_H * KERNEL_W + 2 * load;
                    if (load < TAP_PAIRS)
                        tap_pair(sum[m][g], in[load][g], weight(g, tap), weight(g, tap + 1));
                    else
                        one_tap(sum[m][g], in[load][0][g * 2], in[load][0][g * 2 + 1], weight(g, tap));
                }
            }
            #pragma unroll
            for (int m = 0; m < STRIPS; m++) {
                const int y = tile_y + strip_y + m * STRIP_H, x = tile_x + strip_x;
                u32 made[4];
                #pragma unroll
                for (int i = 0; i < 4; i++) {      // pixel lane / 4, or lane / 4 + 8, of a channel group
                    const int g = i / 2, row = lane / 4 + i % 2 * 8;
                    made[i] = after(sum[m][g][i % 2 * 2], sum[m][g][i % 2 * 2 + 1]);
                    if (SQUEEZE && y + row / STRIP_W < p.out_h && x + row % STRIP_W < p.out_w)
                        total[g * 2] += low_float(made[i]), total[g * 2 + 1] += high_float(made[i]);
                }
                stmatrix_x4(staged, made[0], made[1], made[2], made[3]);
                __syncwarp();
                // Each lane stores 16 bytes of a pixel: two neighboring lanes fill a sector of L2.
                const int row = lane / 2, group = lane % 2, to_y = y + row / STRIP_W, to_x = x + row % STRIP_W;
                const uint4 v = shared_load16(out + warp * 16 * OUT_PITCH + row * OUT_PITCH + group * 16);
                if (to_y < p.out_h && to_x < p.out_w && channel + group * 8 < p.channels)
                    *reinterpret_cast<uint4*>(p.output + (((long long)n * p.out_h + to_y) * p.out_w + to_x) * p.pitch + channel + group * 8) = v;
                __syncwarp();
            }
        }
#if SQUEEZE
        // The sum of each channel over the tile, in a fixed order.
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            #pragma unroll
            for (int mask = 4; mask < 32; mask *= 2) total[i] += __shfl_xor_sync(0xffffffffu, total[i], mask);
            if (lane < 4) partial[place * CHANNELS + pair * 16 + i / 2 * 8 + lane * 2 + i % 2] = total[i];
        }
#endif
        __syncthreads();                           // the patch has been read, and the sums are complete
#if SQUEEZE
        for (int c = threadIdx.x; c < CHANNELS; c += THREADS) {
            float whole = 0.0f;
            for (int i = 0; i < WARPS; i++) whole += partial[i * CHANNELS + c];
            const int to = slab * CHANNELS + c;
            if (to >= p.channels) continue;
            if (SQUEEZE == 1)
                p.sums[((long long)n * p.tiles + in_image) * p.channels + to] = whole;
            else
                p.means[(long long)n * p.channels + to] = pack1(whole * p.mean);
        }
#endif
    }
}
