// Implicit-GEMM convolution for any tensor-core GPU from sm_80 on: NHWC, 16-bit operands, fp32 accumulation, mma.sync fed by a
// cp.async ring. One source, groups, any stride, padding and dilation; channels per group in multiples of 8 (16-byte copies).
//
// Block: 128 threads, BM output pixels x BN output channels, K in steps of 32 channels of one filter tap; 2 x 2 warps.
// generated.cuh defines BM, BN (64 or 128), STAGES, HAS_RESIDUAL and epilogue().
#include "ptx.cuh"
#include "generated.cuh"

struct Params {
    const u16 *pixels, *weights, *residual;        // weights: [channels][tap][channel blocks * 32]
    const float* bias;
    u16* output;
    int channels, in_channels, group_channels, group_in;   // group_*: of one group
    int height, width, out_h, out_w, pixel_count;
    int taps_h, taps_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
};

constexpr int THREADS = 128, BK = 32, ROW_BYTES = BK * 2;
constexpr int WARP_M = BM / 2, WARP_N = BN / 2, TILES_M = WARP_M / 16, TILES_N = WARP_N / 8;
constexpr u32 STAGE_BYTES = (BM + BN) * ROW_BYTES;

// Four 16-byte chunks a row; the swizzle makes the eight rows of an ldmatrix hit all banks.
DEVICE u32 chunk_at(int row, int chunk) { return row * ROW_BYTES + ((chunk ^ ((row >> 1) & 3)) << 4); }

DEVICE void copy_16(u32 target, const void* source, bool valid) {      // zeros where not valid
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(bytes) : "memory");
}

DEVICE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if defined(DTYPE_BF16)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

extern "C" __global__ void __launch_bounds__(THREADS) conv_sm80(const Params p) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 base = smem_address(shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_m = (warp % 2) * WARP_M, warp_n = (warp / 2) * WARP_N;
    const int group = blockIdx.z;
    const int first_pixel = blockIdx.x * BM, first_channel = blockIdx.y * BN;      // the channel within the group
    const int blocks = (p.group_in + BK - 1) / BK, steps = p.taps_h * p.taps_w * blocks;
    grid_launch_dependents();

    // Copies: thread t moves chunk t % 4 of rows t / 4 + 32 i.
    const int chunk = threadIdx.x % 4;
    int row_h[BM / 32], row_w[BM / 32];
    const u16* row_image[BM / 32];
    #pragma unroll
    for (int i = 0; i < BM / 32; i++) {
        const int pixel = first_pixel + threadIdx.x / 4 + 32 * i;
        const bool live = pixel < p.pixel_count;
        row_w[i] = pixel % p.out_w * p.stride_w - p.pad_w;
        row_h[i] = live ? pixel / p.out_w % p.out_h * p.stride_h - p.pad_h : -(1 << 28);   // never inside
        row_image[i] = p.pixels + (long long)(live ? pixel / p.out_w / p.out_h : 0) * p.height * p.width * p.in_channels + group * p.group_in + chunk * 8;
    }
    int block = 0, tap_w = 0, tap_h = 0;           // where in K the next copy is
    auto load = [&](int stage, int step) {
        const u32 target = base + stage * STAGE_BYTES;
        const bool inside = block * BK + chunk * 8 < p.group_in;
        #pragma unroll
        for (int i = 0; i < BM / 32; i++) {
            const int h = row_h[i] + tap_h * p.dilation_h, w = row_w[i] + tap_w * p.dilation_w;
            const bool valid = inside && h >= 0 && h < p.height && w >= 0 && w < p.width;
            const u16* source = valid ? row_image[i] + ((long long)h * p.width + w) * p.in_channels + block * BK : p.pixels;
            copy_16(target + chunk_at(threadIdx.x / 4 + 32 * i, chunk), source, valid);
        }
        #pragma unroll
        for (int i = 0; i < BN / 32; i++) {
            const int row = threadIdx.x / 4 + 32 * i, channel = first_channel + row;
            const bool valid = channel < p.group_channels;
            const u16* source = p.weights + ((long long)(group * p.group_channels + (valid ? channel : 0)) * steps + step) * BK + chunk * 8;
            copy_16(target + BM * ROW_BYTES + chunk_at(row, chunk), source, valid);
        }
        if (++block == blocks) {
            block = 0;
            if (++tap_w == p.taps_w) tap_w = 0, tap_h++;
        }
    };

    float acc[TILES_M][TILES_N][4];
    #pragma unroll
    for (int m = 0; m < TILES_M; m++)
        #pragma unroll
        for (int n = 0; n < TILES_N; n++)
            #pragma unroll
            for (int i = 0; i < 4; i++) acc[m][n][i] = 0.0f;

    grid_dependency_wait();
    #pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < steps) load(s, s);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    for (int step = 0; step < steps; step++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncthreads();                           // this step has landed for all; the stage read last step is free for all
        if (step + STAGES - 1 < steps) load((step + STAGES - 1) % STAGES, step + STAGES - 1);
        asm volatile("cp.async.commit_group;" ::: "memory");
        const u32 a_tile = base + step % STAGES * STAGE_BYTES, b_tile = a_tile + BM * ROW_BYTES;
        #pragma unroll
        for (int k = 0; k < BK / 16; k++) {
            u32 a[TILES_M][4], b[TILES_N][2];
            #pragma unroll
            for (int m = 0; m < TILES_M; m++)
                ldmatrix_x4(a_tile + chunk_at(warp_m + m * 16 + lane % 16, k * 2 + lane / 16), a[m][0], a[m][1], a[m][2], a[m][3]);
            #pragma unroll
            for (int n = 0; n < TILES_N; n += 2)   // matrices: channels 0-7 at k 0-7 and 8-15, then channels 8-15
                ldmatrix_x4(b_tile + chunk_at(warp_n + n * 8 + lane % 8 + lane / 16 * 8, k * 2 + lane / 8 % 2), b[n][0], b[n][1], b[n + 1][0], b[n + 1][1]);
            #pragma unroll
            for (int m = 0; m < TILES_M; m++)
                #pragma unroll
                for (int n = 0; n < TILES_N; n++) multiply(acc[m][n], a[m], b[n][0], b[n][1]);
        }
    }

    // Lane l holds channels 2 (l % 4) and + 1 of pixels l / 4 and + 8 of each 16 x 8 tile.
    #pragma unroll
    for (int n = 0; n < TILES_N; n++) {
        const int in_group = first_channel + warp_n + n * 8 + lane % 4 * 2;
        if (in_group >= p.group_channels) continue;
        const int channel = group * p.group_channels + in_group;
        const float2 c = __ldg(reinterpret_cast<const float2*>(p.bias + channel));
        #pragma unroll
        for (int m = 0; m < TILES_M; m++) {
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                const int pixel = first_pixel + warp_m + m * 16 + i * 8 + lane / 4;
                if (pixel >= p.pixel_count) continue;
                const long long at = (long long)pixel * p.channels + channel;
                const u32 r = HAS_RESIDUAL ? *reinterpret_cast<const u32*>(p.residual + at) : 0u;
                *reinterpret_cast<u32*>(p.output + at) =
                    pack2(epilogue(acc[m][n][i * 2], c.x, low_float(r)), epilogue(acc[m][n][i * 2 + 1], c.y, high_float(r)));
            }
        }
    }
}
