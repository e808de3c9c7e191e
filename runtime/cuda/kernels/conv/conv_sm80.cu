// Implicit-GEMM convolution for any tensor-core GPU from sm_80 on: NHWC, operands of 32 (tf32), 16 or 8 bits (fp8: from sm_89 on),
// fp32 accumulators (int32 for integers), mma.sync fed by a cp.async ring. One source, groups, any stride, padding and dilation; pixels
// and groups begin at multiples of 16 bytes.
//
// Block: 128 threads, BM output pixels x BN output channels, K in steps of 64 bytes of one filter tap; 2 x 2 warps. A fragment of
// mma.sync holds the same bytes of a row for every element type, so the same ldmatrix feeds all products of 32 bytes of K.
// SPLIT blocks split the K steps of a tile where tiles are few. Each block writes its accumulators in register order. The last block to
// arrive adds all of them in the order of K, so results repeat to the bit. p.arrived counts the blocks of a tile that have written; it
// is zero between launches, since the last block resets it.
// generated.cuh defines BM, BN (64 or 128), STAGES, SPLIT, the element types (see conv_element.cuh), multiply() and epilogue().
#include "ptx.cuh"
#include "mma.cuh"
#include "generated.cuh"
#include "conv_element.cuh"
#if EDGED
#include "conv_edges.cuh"
#endif

struct Params {
    const u8 *pixels, *weights, *residual;         // weights: [channels][tap][channel blocks * BK]
    const StoredChannel* channel;                  // bias, or scale and bias, of every output channel
    u8* output;
    Acc4* partial;
    u32* arrived;
    int channels, in_channels, in_row;             // elements between pixels of the result, pixels of the source, rows of the source
    int group_channels, group_in;
    int height, width, out_h, out_w, pixel_count;
    int taps_h, taps_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
    Requantize requantize;
#if DYNAMIC
    const float* data_scale;                       // scale of all pixels
    const u8* data_zero;
#endif
#if EDGED
    Edges edges;
#endif
};

constexpr int THREADS = 128, ROW_BYTES = 64, BK = ROW_BYTES / OPERAND_ITEM;
constexpr int WARP_M = BM / 2, WARP_N = BN / 2, TILES_M = WARP_M / 16, TILES_N = WARP_N / 8;
constexpr u32 STAGE_BYTES = (BM + BN) * ROW_BYTES;

// Four 16-byte chunks per row; with the swizzle, the eight rows of an ldmatrix touch all banks.
DEVICE u32 chunk_at(int row, int chunk) { return row * ROW_BYTES + ((chunk ^ ((row >> 1) & 3)) << 4); }

// Within 16 rows of weights, row 8 h + 2 t + i is channel 4 t + 2 h + i: lane t of four then holds four neighboring channels.
DEVICE int channel_of(int row) { return (row & ~15) | (row & 6) << 1 | (row & 8) >> 2 | (row & 1); }

#if OUT_ITEM == 4
typedef float Element;
#elif OUT_ITEM == 2
typedef u16 Element;
#else
typedef u8 Element;
#endif

// Four neighboring channels of a pixel, for a store that is unaligned or crosses the last channel.
union Pieces {
    Four four;
    Element element[4];
};

extern "C" __global__ void __launch_bounds__(THREADS) conv_sm80(const Params p) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 base = smem_address(shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_m = (warp % 2) * WARP_M, warp_n = (warp / 2) * WARP_N;
    const int group = blockIdx.z / SPLIT, part = blockIdx.z % SPLIT;
    const int first_pixel = blockIdx.x * BM, first_channel = blockIdx.y * BN;      // the channel within the group
    const int blocks = (p.group_in + BK - 1) / BK, steps = p.taps_h * p.taps_w * blocks;
    const int begin = steps * part / SPLIT, end = steps * (part + 1) / SPLIT;
    grid_launch_dependents();

    // Copies: thread t moves chunk t % 4 of rows t / 4 + 32 i.
    const int chunk = threadIdx.x % 4;
    int row_h[BM / 32], row_w[BM / 32];
    const u8* row_image[BM / 32];
    #pragma unroll
    for (int i = 0; i < BM / 32; i++) {
        const int pixel = first_pixel + threadIdx.x / 4 + 32 * i;
        const bool live = pixel < p.pixel_count;
        row_w[i] = pixel % p.out_w * p.stride_w - p.pad_w;
        row_h[i] = live ? pixel / p.out_w % p.out_h * p.stride_h - p.pad_h : -(1 << 28);   // never inside the image
        const long long image = (long long)(live ? pixel / p.out_w / p.out_h : 0) * p.height * p.in_row;
        row_image[i] = p.pixels + (image + group * p.group_in) * OPERAND_ITEM + chunk * 16;
    }
    int block = begin % blocks, tap_w = begin / blocks % p.taps_w, tap_h = begin / blocks / p.taps_w;   // position in K of the next copy
    auto load = [&](int stage, int step) {
        const u32 target = base + stage * STAGE_BYTES;
        const int left = (p.group_in - block * BK) * OPERAND_ITEM - chunk * 16, bytes = left < 0 ? 0 : left < 16 ? left : 16;
        #pragma unroll
        for (int i = 0; i < BM / 32; i++) {
            const int h = row_h[i] + tap_h * p.dilation_h, w = row_w[i] + tap_w * p.dilation_w;
            const bool valid = bytes > 0 && h >= 0 && h < p.height && w >= 0 && w < p.width;
            const u8* source = valid ? row_image[i] + ((long long)h * p.in_row + w * p.in_channels + block * BK) * OPERAND_ITEM : p.pixels;
            copy_16_or_zeros(target + chunk_at(threadIdx.x / 4 + 32 * i, chunk), source, valid ? bytes : 0);
        }
        #pragma unroll
        for (int i = 0; i < BN / 32; i++) {
            const int row = threadIdx.x / 4 + 32 * i, channel = first_channel + channel_of(row);
            const bool valid = channel < p.group_channels;
            const u8* source = p.weights + ((long long)(group * p.group_channels + (valid ? channel : 0)) * steps + step) * ROW_BYTES + chunk * 16;
            copy_16_or_zeros(target + BM * ROW_BYTES + chunk_at(row, chunk), source, valid ? 16 : 0);
        }
        if (++block == blocks) {
            block = 0;
            if (++tap_w == p.taps_w) tap_w = 0, tap_h++;
        }
    };

    Acc acc[TILES_M][TILES_N][4];
    #pragma unroll
    for (int m = 0; m < TILES_M; m++)
        #pragma unroll
        for (int n = 0; n < TILES_N; n++)
            #pragma unroll
            for (int i = 0; i < 4; i++) acc[m][n][i] = 0;
#if EDGED
    // Accumulators begin with what the taps outside of the image add. Of blocks that split K: only in the first one.
    #pragma unroll
    for (int k = 0; k < TILES_M * 2; k++) {
        const int pixel = first_pixel + warp_m + k * 8 + lane / 4;
        const int kind = part == 0 && pixel < p.pixel_count ? edge_kind(p, pixel % (p.out_h * p.out_w)) : 0;
        #pragma unroll
        for (int i = 0; i < TILES_N * 2; i++) {
            const int channel = first_channel + warp_n + i / 4 * 16 + lane % 4 * 4 + i % 4;
            if (channel < p.group_channels) acc[k / 2][i / 2][k % 2 * 2 + i % 2] = edge_sum(p, kind, group * p.group_channels + channel);
        }
    }
#endif

    grid_dependency_wait();
    #pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (begin + s < end) load(s, begin + s);
        copies_commit();
    }
    for (int step = begin, stage = 0; step < end; step++) {
        copies_wait_but<STAGES - 2>();
        __syncthreads();                           // this step has landed for all threads; all have read the stage of the last step
        if (step + STAGES - 1 < end) load(stage ? stage - 1 : STAGES - 1, step + STAGES - 1);
        copies_commit();
        const u32 a_tile = base + stage * STAGE_BYTES, b_tile = a_tile + BM * ROW_BYTES;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        #pragma unroll
        for (int k = 0; k < ROW_BYTES / 32; k++) {
            u32 a[TILES_M][4], b[TILES_N][2];
            #pragma unroll
            for (int m = 0; m < TILES_M; m++)
                ldmatrix_x4(a_tile + chunk_at(warp_m + m * 16 + lane % 16, k * 2 + lane / 16), a[m][0], a[m][1], a[m][2], a[m][3]);
#if OPERAND_ITEM == 4                              // weights were already rounded when they were packed
            #pragma unroll
            for (int m = 0; m < TILES_M; m++)
                #pragma unroll
                for (int i = 0; i < 4; i++) a[m][i] = rounded_to_tf32(a[m][i]);
#endif
            #pragma unroll
            for (int n = 0; n < TILES_N; n += 2)   // matrices: rows 0-7 at both halves of the 32 bytes, then rows 8-15
                ldmatrix_x4(b_tile + chunk_at(warp_n + n * 8 + lane % 8 + lane / 16 * 8, k * 2 + lane / 8 % 2), b[n][0], b[n][1], b[n + 1][0], b[n + 1][1]);
            #pragma unroll
            for (int m = 0; m < TILES_M; m++)
                #pragma unroll
                for (int n = 0; n < TILES_N; n++) multiply(acc[m][n], a[m], b[n][0], b[n][1]);
        }
    }

    if (SPLIT > 1) {
        constexpr int PIECES = TILES_M * TILES_N;  // of 16 bytes, per thread
        const u32 tile = (group * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
        Acc4* sums = p.partial + (u64(tile) * SPLIT + part) * PIECES * THREADS + threadIdx.x;
        #pragma unroll
        for (int m = 0; m < TILES_M; m++)
            #pragma unroll
            for (int n = 0; n < TILES_N; n++)
                sums[(m * TILES_N + n) * THREADS] = {acc[m][n][0], acc[m][n][1], acc[m][n][2], acc[m][n][3]};
        __threadfence();
        __syncthreads();                           // nothing reads the ring any more: its first word holds whether this block is the last
        u32* last = reinterpret_cast<u32*>(shared);
        if (threadIdx.x == 0) {
            *last = count_arrival(p.arrived + tile) == SPLIT - 1;
            if (*last) p.arrived[tile] = 0;
        }
        __syncthreads();
        if (!*last) return;
        __threadfence();
        const Acc4* all = p.partial + u64(tile) * SPLIT * PIECES * THREADS + threadIdx.x;
        #pragma unroll 1
        for (int r = 0; r < SPLIT; r++) {
            #pragma unroll
            for (int m = 0; m < TILES_M; m++) {
                #pragma unroll
                for (int n = 0; n < TILES_N; n++) {
                    const Acc4 v = __ldcg(all + (r * PIECES + m * TILES_N + n) * THREADS);
                    const Acc4 old = r ? Acc4{acc[m][n][0], acc[m][n][1], acc[m][n][2], acc[m][n][3]} : Acc4{0, 0, 0, 0};
                    acc[m][n][0] = old.x + v.x, acc[m][n][1] = old.y + v.y, acc[m][n][2] = old.z + v.z, acc[m][n][3] = old.w + v.w;
                }
            }
        }
    }

    // Of each pair of 16 x 8 tiles, lane l holds the four channels from 4 (l % 4) on, of pixels l / 4 and l / 4 + 8.
    #pragma unroll
    for (int n = 0; n < TILES_N; n += 2) {
        const int in_group = first_channel + warp_n + n * 8 + lane % 4 * 4, left = p.group_channels - in_group;
        if (left <= 0) continue;
        const int channel = group * p.group_channels + in_group;
        const bool whole = left >= 4 && channel % 4 == 0;
        Channel c[4];
        if (whole) {
            load_four(p, channel, channel + 4, c);
        } else {
            #pragma unroll
            for (int e = 0; e < 4; e++) c[e] = e < left ? channel_at(p, channel + e) : no_channel();
        }
        #pragma unroll
        for (int m = 0; m < TILES_M; m++) {
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                const int pixel = first_pixel + warp_m + m * 16 + i * 8 + lane / 4;
                if (pixel >= p.pixel_count) continue;
                const long long at = ((long long)pixel * p.channels + channel) * OUT_ITEM;
                const Acc4 sums = {acc[m][n][i * 2], acc[m][n][i * 2 + 1], acc[m][n + 1][i * 2], acc[m][n + 1][i * 2 + 1]};
                Pieces r;
                r.four = Four();
                if (whole) {
                    if (HAS_RESIDUAL) r.four = *reinterpret_cast<const Four*>(p.residual + at);
                    *reinterpret_cast<Four*>(p.output + at) = finish_four(p.requantize, sums, c, r.four);
                    continue;
                }
                #pragma unroll
                for (int e = 0; e < 4; e++)
                    if (HAS_RESIDUAL && e < left) r.element[e] = reinterpret_cast<const Element*>(p.residual + at)[e];
                r.four = finish_four(p.requantize, sums, c, r.four);
                #pragma unroll
                for (int e = 0; e < 4; e++)
                    if (e < left) reinterpret_cast<Element*>(p.output + at)[e] = r.element[e];
            }
        }
    }
}
