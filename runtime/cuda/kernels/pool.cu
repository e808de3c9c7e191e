// NHWC pooling and the layout change in front of a few-channel stem. All are memory-bound: 16-byte accesses where possible.
#include "ptx.cuh"
#include "generated.cuh"

DEVICE u32 larger(u32 a, u32 b) {
    u32 best;
#if defined(DTYPE_BF16)
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(best) : "r"(a), "r"(b));
#else
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(best) : "r"(a), "r"(b));
#endif
    return best;
}

#include "max_pool.cuh"

struct MeanParams {
    const u32* input;
    u32* output;
    int pixels, pairs;                             // pairs of channels
    float scale;
};

// Mean over all pixels of an image. Block: 32 pairs of channels x 8 runs of pixels, added in a fixed order.
extern "C" __global__ void __launch_bounds__(256) global_average_pool(const MeanParams p) {
    __shared__ float2 partial[8][32];
    grid_launch_dependents();
    grid_dependency_wait();
    const int pair = blockIdx.x * 32 + threadIdx.x % 32, run = threadIdx.x / 32;
    float2 sum = make_float2(0.0f, 0.0f);
    if (pair < p.pairs) {
        const u32* image = p.input + (long long)blockIdx.y * p.pixels * p.pairs + pair;
        #pragma unroll 8
        for (int i = run; i < p.pixels; i += 8) {
            const u32 v = image[(long long)i * p.pairs];
            sum.x += low_float(v);
            sum.y += high_float(v);
        }
    }
    partial[run][threadIdx.x % 32] = sum;
    __syncthreads();
    if (run == 0 && pair < p.pairs) {
        #pragma unroll
        for (int i = 1; i < 8; i++) {
            sum.x += partial[i][threadIdx.x].x;
            sum.y += partial[i][threadIdx.x].y;
        }
        p.output[(long long)blockIdx.y * p.pairs + pair] = pack2(sum.x * p.scale, sum.y * p.scale);
    }
}

struct PackParams {
    const u16* input;                              // NCHW
    u16* output;                                   // [n][out_h][out_w][LANES]
    int height, width, out_h, out_w;
};

// NCHW image -> NHWC of BLOCK x BLOCK as many channels: channel (dy * BLOCK + dx) * CHANNELS + c of pixel (h, w) is channel c of
// pixel (h * BLOCK + dy, w * BLOCK + dx), zero past the edge and past the last channel. One thread: one output pixel.
extern "C" __global__ void __launch_bounds__(128) space_to_depth(const PackParams p) {
    grid_launch_dependents();
    const int index = blockIdx.x * 128 + threadIdx.x, n = blockIdx.y;
    const int h = index / p.out_w * BLOCK, w = index % p.out_w * BLOCK;
    grid_dependency_wait();
    if (index >= p.out_h * p.out_w) return;
    u16 values[LANES];
    #pragma unroll
    for (int i = 0; i < LANES; i++) {
        const int c = i % CHANNELS, dx = i / CHANNELS % BLOCK, dy = i / CHANNELS / BLOCK;
        const bool inside = dy < BLOCK && h + dy < p.height && w + dx < p.width;
        values[i] = inside ? p.input[((long long)(n * CHANNELS + c) * p.height + h + dy) * p.width + w + dx] : u16(0);
    }
    uint4* target = reinterpret_cast<uint4*>(p.output + ((long long)n * p.out_h * p.out_w + index) * LANES);
    #pragma unroll
    for (int i = 0; i < LANES / 8; i++) {
        const u16* v = values + i * 8;
        target[i] = make_uint4(v[0] | u32(v[1]) << 16, v[2] | u32(v[3]) << 16, v[4] | u32(v[5]) << 16, v[6] | u32(v[7]) << 16);
    }
}
