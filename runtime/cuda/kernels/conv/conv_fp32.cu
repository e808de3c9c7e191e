// Implicit-GEMM convolution in true fp32, on the scalar units of any GPU from sm_80 on: fp32 operands, one chain of fused
// multiply-adds per result, in the order of K (SPLIT chains, added in order, where a cluster splits K).
//
//   out[pixel, channel] = epilogue(sum_k pixels[pixel, k] * weights[k, channel])
//
// Block: BM output pixels x BN channels, K in steps of BK through a cp.async ring; a warp takes 4 TM pixels x 8 TN channels, a
// thread TM x TN of them. Both tiles are K-major, so that four neighbors are one 16-byte load. Copies of 4 bytes transpose the
// pixels, and so allow any number of channels and any strides. A cluster of SPLIT blocks splits the K of a tile: each block sums its
// part, then finishes its share of the pixels.
//
// generated.cuh defines BM, BN, TM, TN (4 or 8), BK (a multiple of 8), STAGES, EARLY (see fp32_tile.cuh), SPLIT, WHOLE (eight
// neighbors of K belong to one filter tap), PLANAR (K runs over taps first, channels last), VECTOR (results and residuals are stored
// as 16 bytes), HAS_RESIDUAL, SCATTER (channels are blocks of pixels, see conv_scatter.cuh) and epilogue().
#include "ptx.cuh"
#include "generated.cuh"
#include "conv_scatter.cuh"
#define B_PAD 0
#include "fp32_tile.cuh"

struct Params {
    const float *pixels, *weights, *bias, *residual;   // weights: [K, padded to BK][weight_pitch]
    float* output;
    int image, row, column, plane;                     // strides of the pixels' images, rows, columns, channels
    int out_image, out_row, out_column;                // strides of the results (whose channels are contiguous)
    int residual_image, residual_row, residual_column;
    int height, width, out_h, out_w, pixel_count;
    int taps_h, taps_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
    int group_in, group_channels, weight_pitch, channel_tiles, steps;   // group_*: channels of one group; steps of BK
    Scatter scatter;
};

// The blocks of a cluster exchange sums in [SPLIT][OWN][OUT_PITCH] floats: a block finishes every SPLIT-th pixel.
constexpr int OUT_PITCH = BN + 4, OWN = (BM + SPLIT - 1) / SPLIT;

struct alignas(16) Row {                           // an output pixel
    int at, hw;                                    // the first tap of its window: offset; row and column (16 bits each)
    int out, residual;                             // offsets of its result and residual; negative: outside. SCATTER: its image; row and column
};

// Four channels of one pixel: epilogue and store. ``channel`` counts within the group.
DEVICE void finish(const Params& p, const Row& row, int group, int channel, float4 v) {
    if (row.out < 0 || channel >= p.group_channels) return;
    const int at = group * p.group_channels + channel;
    const float* bias = p.bias + at;
#if SCATTER
    const Scatter& s = p.scatter;
    const int place = channel / s.channels;
    const int y = (row.residual >> 16) * s.stride_h + place / s.stride_w - s.crop_h;
    const int x = (row.residual & 0xffff) * s.stride_w + place % s.stride_w - s.crop_w;
    if (u32(y) >= u32(s.height) || u32(x) >= u32(s.width)) return;
    float* out = p.output + row.out + y * s.row + x * s.column + channel % s.channels;
#else
    float* out = p.output + row.out + at;
#endif
    const float* residual = p.residual + (HAS_RESIDUAL ? row.residual + at : 0);
#if VECTOR
    const float4 c = __ldg(reinterpret_cast<const float4*>(bias));
    const float4 r = HAS_RESIDUAL ? *reinterpret_cast<const float4*>(residual) : make_float4(0, 0, 0, 0);
    *reinterpret_cast<float4*>(out) =
        make_float4(epilogue(v.x, c.x, r.x), epilogue(v.y, c.y, r.y), epilogue(v.z, c.z, r.z), epilogue(v.w, c.w, r.w));
#else
    const float sum[4] = {v.x, v.y, v.z, v.w};
    #pragma unroll
    for (int i = 0; i < 4; i++)
        if (channel + i < p.group_channels) out[i] = epilogue(sum[i], __ldg(bias + i), HAS_RESIDUAL ? residual[i] : 0.0f);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) conv_fp32(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) float shared[];
    __shared__ Row rows[BM];
    const u32 base = smem_address(shared);
    const int group = blockIdx.z;
    const int rank = SPLIT > 1 ? blockIdx.x % SPLIT : 0, tile = blockIdx.x / SPLIT;
    const int first_channel = tile % p.channel_tiles * BN, first_pixel = tile / p.channel_tiles * BM;
    const int begin = SPLIT > 1 ? p.steps * rank / SPLIT : 0, end = SPLIT > 1 ? p.steps * (rank + 1) / SPLIT : p.steps;
#if SPLIT > 1
    __shared__ u64 met;                            // counts the bytes of all sums that the block finishes
    const int own_rows = (BM - rank + SPLIT - 1) / SPLIT;
    if (threadIdx.x == 0) {
        barrier_init(smem_address(&met), 1);
        barrier_init_fence();
        barrier_expect(smem_address(&met), SPLIT * own_rows * BN * 4);
    }
#endif
    grid_launch_dependents();

    for (int m = threadIdx.x; m < BM; m += THREADS) {
        const int pixel = first_pixel + m, w = pixel % p.out_w, h = pixel / p.out_w % p.out_h, n = pixel / p.out_w / p.out_h;
        const int in_h = h * p.stride_h - p.pad_h, in_w = w * p.stride_w - p.pad_w;
        Row row = {n * p.image + in_h * p.row + in_w * p.column + group * p.group_in * p.plane, in_h * 65536 + (in_w & 0xffff),
                   n * p.out_image + h * p.out_row + w * p.out_column,
                   n * p.residual_image + h * p.residual_row + w * p.residual_column};
        if (SCATTER) row.out = n * p.scatter.image, row.residual = h * 65536 + w;
        if (pixel >= p.pixel_count) row.hw = -16384 * 65536, row.out = -1;     // never inside the image
        rows[m] = row;
    }

    // Position in K of this thread's next copy; it advances by eight. For NHWC, the inner index is the channel, then the taps.
    const int inner_size = PLANAR ? p.taps_w : p.group_in, middle_size = PLANAR ? p.taps_h : p.taps_w;
    const int outer_size = PLANAR ? p.group_in : p.taps_h;
    const int k_lane = threadIdx.x % 8, k_first = begin * BK + k_lane;
    int inner = k_first % inner_size, middle = k_first / inner_size % middle_size, outer = k_first / inner_size / middle_size;
    int at[ROWS];
    auto aim = [&]() {
        const int dh = (PLANAR ? middle : outer) * p.dilation_h, dw = (PLANAR ? inner : middle) * p.dilation_w;
        const int tap = dh * p.row + dw * p.column + (WHOLE ? 0 : (PLANAR ? outer : inner) * p.plane);
        const bool inside = outer < outer_size;
        #pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const int2 row = *reinterpret_cast<const int2*>(&rows[threadIdx.x / 8 + THREADS / 8 * i]);
            const u32 h = (row.y >> 16) + dh, w = short(row.y) + dw;
            at[i] = inside && h < u32(p.height) && w < u32(p.width) ? row.x + tap : NOWHERE;
        }
    };
    const float* source = p.pixels + (WHOLE ? inner : 0);
    const u32 a_target = base + (k_lane * A_PITCH + threadIdx.x / 8) * 4;
    auto load_pixels = [&](int stage) {
        #pragma unroll
        for (int j = 0; j < BK / 8; j++) {
            if (!WHOLE) aim();
            #pragma unroll
            for (int i = 0; i < ROWS; i++)
                copy_4(a_target + (stage * STAGE + j * 8 * A_PITCH + THREADS / 8 * i) * 4, source, at[i]);
            inner += 8;
            if (WHOLE) {
                source += 8;
                if (inner >= inner_size) {         // the same for all threads
                    inner -= inner_size, source -= inner_size;
                    if (++middle == middle_size) middle = 0, outer++;
                    aim();
                }
            } else {
                while (inner >= inner_size) {
                    inner -= inner_size;
                    if (++middle == middle_size) middle = 0, outer++;
                }
            }
        }
    };
    // The rows of weights are padded with zeros; nothing is read beyond the last channel.
    const int b_column = threadIdx.x % (BN / 4) * 4, b_row = threadIdx.x / (BN / 4);
    const bool b_valid = first_channel + b_column < p.group_channels;
    const float* weights = p.weights;
    if (b_valid) weights += (long long)(begin * BK + b_row) * p.weight_pitch + group * p.group_channels + first_channel + b_column;
    const int b_skip = b_valid ? EACH * p.weight_pitch : 0;
    const u32 b_target = base + (BK * A_PITCH + b_row * BN + b_column) * 4;
    auto load_weights = [&](int stage) {           // called once per step, in order
        #pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            copy_16(b_target + (stage * STAGE + EACH * i * BN) * 4, weights, b_valid);
            weights += b_skip;
        }
    };

    #pragma unroll
    for (int s = 0; s < STAGES - 1; s++)           // no kernel writes weights
        if (begin + s < end) load_weights(s);
    __syncthreads();                               // the rows are written
    if (WHOLE) aim();
    grid_dependency_wait();
    #pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (begin + s < end) load_pixels(s);
        copies_end();
    }

    float acc[TM][TN];
    multiply_ring(acc, shared, end - begin, [&](int stage) {
        load_weights(stage);
        load_pixels(stage);
    });
    const int warp_m = own_row(), warp_n = own_column();

#if SPLIT > 1
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    cluster_arrive_relaxed();
    cluster_wait();                                // the rings of all peers are free, their barriers initialized
    #pragma unroll
    for (int i = 0; i < TM; i++) {
        const int m = warp_m + row_of(i);
        const u32 slot = base + ((rank * OWN + m / SPLIT) * OUT_PITCH + warp_n) * 4;
        #pragma unroll
        for (int j = 0; j < TN; j += 4) cluster_send(slot + j * 32, smem_address(&met), m % SPLIT, &acc[i][j]);
    }
    barrier_wait_cluster(smem_address(&met), 0);
    for (int i = threadIdx.x; i < own_rows * (BN / 4); i += THREADS) {
        const int m = i / (BN / 4), n = i % (BN / 4) * 4;
        float4 sum = make_float4(0, 0, 0, 0);
        #pragma unroll
        for (int r = 0; r < SPLIT; r++) {
            const float4 part = *reinterpret_cast<const float4*>(shared + (r * OWN + m) * OUT_PITCH + n);
            sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
        }
        finish(p, rows[m * SPLIT + rank], group, first_channel + n, sum);
    }
#else
    #pragma unroll
    for (int i = 0; i < TM; i++) {
        const Row row = rows[warp_m + row_of(i)];
        #pragma unroll
        for (int j = 0; j < TN; j += 4)
            finish(p, row, group, first_channel + warp_n + j * 8, make_float4(acc[i][j], acc[i][j + 1], acc[i][j + 2], acc[i][j + 3]));
    }
#endif
}
