// Depthwise convolution, NHWC, fp32, 16- or 8-bit storage, fp32 accumulation. Memory-bound: each input element should leave DRAM once.
//
// A thread computes TILE_H x TILE_W output pixels of LANES (4 or 8) channels. It walks its input rows once, top to bottom; the vectors
// of a row serve all taps and all output rows that touch it. A block takes block_vectors x strips_x x strips_y such strips, so that
// rows and columns that neighbors share hit in L1.
//
// Images may be the frames of volumes. Then a thread adds one frame after another under its filter. Large filters are BANDS bands of KERNEL_H
// rows, which a thread adds one after another. SHARERS threads share these steps; the first of them adds up their sums, through shared memory.
//
// generated.cuh defines LANES, KERNEL_H, KERNEL_W, STRIDE_H, STRIDE_W, DILATION_H, DILATION_W, TILE_H, TILE_W, MAX_THREADS, MIN_BLOCKS,
// KERNEL_D (taps along the depth of a volume, 0: there are no volumes; with STRIDE_D, DILATION_D), BANDS, SHARERS, TRANSPOSED (a transposed
// convolution; with PHASE_H, PHASE_W), HAS_RESIDUAL, RELU_BEFORE (floats: a ReLU of the input precedes the filter), SQUEEZE (0 none, 1 partial
// sums, 2 finished means) and epilogue(). BESIDE: a second convolution of the same form, of other channels or of another image. In place of a residual, epilogue()
// then reads the result of epilogue_beside() for the second convolution.
#include "depthwise_core.cuh"

struct Params {
    const Element* input;
    u8* output;
    const Weight* weights;                         // [taps][channels]
    const Channel* channel;                        // [channels]: bias, or scale and bias
    const u8* residual;                            // of the output's shape
    float* sums;                                   // SQUEEZE 1: [n][tiles][channels], of volumes [n][frames][tiles][channels]
    u8* means;                                     // SQUEEZE 2: [n][channels], type of the output
    int height, width, vectors, out_h, out_w, pad_h, pad_w;
    int pitch, image;                              // elements from a pixel to the next, and from an image to the next
    Places out, added;                             // likewise of the output and of the residual
    int block_vectors, strips_x, strips_y, tiles_x;
    Narrow mean;                                   // only its factor is used where results are floats
    u32 outside;                                   // the padding value of an 8-bit image, in each of four bytes
#if KERNEL_D
    int depth, out_d, pad_d, gap;                  // images are frames of volumes: frames of a volume, and of its result; the input's gap
#endif
    Requantize requantize;                         // for 8-bit operands
#if BESIDE
    const Element* second;                         // likewise, for the second convolution
    const Weight* second_weights;
    const Channel* second_channel;
    int second_pitch, second_image;
#endif
};

// The weights and constants of a thread's channels. No kernel writes them.
struct Filter {
    Vector own[WEIGHTS_IN_REGISTERS ? TAPS : 1];
    const Vector* shared;
    const Weight* weights;
    Channel constants[LANES];

    __device__ __forceinline__ Filter(const Params& p, const Weight* weights, const Channel* channel, Vector* place, int vector)
        : shared(place), weights(weights) {
        if (WEIGHTS_IN_SHARED) {
            for (int i = threadIdx.x; i < TAPS * p.block_vectors; i += blockDim.x) {
                const int v = blockIdx.x * p.block_vectors + i % p.block_vectors;
                place[i] = v < p.vectors ? load_weights(weights + ((i / p.block_vectors) * p.vectors + v) * LANES) : zeros();
            }
        } else if (WEIGHTS_IN_REGISTERS) {
            #pragma unroll
            for (int i = 0; i < TAPS; i++)
                own[i] = vector < p.vectors ? load_weights(weights + (i * p.vectors + vector) * LANES) : zeros();
        }
        #pragma unroll
        for (int i = 0; i < LANES; i++) constants[i] = no_channel();
        if (vector < p.vectors) load_constants(channel + vector * LANES, constants);
    }

    // Accumulators of the pixels from (out_y, out_x) on.
    __device__ __forceinline__ void convolve(const Params& p, const Element* input, int pitch, int apart, int n, int out_y, int out_x, int vector,
                                             int local, int sharer, Tile& acc) const {
        clear(acc);
        if (!STEPWISE) {
            add_image(p, input + (long long)n * apart, pitch, out_y, out_x, vector, local, 0, 0, acc);
            return;
        }
#if KERNEL_D
        const int frame = n % p.out_d, volume = n / p.out_d;
        const int stride = TRANSPOSED ? STRIDE_D : 1, first = TRANSPOSED ? (frame + p.pad_d) % STRIDE_D : 0;
#endif
        #pragma unroll 1
        for (int step = sharer; ; step += SHARERS) {
            const int band = step % BANDS;
#if KERNEL_D
            const int tap = first + step / BANDS * stride;
            if (tap >= KERNEL_D) break;
            const int z = TRANSPOSED ? (frame + p.pad_d - tap) / STRIDE_D : frame * STRIDE_D - p.pad_d + tap * DILATION_D;
            if (unsigned(z) >= unsigned(p.depth)) continue;
            const int image = volume * p.depth + z;
            const long long gaps = (long long)volume * p.gap;
#else
            const int tap = 0, image = n, gaps = 0;
            if (step >= BANDS) break;
#endif
            add_image(p, input + (long long)image * apart + gaps, pitch, out_y, out_x, vector, local, tap * BANDS + band, band * KERNEL_H * DILATION_H, acc);
        }
    }

    // Adds the products of an image with a step's part of the filter, which begins ``down`` rows below its first row.
    __device__ __forceinline__ void add_image(const Params& p, const Element* image, int pitch, int out_y, int out_x, int vector, int local, int step,
                                              int down, Tile& acc) const {
        const Weight* of_step = weights + (step * TAPS * p.vectors + vector) * LANES;
        const int top = (TRANSPOSED ? out_y / STRIDE_H : out_y * STRIDE_H) - p.pad_h + down, left = (TRANSPOSED ? out_x / STRIDE_W : out_x * STRIDE_W) - p.pad_w;
        image += vector * LANES;
        accumulate(
            acc,
            [&](int r, Input (&in)[COLUMNS]) {
                const int y = top + r;
                const Element* row = image + (long long)y * p.width * pitch;
                #pragma unroll
                for (int c = 0; c < COLUMNS; c++) {
                    const int x = left + c;
                    in[c] = no_input(p.outside);
                    if (unsigned(y) < unsigned(p.height) && unsigned(x) < unsigned(p.width)) in[c] = load_input(row + x * pitch);
                }
            },
            [&](int tap) {
                if (WEIGHTS_IN_REGISTERS) return own[WEIGHTS_IN_REGISTERS ? tap : 0];
                return WEIGHTS_IN_SHARED ? shared[tap * p.block_vectors + local] : load_weights(of_step + tap * p.vectors * LANES);
            });
    }
};

extern "C" __global__ void __launch_bounds__(MAX_THREADS, MIN_BLOCKS) depthwise(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) u8 shared[];
    grid_launch_dependents();
    const u32 threads = blockDim.x / SHARERS, sharer = SHARERS > 1 ? threadIdx.x / threads : 0, thread = threadIdx.x - sharer * threads;
    const int local = thread % p.block_vectors, strip = thread / p.block_vectors;
    const int vector = blockIdx.x * p.block_vectors + local;
    const int tile_x = blockIdx.y % p.tiles_x, tile_y = blockIdx.y / p.tiles_x, n = blockIdx.z;
    const int out_x = (tile_x * p.strips_x + strip % p.strips_x) * TILE_W;
    const int out_y = (tile_y * p.strips_y + strip / p.strips_x) * TILE_H;
    bool live = vector < p.vectors && out_x < p.out_w && out_y < p.out_h;

    Vector* shared_weights = reinterpret_cast<Vector*>(shared);
    const Filter filter(p, p.weights, p.channel, shared_weights, vector);
#if BESIDE
    const Filter second(p, p.second_weights, p.second_channel, shared_weights + TAPS * p.block_vectors, vector);
#endif
    if (WEIGHTS_IN_SHARED) __syncthreads();
    grid_dependency_wait();

    Tile acc;
    float sum[LANES];
    const Output target = {p.output, p.residual, p.out_h, p.out_w, p.out, p.added, &p.requantize};
    if (live) filter.convolve(p, p.input, p.pitch, p.image, n, out_y, out_x, vector, local, sharer, acc);
#if SHARERS > 1
    // [sharers but the first][accumulators][threads of a sharer]
    float* sums = reinterpret_cast<float*>(shared) + thread;
    __syncthreads();                               // the weights have been read
    #pragma unroll
    for (int i = 0; i < SUMS; i++)
        if (sharer > 0) sums[((sharer - 1) * SUMS + i) * threads] = (&acc[0][0][0])[i];
    __syncthreads();
    live = live && sharer == 0;
    for (int other = 0; live && other < SHARERS - 1; other++) {
        #pragma unroll
        for (int i = 0; i < SUMS; i++) (&acc[0][0][0])[i] += sums[(other * SUMS + i) * threads];
    }
#endif
    Addends added;
    asm volatile("" ::: "memory");                 // else the compiler loads the residual before the filter, and spills
    load_addends(target, added, live, n, out_y, out_x, vector);
#if BESIDE
    Tile beside;
    if (live) second.convolve(p, p.second, p.second_pitch, p.second_image, n, out_y, out_x, vector, local, 0, beside);
    #pragma unroll
    for (int i = 0; i < SUMS; i++)
        (&beside[0][0][0])[i] = epilogue_beside((&beside[0][0][0])[i], second.constants[i % LANES], 0.0f);
    finish(target, acc, added, filter.constants, sum, live, n, out_y, out_x, vector, &beside);
#else
    finish(target, acc, added, filter.constants, sum, live, n, out_y, out_x, vector);
#endif

#if SQUEEZE
    // The block's sum of each channel over its strips, in a fixed order.
    float* partial = reinterpret_cast<float*>(shared);          // [strips][block_vectors * LANES]
    const int channels = p.block_vectors * LANES, strips = p.strips_x * p.strips_y;
    __syncthreads();                               // the weights have been read
    #pragma unroll
    for (int i = 0; i < LANES; i++)
        if (sharer == 0) partial[strip * channels + local * LANES + i] = sum[i];
    __syncthreads();
    for (int c = threadIdx.x; c < channels; c += blockDim.x) {
        float total = 0.0f;
        for (int i = 0; i < strips; i++) total += partial[i * channels + c];
        const int channel = blockIdx.x * channels + c;
        if (channel < p.vectors * LANES) {
            if (SQUEEZE == 1)
                p.sums[((long long)n * gridDim.y + blockIdx.y) * p.vectors * LANES + channel] = total;
            else
                store_mean(p.means, (long long)n * p.vectors * LANES + channel, total, p.mean);
        }
    }
#endif
}
