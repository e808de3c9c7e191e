// A first convolution with a stride of 2 along its rows and the max pool after it, as in conv_stem_pool.cu, on Hopper's wgmma.
//
// Output channels are wgmma's M: a block has 64, and their weights stay in registers. Pixels are N. The windows of neighboring results
// are rows of operand B that begin 16 bytes apart in shared memory: a core matrix is eight consecutive rows of 16 bytes. These 16 bytes,
// a unit, hold eight columns of one channel and one row; a filter row has at most eight. K runs over the channels of a filter row, row by
// row, and a K step is two units. Pixels arrive in shared memory as planes; from there, threads build the unit of each window.
//
// A block is one warpgroup. It walks down a band of an image by pairs of the convolution's rows. A row is as wide as the image and is
// computed in two halves: while one half is multiplied, the accumulators of the previous half are finished. The rows of units are a ring,
// which meanwhile receives the rows of a later pair. A thread holds the maxima over the rows of its windows. Shuffles combine the maxima
// of neighboring columns.
//
// generated.cuh: see stem_pixels.cuh, also DILATION_H, FIRST_WORD (offset of the first window in a row of pixels, in two columns), LEAD
// (pairs whose rows are loaded in advance), POOL (2 or 3), POOL_TOP and POOL_LEFT, the padding (0 or 1; for 2 x 2, 0), and wgmma_pixels().
#include "stem_pixels.cuh"

constexpr int UNIT_BYTES = TILE_W * 16, ROW_BYTES = CHANNELS * UNIT_BYTES, RING = (LEAD + 1) * HALO_H;
constexpr int HALF = TILE_W / 2, EIGHTS = HALF / 8;
constexpr int FIRST = POOL == 3 ? 1 - POOL_TOP : 0;          // row of the convolution at which the first pair begins
static_assert(THREADS == 128 && TILE_W % 16 == 0 && PLANES && STRIDE_W == 2 && !FRAMES && HALO_H == 2 * STRIDE_H, "a form of this kernel");
static_assert(CHANNELS % 2 == 0 || (STRIDE_H % 2 == 0 && DILATION_H == 1), "the units of a K step are neighbors");
#if defined(DTYPE_BF16)
constexpr u32 LOWEST = 0xff80ff80u;
#else
constexpr u32 LOWEST = 0xfc00fc00u;
#endif

// Descriptor of a K-major operand without swizzle, whose rows begin 16 bytes apart.
DEVICE u64 windows(u32 address) { return (u64(8) << 32) | (u64(UNIT_BYTES >> 4) << 16) | u64((address & 0x3ffff) >> 4); }

// Loads operand A of all K steps: a lane's two rows are ``channel`` and the next.
DEVICE void load_weights(const Params& p, int channel, u32 (&weights)[K_STEPS][4]) {
    const u16* from = p.weights + (long long)channel * K + threadIdx.x % 4 * 2;
    #pragma unroll
    for (int i = 0; i < K_STEPS * 4; i++)
        weights[i / 4][i % 4] = __ldg(reinterpret_cast<const u32*>(from + i % 2 * K + i / 4 * 16 + i / 2 % 2 * 8));
}

// Starts the products of the first or second ``half`` of a row of the convolution. Its windows begin at ``row`` of the ring. Call it
// unconditionally, and wait within the same iteration of the loop: otherwise ptxas waits after each product.
DEVICE void multiply_half(u32 ring, int row, int half, const u32 (&weights)[K_STEPS][4], float (&acc)[HALF / 2]) {
    wgmma_fence();
    #pragma unroll
    for (int k = 0; k < K_STEPS; k++) {
        const int at = row + k * 2 / CHANNELS * DILATION_H;
        const u32 unit = ring + (at < RING ? at : at - RING) * ROW_BYTES + k * 2 % CHANNELS * UNIT_BYTES;
        wgmma_pixels(acc, weights[k], windows(unit + half * HALF * 16), k != 0);
    }
    wgmma_commit();
}

// Builds the units of a pair's rows in the ring, from planes of pixels.
DEVICE void put_windows(const u8* planes, u8* to) {
    #pragma unroll 4
    for (int i = threadIdx.x; i < CHANNELS * HALO_H * TILE_W; i += THREADS) {
        const int plane = i / TILE_W, x = i % TILE_W;
        const u32* from = reinterpret_cast<const u32*>(planes) + plane * (PITCH / 2) + x + FIRST_WORD;
        const uint4 unit = make_uint4(from[0], from[1], from[2], from[3]);
        *reinterpret_cast<uint4*>(to + plane % HALO_H * ROW_BYTES + plane / HALO_H * UNIT_BYTES + x * 16) = unit;
    }
    async_proxy_fence();
}

// A lane's part of a row: its two channels of two neighboring pixels, in each block of eight pixels.
struct Results { u32 of[2][EIGHTS][2]; };

// The half of a row that is computed at ``turn``: windows that reach to the right need the right half first.
DEVICE constexpr int half_of(int turn) { return POOL == 2 || POOL_LEFT ? turn : 1 - turn; }

// One of two pixels of a block of eight; the lowest value outside the row.
DEVICE u32 finished(const Params& p, const float (&acc)[HALF / 2], const float2& bias, int half, int eight, int i, bool real) {
    const u32 made = finish_pair(acc[eight * 4 + i] + bias.x, acc[eight * 4 + 2 + i] + bias.y, 0u);
    const int column = half * HALF + eight * 8;
    const bool outside = column + 16 >= TILE_W && column + int(threadIdx.x % 4) * 2 + i >= p.out_w;
    return real && !outside ? made : LOWEST;
}

// Maximum of ``held`` and half a row, into ``held``.
DEVICE void take_upper(const Params& p, const float (&acc)[HALF / 2], const float2& bias, int turn, bool real, Results& held) {
    #pragma unroll
    for (int i = 0; i < EIGHTS * 2; i++) {
        u32& best = held.of[turn][i / 2][i % 2];
        best = larger(best, finished(p, acc, bias, half_of(turn), i / 2, i % 2, real));
    }
}

// Maximum of a window's upper rows (``held``) and half the second row of a pair, then of neighboring columns, to the pooled image.
// Windows of three rows reuse the second row, which stays in ``held``. Their third column belongs to another lane, or to the
// neighboring block of eight pixels.
DEVICE void pool_lower(const Params& p, const float (&acc)[HALF / 2], const float2& bias, int turn, bool real, bool stored, u16* to,
                       Results& held, u32& beside) {
    const int lane = threadIdx.x % 32, t = lane % 4, edge = POOL_LEFT ? 3 : 0, from = lane / 4 * 4 + (t + (POOL_LEFT ? 3 : 1)) % 4;
    #pragma unroll
    for (int i = 0; i < EIGHTS; i++) {
        const int n = half_of(0) ? EIGHTS - 1 - i : i, x = half_of(turn) * (HALF / 2) + n * 4;
        u32 best[2];
        #pragma unroll
        for (int j = 0; j < 2; j++) {
            const u32 second = finished(p, acc, bias, half_of(turn), n, j, real);
            best[j] = larger(held.of[turn][n][j], second);
            held.of[turn][n][j] = POOL == 3 ? second : LOWEST;
        }
        u32 most = larger(best[0], best[1]);
        if constexpr (POOL == 3) {
            const u32 shared = best[POOL_LEFT];
            most = larger(most, __shfl_sync(0xffffffffu, t == edge ? beside : shared, from));
            beside = shared;
        }
        if (stored && x + t < p.pooled_w) *reinterpret_cast<u32*>(to + (long long)x * p.pitch) = most;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) conv_stem_pool_sm90(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 shared[];
    const int lane = threadIdx.x % 32, channel = blockIdx.y * 64 + threadIdx.x / 32 * 16 + lane / 4 * 2;
    const int known = min(channel, p.channels - 2);            // results of further channels are not stored
    grid_launch_dependents();
    u32 weights[K_STEPS][4];                       // constants: loaded before the previous kernel has ended
    load_weights(p, known, weights);
    const float2 bias = __ldg(reinterpret_cast<const float2*>(p.bias + known));
    const Places places = places_of(p);
    u8* const planes = shared + RING * ROW_BYTES;
    const u32 ring = smem_address(shared);

    const int begin = blockIdx.x % p.bands * p.band, end = min(begin + p.band, p.tiles_y);
    // The first windows of a band need the row above when they have three rows, unless that row is padding.
    Tile tile = {0, begin - (POOL == 3 && (begin > 0 || POOL_TOP == 0)), int(blockIdx.x / p.bands)};
    u16* const image = p.output + ((long long)tile.image * p.pooled_h * p.pooled_w + lane % 4) * p.pitch + channel;
    grid_dependency_wait();
    Chunk fresh[LEAD][ROUNDS];
    #pragma unroll
    for (int i = 0; i < LEAD; i++) fetch(p, {0, tile.y + i, tile.image}, places, fresh[i]);
    #pragma unroll
    for (int i = 0; i < LEAD; i++) {
        put(p, planes, {0, tile.y + i, tile.image}, places, fresh[i]);
        __syncthreads();
        put_windows(planes, shared + i * HALO_H * ROW_BYTES);
        __syncthreads();
    }

    Results held;
    #pragma unroll
    for (int i = 0; i < EIGHTS * 4; i++) held.of[i / 2 / EIGHTS][i / 2 % EIGHTS][i % 2] = LOWEST;
    float acc[2][HALF / 2];
    int first = 0;                                 // row of the ring where the pair's windows begin
    for (; tile.y < end; tile.y++) {
        const int row = tile.y * 2 + FIRST;
        const bool upper = row < p.out_h && tile.y >= begin, lower = row + 1 < p.out_h;
        const bool stored = channel < p.channels && tile.y >= begin, more = tile.y + 1 < end;
        const Tile later = {0, tile.y + LEAD, tile.image};
        multiply_half(ring, first, half_of(0), weights, acc[0]);
        if (more) fetch(p, later, places, fresh[0]);
        multiply_half(ring, first, half_of(1), weights, acc[1]);
        wgmma_wait<1>();
        take_upper(p, acc[0], bias, 0, upper, held);
        if (more) put(p, planes, later, places, fresh[0]);
        multiply_half(ring, first + STRIDE_H, half_of(0), weights, acc[0]);
        wgmma_wait<1>();
        take_upper(p, acc[1], bias, 1, upper, held);
        multiply_half(ring, first + STRIDE_H, half_of(1), weights, acc[1]);
        __syncthreads();                           // the planes are written, and the previous pair's rows have been read
        if (more) put_windows(planes, shared + (first ? first - HALO_H : RING - HALO_H) * ROW_BYTES);
        u32 beside = LOWEST;
        u16* const to = image + (long long)tile.y * p.pooled_w * p.pitch;
        wgmma_wait<1>();
        pool_lower(p, acc[0], bias, 0, lower, stored, to, held, beside);
        first = first + HALO_H < RING ? first + HALO_H : 0;
        __syncthreads();                           // the next pair's rows are written
        wgmma_wait<0>();
        pool_lower(p, acc[1], bias, 1, lower, stored, to, held, beside);
    }
}
