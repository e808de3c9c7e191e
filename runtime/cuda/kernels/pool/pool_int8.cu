// Pooling of 8-bit NHWC images, and the quantization and layout change before a few-channel stem. All are memory-bound.
//
// generated.cuh defines KERNEL_H, KERNEL_W (max_pool), UNSIGNED (8-bit type of the images), CHANNELS, BLOCK (pack_image), IMAGE_HALF (its
// images are fp16, else fp32).
#include "ptx.cuh"
#include "generated.cuh"

DEVICE u32 larger(u32 a, u32 b) { return UNSIGNED ? __vmaxu4(a, b) : __vmaxs4(a, b); }

#include "max_pool.cuh"

// v bounded, rounded half to even, shifted by the zero point.
DEVICE u32 narrow(float v, float low, float high, int zero) {
    return (__float_as_uint(__fadd_rn(fminf(fmaxf(v, low), high), 12582912.0f)) + zero) & 255;
}

struct MeanParams {
    const u32* input;
    u32* output;
    int pixels, words;                             // words of four channels
    int pitch, row;                                // words between pixels of the input, and between rows of the output
    int shift;                                     // the constant term of a window: - pixels * zero point
    float scale, low, high;
    int zero;
};

constexpr int MEAN_THREADS = 1024, MEAN_WORDS = 32, MEAN_AHEAD = 8;

DEVICE void add_word(int4& sum, u32 v) {
    sum.x += UNSIGNED ? int(v & 255) : int(v << 24) >> 24;
    sum.y += UNSIGNED ? int(v >> 8 & 255) : int(v << 16) >> 24;
    sum.z += UNSIGNED ? int(v >> 16 & 255) : int(v << 8) >> 24;
    sum.w += UNSIGNED ? int(v >> 24) : int(v) >> 24;
}

DEVICE void add_sums(int4& sum, const int4& other) {
    sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
}

// Mean over all pixels of an image, requantized: exact integer sums. Block: up to 32 words of channels x as many runs of pixels as
// its threads allow.
extern "C" __global__ void __launch_bounds__(MEAN_THREADS) global_average_pool(const __grid_constant__ MeanParams p) {
    __shared__ int4 partial[MEAN_THREADS];
    grid_launch_dependents();
    const int width = min(MEAN_WORDS, p.words), runs = MEAN_THREADS / width;
    const int run = threadIdx.x / width, word = blockIdx.x * width + threadIdx.x % width;
    const bool used = run < runs && word < p.words;
    const u32* image = p.input + (long long)blockIdx.y * p.pixels * p.pitch + word;
    grid_dependency_wait();
    int4 sum = make_int4(0, 0, 0, 0);
    if (used) {
        int i = run;
        for (; i + (MEAN_AHEAD - 1) * runs < p.pixels; i += MEAN_AHEAD * runs) {  // loads in flight together
            u32 v[MEAN_AHEAD];
            #pragma unroll
            for (int k = 0; k < MEAN_AHEAD; k++) v[k] = image[(long long)(i + k * runs) * p.pitch];
            #pragma unroll
            for (int k = 0; k < MEAN_AHEAD; k++) add_word(sum, v[k]);
        }
        for (; i < p.pixels; i += runs) add_word(sum, image[(long long)i * p.pitch]);
    }
#if SEEDED_FAULT == 3  // benchmarks/kinds/sanitize.py: a read of uninitialized memory
    if (word < p.words && p.output[(long long)blockIdx.y * p.row + word] == 0x01234567u) sum.x++;
#endif
#if SEEDED_FAULT == 4  // a barrier in half a warp, whose mask names the other half
    if (threadIdx.x % 32 < 16) __syncwarp(0xffff0000u);
#endif
    partial[threadIdx.x] = sum;
#if SEEDED_FAULT != 2  // without the barrier: a race
    __syncthreads();
#endif
    const int least = min(runs, 8);
    if (used && run < least) {
        for (int k = run + least; k < runs; k += least) add_sums(sum, partial[threadIdx.x + (k - run) * width]);
        partial[threadIdx.x] = sum;
    }
    __syncthreads();
    if (used && run == 0) {
        for (int k = 1; k < least; k++) add_sums(sum, partial[threadIdx.x + k * width]);
        const int all[4] = {sum.x, sum.y, sum.z, sum.w};
        u32 out = 0;
        #pragma unroll
        for (int i = 0; i < 4; i++) out |= narrow(__fmul_rn(float(all[i] + p.shift), p.scale), p.low, p.high, p.zero) << 8 * i;
        p.output[(long long)blockIdx.y * p.row + word] = out;
#if SEEDED_FAULT == 1  // a write past the end
        p.output[(long long)(blockIdx.y + 1) * p.row + word] = out;
#endif
    }
}

#if IMAGE_HALF
typedef u16 Pixel;
DEVICE float widen(u16 v) { return low_half(v); }
#else
typedef float Pixel;
DEVICE float widen(float v) { return v; }
#endif

struct PackParams {
    const Pixel* input;                            // NCHW
    uint4* output;                                 // [n][out_h][out_w] of sixteen channels
    int height, width, out_h, out_w, before;       // before: zero pixels at the beginning of a row
    float scale, low, high;
    int zero;
};

// NCHW image -> quantized NHWC with blocks of BLOCK x BLOCK pixels as channels: channel (dy * BLOCK + dx) * CHANNELS + c, the rest zero. A zero
// in the padding is the real 0, so images have zero point 0. One thread: one output pixel.
extern "C" __global__ void __launch_bounds__(128) pack_image(const __grid_constant__ PackParams p) {
    grid_launch_dependents();
    const int index = blockIdx.x * 128 + threadIdx.x, n = blockIdx.y;
    const int h = index / p.out_w * BLOCK, w = (index % p.out_w - p.before) * BLOCK;
    grid_dependency_wait();
    if (index >= p.out_h * p.out_w) return;
    Pixel values[16];
    #pragma unroll
    for (int i = 0; i < 16; i++) {
        const int c = i % CHANNELS, dx = i / CHANNELS % BLOCK, dy = i / CHANNELS / BLOCK;
        const bool inside = dy < BLOCK && h + dy < p.height && w + dx >= 0 && w + dx < p.width;
        values[i] = inside ? p.input[((long long)(n * CHANNELS + c) * p.height + h + dy) * p.width + w + dx] : Pixel(0);
    }
    u32 words[4];
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        words[i] = 0;
        #pragma unroll
        for (int j = 0; j < 4; j++)
            words[i] |= narrow(__fdiv_rn(widen(values[i * 4 + j]), p.scale), p.low, p.high, p.zero) << 8 * j;
    }
    p.output[(long long)n * p.out_h * p.out_w + index] = make_uint4(words[0], words[1], words[2], words[3]);
}
