// A first convolution (conv_stem.cu) and the max pool of its result, with windows of POOL x POOL and a stride of 2. The result before
// pooling, the largest tensor of many networks, is never stored.
//
// A block walks down a band of tiles of one image. A tile is PAIRS pairs of rows of the convolution, as wide as the image. An m16 tile has
// the same eight columns of two rows, and a warp has these columns of all pairs. So a thread itself holds the elements under the two or
// three rows of a window: windows of three rows begin with the second row of the previous pair, which stays in registers. The maxima over
// rows go through shared memory, where threads take the maximum of neighboring columns.
//
// generated.cuh: see stem.cuh; also POOL (2 or 3), POOL_TOP and POOL_LEFT, the padding (0 or 1; for 2 x 2, 0).
#include "stem.cuh"

constexpr int PAIRS = TILE_H / 2, RUNS = M_TILES / PAIRS;      // pairs of rows in a tile; runs of eight columns in a warp
static_assert(TILE_H % 2 == 0 && M_TILES % PAIRS == 0 && !HAS_RESIDUAL && !FRAMES && (POOL == 3 || POOL_TOP + POOL_LEFT == 0), "a form of this kernel");
constexpr int FIRST = POOL == 3 ? 1 - POOL_TOP : 0;          // row of the convolution at which the first tile begins
constexpr u32 COLUMN_BYTES = BLOCK_N * 2 + 16;     // an odd number of 16-byte chunks where channels are a multiple of 16
constexpr u32 POOL_AT = IMAGE_AT + IMAGE_BYTES * (1 + BUFFERED), EIGHTS = BLOCK_N / 8;
#if defined(DTYPE_BF16)
constexpr u32 LOWEST = 0xff80ff80u;
#else
constexpr u32 LOWEST = 0xfc00fc00u;
#endif

DEVICE uint4 larger(uint4 a, uint4 b) { return make_uint4(larger(a.x, b.x), larger(a.y, b.y), larger(a.z, b.z), larger(a.w, b.w)); }

// Maximum of neighboring columns of a tile, whose rows are already reduced, to the pooled image.
DEVICE void pool_columns(const Params& p, const u8* columns, const Tile& tile) {
    const int first = blockIdx.y * BLOCK_N, each = p.pooled_w * int(EIGHTS);
    for (int i = threadIdx.x; i < PAIRS * each; i += THREADS) {
        const int pair = PAIRS > 1 ? i / each : 0, y = tile.y * PAIRS + pair, x = (i - pair * each) / EIGHTS, eight = i % EIGHTS;
        const int column = 2 * x - POOL_LEFT;
        if (y >= p.pooled_h || first + eight * 8 >= p.channels) continue;
        uint4 best;
        #pragma unroll
        for (int j = 0; j < POOL; j++) {           // outside the image: the nearest column inside, which changes no maximum
            const int at = pair * TILE_W + min(max(column + j, 0), p.out_w - 1);
            const uint4 v = *reinterpret_cast<const uint4*>(columns + at * COLUMN_BYTES + eight * 16);
            best = j ? larger(best, v) : v;
        }
        u16* to = p.output + (((long long)tile.image * p.pooled_h + y) * p.pooled_w + x) * p.pitch + first + eight * 8;
        *reinterpret_cast<uint4*>(to) = best;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) conv_stem_pool(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 base = smem_address(shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_m = warp % WARPS_M, warp_n = warp / WARPS_M;
    const int g = lane / 4, t = lane % 4;
    grid_launch_dependents();
    load_weights(p, base);                         // constants: loaded before the previous kernel has ended

    Words at;
    #pragma unroll
    for (int i = 0; i < M_TILES * 2; i++) {
        const int y = i / 2 / RUNS * 2 + i % 2, x = (warp_m * RUNS + i / 2 % RUNS) * 8 + g;
        at.rows[i / 2][i % 2] = IMAGE_AT + ((y * STRIDE_H * ROW_STEP + x * STRIDE_W * COLUMN_STEP) / 2 + FIRST_WORD + t) * 4;
    }
    #pragma unroll
    for (int k = 0; k < K_STEPS * 2; k++) at.offsets[k / 2][k % 2] = word_offset(k, t) * 4;
    const float* bias = reinterpret_cast<const float*>(shared + BIAS_AT) + warp_n * N_TILES * 8;
    const int b_row = warp_n * N_TILES * 8 + lane % 8 + (N_TILES > 1 ? lane / 16 * 8 : 0);
    u32 b_at = base + b_row * WEIGHT_ROW + lane / 8 % 2 * 16;
    const Places places = places_of(p);

    const int begin = blockIdx.x % p.bands * p.band, end = min(begin + p.band, p.tiles_y);
    // The first window of a band needs the row above when it has three rows, unless that row is padding.
    Tile tile = {0, begin - (POOL == 3 && (begin > 0 || POOL_TOP == 0)), int(blockIdx.x / p.bands)};
    grid_dependency_wait();
    Chunk held[ROUNDS];
    int buffer = 0;                                // offset of the tile's pixels; with BUFFERED, shared memory holds two tiles
    u32 kept[KEEP ? K_STEPS : 1][N_TILES][2];
    begin_block(p, shared, base, tile, places, b_at, held, kept);
    u32 row_before[RUNS][N_TILES];
    #pragma unroll
    for (int i = 0; i < RUNS * N_TILES; i++) row_before[i / N_TILES][i % N_TILES] = LOWEST;
    u8* const own = shared + POOL_AT + (warp_m * RUNS * 8 + g) * COLUMN_BYTES + warp_n * N_TILES * 16;

    while (true) {
        const Tile next = {0, tile.y + 1, tile.image};
        const bool more = next.y < end;
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
        if constexpr (BUFFERED) {
            copies_landed();
            buffer ^= IMAGE_BYTES;
        } else {
            if (!AHEAD && more) fetch(p, next, places, held);
        }
        __syncthreads();                           // the pixels and the previous tile's columns have been read
        #pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            const int run = m % RUNS, row = tile.y * TILE_H + m / RUNS * 2 + FIRST;
            const bool upper = row >= 0 && row < p.out_h, lower = row + 1 >= 0 && row + 1 < p.out_h;
            u32 best[N_TILES];
            #pragma unroll
            for (int n = 0; n < N_TILES; n++) {
                const float(&v)[4] = acc[m][n];
                const u32 second = lower ? finish_pair(v[2], v[3], 0u) : LOWEST;
                best[n] = larger(upper ? finish_pair(v[0], v[1], 0u) : LOWEST, second);
                if (POOL == 3) best[n] = larger(best[n], row_before[run][n]), row_before[run][n] = second;
            }
            u8* const column = own + (m / RUNS * TILE_W + run * 8) * COLUMN_BYTES;
            #pragma unroll
            for (int n = 0; n < N_TILES; n++) {
                constexpr int LAST = N_TILES - 1;
                const int group = group_of(n);
                u8* const to = column + n * 16 + t * 4 * group;        // a lane's channels of a group of n8 tiles are neighbors
                if (n % 4 % group) continue;
                if (group == 4) *reinterpret_cast<uint4*>(to) = make_uint4(best[n], best[min(n + 1, LAST)], best[min(n + 2, LAST)], best[min(n + 3, LAST)]);
                else if (group == 2) *reinterpret_cast<uint2*>(to) = make_uint2(best[n], best[min(n + 1, LAST)]);
                else *reinterpret_cast<u32*>(to) = best[n];
            }
        }
        if constexpr (!BUFFERED) {
            if (more) put(p, shared + IMAGE_AT, next, places, held);
        }
        __syncthreads();
        if (tile.y >= begin) pool_columns(p, shared + POOL_AT, tile);
        if (!more) break;
        tile = next;
    }
}
