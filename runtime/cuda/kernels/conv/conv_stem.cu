// Convolution of an image of one to four channels in its original form (planar or interleaved, fp32, 16-bit or bytes), for any
// tensor-core GPU from sm_80 on. Layout change, cast and normalization happen in the copy to shared memory. mma.sync (m16n8k16, fp32
// accumulators) reads pixels from there, and results are stored channels-last. Factors and results are 16-bit, or fp32 (m16n8k8 of tf32:
// of rounded factors, or three products in place of one).
//
// Block: TILE_H x TILE_W output pixels x BLOCK_N output channels; blocks walk over tiles, and keep their weights. The input pixels
// of a tile are in shared memory either as planes (PLANES: at an even stride, where a 32-bit word is two taps of a row) or with two
// or four channels interleaved (a word is two channels of a tap). Pixels of fp32 are always planes: a word is a tap. K is a list of such words, given by their offsets from the first word
// of a window: lane t of four reads word t of each half of a K step for its A fragment, whatever tap and channel that is.
//
// The rows of weights in shared memory are ordered so that a thread's accumulators of up to four n8 tiles are neighboring channels.
//
// generated.cuh: see stem.cuh.
#include "stem.cuh"

// ---- products and results ----------------------------------------------------------------------------------------------

#if FACTOR_ITEM == 4
// Stores one row of an m16 tile. A lane has 2 G neighboring channels of a group of G n8 tiles.
DEVICE void store_row(const Params& p, const float (&acc)[N_TILES][4], int half, int first, float* to, const float* residual) {
    const int t = threadIdx.x % 4;
    #pragma unroll
    for (int n = 0; n < N_TILES; n += 2) {
        const int group = group_of(n), channel = first + n * 8 + t * 2 * group;
        if (channel >= p.channels) continue;
        float r[4] = {}, made[4] = {};
        if (HAS_RESIDUAL && group == 2) *reinterpret_cast<float4*>(r) = *reinterpret_cast<const float4*>(residual + channel);
        else if (HAS_RESIDUAL) *reinterpret_cast<float2*>(r) = *reinterpret_cast<const float2*>(residual + channel);
        #pragma unroll
        for (int i = 0; i < 2 * group; i++) made[i] = epilogue(acc[n + i / 2 < N_TILES ? n + i / 2 : n][half * 2 + i % 2], 0.0f, r[i]);
        if (group == 2) *reinterpret_cast<float4*>(to + channel) = *reinterpret_cast<float4*>(made);
        else *reinterpret_cast<float2*>(to + channel) = *reinterpret_cast<float2*>(made);
    }
}
#else
// Stores one row of an m16 tile: a lane's channels of each group of n8 tiles are one access.
DEVICE void store_row(const Params& p, const float (&acc)[N_TILES][4], int half, int first, u16* to, const u16* residual) {
    const int t = threadIdx.x % 4;
    #pragma unroll
    for (int n = 0; n < N_TILES; n++) {
        const int group = group_of(n), channel = first + n * 8 + t * 2 * group;
        if (n % 4 % group == 0 && channel < p.channels) {              // the first of its group
            u32 r[4] = {0, 0, 0, 0}, made[4];
            if (HAS_RESIDUAL) {
                #pragma unroll
                for (int j = 0; j < group; j++) r[j] = *reinterpret_cast<const u32*>(residual + channel + 2 * j);
            }
            #pragma unroll
            for (int j = 0; j < 4; j++) {
                if (j >= group) break;
                const float(&sums)[4] = acc[n + j < N_TILES ? n + j : 0];
                made[j] = finish_pair(sums[half * 2], sums[half * 2 + 1], r[j]);
            }
            if (group == 4) *reinterpret_cast<uint4*>(to + channel) = make_uint4(made[0], made[1], made[2], made[3]);
            else if (group == 2) *reinterpret_cast<uint2*>(to + channel) = make_uint2(made[0], made[1]);
            else *reinterpret_cast<u32*>(to + channel) = made[0];
        }
    }
}

#endif

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) conv_stem(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 base = smem_address(shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_m = warp % WARPS_M, warp_n = warp / WARPS_M;
    const int g = lane / 4, t = lane % 4;
    grid_launch_dependents();
    load_weights(p, base);                         // constants: loaded before the previous kernel has ended

    Words at;
    #pragma unroll
    for (int i = 0; i < M_TILES * 2; i++) {
        const int run = warp_m * M_TILES * 2 + i, y = run * 8 / TILE_W, x = run * 8 % TILE_W + g;
        at.rows[i / 2][i % 2] = IMAGE_AT + ((y * STRIDE_H * ROW_STEP + x * STRIDE_W * COLUMN_STEP) / PER_WORD + FIRST_WORD + t) * 4;
    }
    #pragma unroll
    for (int k = 0; k < K_STEPS * 2; k++) at.offsets[k / 2][k % 2] = word_offset(k, t) * 4;

    const int first_channel = blockIdx.y * BLOCK_N + warp_n * N_TILES * 8;
    const float* bias = reinterpret_cast<const float*>(shared + BIAS_AT) + warp_n * N_TILES * 8;
    const int b_row = warp_n * N_TILES * 8 + lane % 8 + (N_TILES > 1 ? lane / 16 * 8 : 0);
    u32 b_at = base + b_row * WEIGHT_ROW + lane / 8 % 2 * 16;
    const Places places = places_of(p);
    int stored[M_TILES * 2];                       // offsets of a lane's results in a row of eight pixels, from the tile's first pixel
    #pragma unroll
    for (int i = 0; i < M_TILES * 2; i++) {
        const int run = warp_m * M_TILES * 2 + i;
        stored[i] = run * 8 / TILE_W * p.out_w + run * 8 % TILE_W + g;
    }
    Tile tile = {int(blockIdx.x % p.tiles_x), int(blockIdx.x / p.tiles_x % p.tiles_y), int(blockIdx.x / p.tiles_x / p.tiles_y)};
    grid_dependency_wait();
    Chunk held[ROUNDS];
    int buffer = 0;                                // offset of the tile's pixels; with BUFFERED, shared memory holds two tiles
    u32 kept[KEEP ? K_STEPS : 1][N_TILES][2];
    begin_block(p, shared, base, tile, places, b_at, held, kept);

    while (true) {
        Tile next = {tile.x + p.step_x, tile.y + p.step_y, tile.image + p.step_image};
        if (next.x >= p.tiles_x) next.x -= p.tiles_x, next.y++;
        if (next.y >= p.tiles_y) next.y -= p.tiles_y, next.image++;
        const bool more = next.image < p.images;
        if constexpr (BUFFERED) {
            if (more) copy_pixels(p, base + IMAGE_AT + (buffer ^ IMAGE_BYTES), next, places);
        } else if (AHEAD && more) {
            fetch(p, next, places, held);
        }

        float acc[M_TILES][N_TILES][4], start[N_TILES][4];
        begin_sums(bias, t, start);
        u32 weights_at = b_at;
        if (!KEEP) asm volatile("" : "+r"(weights_at));                                // reload for each tile
        multiply_tile(shared + buffer, at, weights_at, kept, start, acc);
        const int y = tile.y * TILE_H, x = tile.x * TILE_W;
        const long long first = (long long)tile.image * p.out_h * p.out_w + y * p.out_w + x;
        Number* to = p.output + first * p.pitch;
        const Number* residual = p.residual + (HAS_RESIDUAL ? first * p.residual_pitch : 0);
        #pragma unroll
        for (int i = 0; i < M_TILES * 2; i++) {
            const int run = warp_m * M_TILES * 2 + i;
            if (y + run * 8 / TILE_W >= p.out_h || x + run * 8 % TILE_W + g >= p.out_w) continue;
            store_row(p, acc[i / 2], i % 2, first_channel, to + (long long)stored[i] * p.pitch, residual + (HAS_RESIDUAL ? (long long)stored[i] * p.residual_pitch : 0));
        }
        if (!more) break;
        if constexpr (BUFFERED) {
            copies_landed();
            buffer ^= IMAGE_BYTES;
        } else {
            if (!AHEAD) fetch(p, next, places, held);
            __syncthreads();                       // the pixels have been read
            put(p, shared + IMAGE_AT, next, places, held);
        }
        __syncthreads();
        tile = next;
    }
}
