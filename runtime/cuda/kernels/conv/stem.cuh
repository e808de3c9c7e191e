// Shared by the kernels of first convolutions on mma.sync: the copy of weights to shared memory, and the products. See conv_stem.cu.
//
// generated.cuh: see stem_pixels.cuh; also word_offset(k, t) (of half K step k, in words, minus t).
#pragma once
#include "stem_pixels.cuh"

constexpr int BLOCK_N = WARPS_N * N_TILES * 8;
constexpr int WEIGHT_ROW = K_STEPS * 32 + 16;     // bytes: an odd number of 16-byte chunks, so that ldmatrix hits all banks
constexpr u32 BIAS_AT = BLOCK_N * WEIGHT_ROW, IMAGE_AT = BIAS_AT + BLOCK_N * 4;
constexpr bool KEEP = PRODUCTS == 1 && K_STEPS * N_TILES * 2 <= KEPT_REGISTERS;        // weights stay in registers
static_assert(!BUFFERED || (COPIED && PLANES && AHEAD && VEC > 1));
static_assert(TILE_H * TILE_W == WARPS_M * M_TILES * 16);

// ---- rows of weights ---------------------------------------------------------------------------------------------------

// The n8 tiles of a warp come in groups of four (of results of 16 bits), two or one; a lane's accumulators of a group of G are 2 G
// neighboring channels: 16 bytes of the largest group.
DEVICE constexpr int group_of(int tile) {
    if (FACTOR_ITEM == 4) return tile / 2 * 2 + 1 < N_TILES ? 2 : 1;
    const int left = N_TILES - tile / 4 * 4;
    return left >= 4 ? 4 : left >= 2 ? (tile % 4 < 2 ? 2 : 1) : 1;
}
DEVICE constexpr int group_start(int tile) {
    return tile / group_of(tile) * group_of(tile);                 // since larger groups come first
}
DEVICE int row_of(int channel) {                   // row of a channel of the block
    const int warp = channel / (N_TILES * 8), in_warp = channel % (N_TILES * 8), tile = in_warp / 8;
    const int group = group_of(tile), first = group_start(tile);
    const int c = in_warp - first * 8;
    return warp * N_TILES * 8 + first * 8 + c % (2 * group) / 2 * 8 + c / (2 * group) * 2 + c % 2;
}

// Starts the copies of the weights and biases of the block's channels, with rows in the order of row_of().
DEVICE void load_weights(const Params& p, u32 base) {
    constexpr int PARTS = K_STEPS * 2, WIDE = PARTS < 32 ? PARTS : 32, ROWS = 32 / WIDE, WARPS = WARPS_M * WARPS_N;   // a warp copies ROWS at a time
    const int lane = threadIdx.x % 32, part = lane % WIDE;
    const u8* from = reinterpret_cast<const u8*>(p.weights) + (long long)blockIdx.y * BLOCK_N * K_STEPS * 32;
    #pragma unroll 4
    for (int channel = threadIdx.x / 32 * ROWS + lane / WIDE; channel < BLOCK_N; channel += WARPS * ROWS) {
        const bool real = int(blockIdx.y) * BLOCK_N + channel < p.channels;
        if (lane >= ROWS * WIDE) break;
        #pragma unroll
        for (int i = 0; i < PARTS; i += WIDE) {
            if (PARTS % WIDE && i + part >= PARTS) break;
            const u32 to = base + row_of(channel) * WEIGHT_ROW + (i + part) * 16;
            if (real) copy_async<16>(to, from + channel * (K_STEPS * 32) + (i + part) * 16);
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

// B fragments of a K step; matrices: channels 0-7 at its first and second 16 bytes, then channels 8-15. ``address`` must be computed after the barrier
// that waits for the weights.
DEVICE void load_b(u32 address, u32 (&b)[N_TILES][2]) {
    #pragma unroll
    for (int n = 0; n + 1 < N_TILES; n += 2) load_matrices(address + n * 8 * WEIGHT_ROW, b[n], b[n + 1]);
    if constexpr (N_TILES % 2) load_matrices(address + (N_TILES - 1) * 8 * WEIGHT_ROW, b[N_TILES - 1]);
}

// ---- products ----------------------------------------------------------------------------------------------------------

// Loads a block's first pixels, then the weights that stay in registers, from ``weights_at`` on.
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

// A tile's accumulators begin with the bias of this lane's channels.
DEVICE void begin_sums(const float* bias, int t, float (&start)[N_TILES][4]) {
    #pragma unroll
    for (int j = 0; j < N_TILES; j++) {
        const float2 c = *reinterpret_cast<const float2*>(bias + (group_start(j) * 4 + t * group_of(j) + j - group_start(j)) * 2);
        start[j][0] = start[j][2] = c.x, start[j][1] = start[j][3] = c.y;
    }
}

// Offsets of each row of eight pixels (two per m16 tile), and of the words of a K step where these are not contiguous.
struct Words { int rows[M_TILES][2], offsets[K_STEPS][2]; };

// A fragment of a K step: the words of a lane.
DEVICE void load_a(const u8* pixels, const Words& at, int m, int k, u32 (&a)[4]) {
    #pragma unroll
    for (int i = 0; i < 4; i++) a[i] = *reinterpret_cast<const u32*>(pixels + at.rows[m][i % 2] + at.offsets[k][i / 2]);
}

#if PRODUCTS == 3
// The products of a tile: each is the sum of three products of tf32 parts (3xTF32: Ootomo and Yokota 2022, and CUTLASS). Tensor cores
// truncate in their additions, so the sums of eight K steps are added to the total by fp32 additions.
DEVICE void multiply_tile(const u8* pixels, const Words& at, u32 weights_at, u32 (&kept)[1][N_TILES][2], float (&start)[N_TILES][4],
                          float (&acc)[M_TILES][N_TILES][4]) {
    float sums[M_TILES][N_TILES][4], small[M_TILES][N_TILES][4];       // small: of products with a rest
    #pragma unroll
    for (int k = 0; k < K_STEPS; k++) {
        u32 b[N_TILES][2], more[N_TILES][2];
        load_b(weights_at + k * 32, b);
        #pragma unroll
        for (int i = 0; i < N_TILES * 2; i++) more[i / 2][i % 2] = divide(b[i / 2][i % 2]);
        #pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            u32 a[4], rest[4];
            load_a(pixels, at, m, k, a);
            #pragma unroll
            for (int i = 0; i < 4; i++) rest[i] = divide(a[i]);
            #pragma unroll
            for (int j = 0; j < N_TILES; j++) {
                if (k % 8 == 0)
                    #pragma unroll
                    for (int i = 0; i < 4; i++) sums[m][j][i] = small[m][j][i] = 0.0f;
                multiply(small[m][j], rest, b[j][0], b[j][1], small[m][j]);
                multiply(sums[m][j], a, b[j][0], b[j][1], sums[m][j]);
                multiply(small[m][j], a, more[j][0], more[j][1], small[m][j]);
                if (k % 8 == 7 || k == K_STEPS - 1)
                    #pragma unroll
                    for (int i = 0; i < 4; i++) acc[m][j][i] = (k < 8 ? start[j][i] : acc[m][j][i]) + (sums[m][j][i] + small[m][j][i]);
            }
        }
    }
}
#else
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
            load_a(pixels, at, m, k, a);
            #pragma unroll
            for (int i = 0; FACTOR_ITEM == 4 && i < 4; i++) a[i] = rounded_to_tf32(a[i]);
            #pragma unroll
            for (int j = 0; j < N_TILES; j++) {
                const u32(&b)[2] = KEEP ? kept[KEEP ? k : 0][j] : fresh[j];
                multiply(acc[m][j], a, b[0], b[1], k ? acc[m][j] : start[j]);
            }
        }
    }
}
#endif
