// A first convolution with a stride of 2 along its rows, and the max pool behind it, as conv_stem_pool.cu, on Hopper's wgmma.
//
// Output channels lie on wgmma's M: a block has 64, and their weights stay in registers. Pixels lie on N. The windows of neighbouring
// results are rows of K, which begin 16 bytes apart in shared memory: a core matrix of operand B is eight rows of 16 bytes, one after another.
// These 16 bytes, a unit, are eight columns of one channel and one row, as many as a row of the filter has at most. K goes through the channels
// of a filter's row, row by row, and a K step is two units. Pixels come to shared memory as planes; from there, a thread makes a window's unit.
//
// A block is one warpgroup, which goes down a band of an image by pairs of the convolution's rows, each as wide as the image and halved: while a
// half is multiplied, the sums of the one before are finished. The rows of units are a ring, to which those of a later pair come meanwhile.
// The largest elements under the rows of a window are a thread's own. Those of neighbouring columns meet by shuffles.
//
// generated.cuh: see stem_pixels.cuh, also DILATION_H, FIRST_WORD (the first window in a row of pixels, in two columns), LEAD (pairs whose
// rows are there), POOL (2 or 3), POOL_TOP and POOL_LEFT, the padding (0 or 1; of 2 x 2, 0), and wgmma_pixels().
#include "stem_pixels.cuh"

constexpr int UNIT_BYTES = TILE_W * 16, ROW_BYTES = CHANNELS * UNIT_BYTES, RING = (LEAD + 1) * HALO_H;
constexpr int HALF = TILE_W / 2, EIGHTS = HALF / 8;
constexpr int FIRST = POOL == 3 ? 1 - POOL_TOP : 0;          // row of the convolution at which the first pair begins
static_assert(THREADS == 128 && TILE_W % 16 == 0 && PLANES && STRIDE_W == 2 && !FRAMES && HALO_H == 2 * STRIDE_H, "a form of this kernel");
static_assert(CHANNELS % 2 == 0 || (STRIDE_H % 2 == 0 && DILATION_H == 1), "the units of a K step are neighbours");
#if defined(DTYPE_BF16)
constexpr u32 LOWEST = 0xff80ff80u;
#else
constexpr u32 LOWEST = 0xfc00fc00u;
#endif

// A K-major operand without a swizzle, whose rows of K begin 16 bytes apart.
DEVICE u64 windows(u32 address) { return (u64(8) << 32) | (u64(UNIT_BYTES >> 4) << 16) | u64((address & 0x3ffff) >> 4); }

// Operand A of all K steps: a lane's two rows are ``channel`` and the next.
DEVICE void load_weights(const Params& p, int channel, u32 (&weights)[K_STEPS][4]) {
    const u16* from = p.weights + (long long)channel * K + threadIdx.x % 4 * 2;
    #pragma unroll
    for (int i = 0; i < K_STEPS * 4; i++)
        weights[i / 4][i % 4] = __ldg(reinterpret_cast<const u32*>(from + i % 2 * K + i / 4 * 16 + i / 2 % 2 * 8));
}

// Begins the products of the first or second ``half`` of a row of the convolution whose windows begin at the ring's ``row``. Not under a
// condition, and not to be waited for in the loop's next turn: ptxas would wait for each product.
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

// The units of a pair's rows, from planes of pixels to the ring.
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

// What a lane has of a row: its two channels of two neighbouring pixels, for each eight.
struct Results { u32 of[2][EIGHTS][2]; };

// Which half of a row is done as number ``turn``: windows that reach to the right want the right one first.
DEVICE constexpr int half_of(int turn) { return POOL == 2 || POOL_LEFT ? turn : 1 - turn; }

// One of two pixels of an eight; what lies outside the row is the lowest.
DEVICE u32 finished(const Params& p, const float (&acc)[HALF / 2], const float2& bias, int half, int eight, int i, bool real) {
    const u32 made = finish_pair(acc[eight * 4 + i] + bias.x, acc[eight * 4 + 2 + i] + bias.y, 0u);
    const int column = half * HALF + eight * 8;
    const bool outside = column + 16 >= TILE_W && column + int(threadIdx.x % 4) * 2 + i >= p.out_w;
    return real && !outside ? made : LOWEST;
}

// The larger elements of ``held`` and of half a row.
DEVICE void take_upper(const Params& p, const float (&acc)[HALF / 2], const float2& bias, int turn, bool real, Results& held) {
    #pragma unroll
    for (int i = 0; i < EIGHTS * 2; i++) {
        u32& best = held.of[turn][i / 2][i % 2];
        best = larger(best, finished(p, acc, bias, half_of(turn), i / 2, i % 2, real));
    }
}

// The larger elements of a window's upper rows (``held``) and of half the second row of a pair, then of neighbouring columns, to the pooled image.
// Windows of three rows go on with the second row, which stays in ``held``. Their third column is another lane's, or of the eight beside.
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
    const int known = min(channel, p.channels - 2);            // what is made of others is not stored
    grid_launch_dependents();
    u32 weights[K_STEPS][4];                       // constants: before what comes before has ended
    load_weights(p, known, weights);
    const float2 bias = __ldg(reinterpret_cast<const float2*>(p.bias + known));
    const Places places = places_of(p);
    u8* const planes = shared + RING * ROW_BYTES;
    const u32 ring = smem_address(shared);

    const int begin = blockIdx.x % p.bands * p.band, end = min(begin + p.band, p.tiles_y);
    // A band's first windows of three rows want the row before, unless it is padding.
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
    int first = 0;                                 // row of the ring at which the pair's windows begin
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
        __syncthreads();                           // the planes are there, and the rows of the pair before have been read
        if (more) put_windows(planes, shared + (first ? first - HALO_H : RING - HALO_H) * ROW_BYTES);
        u32 beside = LOWEST;
        u16* const to = image + (long long)tile.y * p.pooled_w * p.pitch;
        wgmma_wait<1>();
        pool_lower(p, acc[0], bias, 0, lower, stored, to, held, beside);
        first = first + HALO_H < RING ? first + HALO_H : 0;
        __syncthreads();                           // the next pair's rows are there
        wgmma_wait<0>();
        pool_lower(p, acc[1], bias, 1, lower, stored, to, held, beside);
    }
}
