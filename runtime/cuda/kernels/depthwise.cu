// Depthwise convolution, NHWC, 16-bit storage, fp32 accumulation. Bound by memory: each input element should leave DRAM once.
//
// A thread computes TILE_H x TILE_W output pixels of LANES (4 or 8) channels. It walks the input rows it needs once, top to bottom; a row's
// vectors serve all taps and all output rows that touch it. A block takes block_vectors x strips_x x strips_y such strips, so that
// the rows and columns that neighbours share are found in L1.
//
// generated.cuh defines LANES, KERNEL_H, KERNEL_W, STRIDE_H, STRIDE_W, DILATION_H, DILATION_W, TILE_H, TILE_W, MAX_THREADS, MIN_BLOCKS,
// HAS_RESIDUAL, SQUEEZE (0 none, 1 partial sums, 2 finished means) and epilogue().
#include "vectors.cuh"
#include "generated.cuh"

constexpr int TAPS = KERNEL_H * KERNEL_W;
constexpr int ROWS = (TILE_H - 1) * STRIDE_H + (KERNEL_H - 1) * DILATION_H + 1;
constexpr int COLUMNS = (TILE_W - 1) * STRIDE_W + (KERNEL_W - 1) * DILATION_W + 1;
constexpr bool WEIGHTS_IN_SHARED = TAPS > 9;

struct Params {
    const u16* input;
    u16* output;
    const u16* weights;                            // [taps][channels]
    const float* bias;                             // [channels]
    const u16* residual;                           // as output
    float* sums;                                   // SQUEEZE 1: [n][tiles][channels]
    u16* means;                                    // SQUEEZE 2: [n][channels]
    int height, width, vectors, out_h, out_w, pad_h, pad_w;
    int block_vectors, strips_x, strips_y, tiles_x;
    float mean_scale;
};

typedef Packed<LANES> Vector;
DEVICE Vector zeros() {
    Vector v;
    #pragma unroll
    for (int i = 0; i < LANES / 2; i++) v.word[i] = 0u;
    return v;
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS, MIN_BLOCKS) depthwise(const Params p) {
    extern __shared__ __align__(16) u8 shared[];
    grid_launch_dependents();
    const int local = threadIdx.x % p.block_vectors, strip = threadIdx.x / p.block_vectors;
    const int vector = blockIdx.x * p.block_vectors + local;
    const int tile_x = blockIdx.y % p.tiles_x, tile_y = blockIdx.y / p.tiles_x, n = blockIdx.z;
    const int out_x = (tile_x * p.strips_x + strip % p.strips_x) * TILE_W;
    const int out_y = (tile_y * p.strips_y + strip / p.strips_x) * TILE_H;
    const bool live = vector < p.vectors && out_x < p.out_w && out_y < p.out_h;

    // Weights and bias depend on no other kernel.
    Vector* shared_weights = reinterpret_cast<Vector*>(shared);
    Vector own_weights[WEIGHTS_IN_SHARED ? 1 : TAPS];
    float bias[LANES];
    if (WEIGHTS_IN_SHARED) {
        for (int i = threadIdx.x; i < TAPS * p.block_vectors; i += blockDim.x) {
            const int v = blockIdx.x * p.block_vectors + i % p.block_vectors;
            shared_weights[i] = v < p.vectors ? load_packed<LANES>(p.weights + ((i / p.block_vectors) * p.vectors + v) * LANES) : zeros();
        }
        __syncthreads();
    } else {
        #pragma unroll
        for (int i = 0; i < TAPS; i++)
            own_weights[i] = vector < p.vectors ? load_packed<LANES>(p.weights + (i * p.vectors + vector) * LANES) : zeros();
    }
    #pragma unroll
    for (int i = 0; i < LANES; i++) bias[i] = 0.0f;
    if (vector < p.vectors) load_floats<LANES>(bias, p.bias + vector * LANES);
    grid_dependency_wait();

    float acc[TILE_H][TILE_W][LANES];
    #pragma unroll
    for (int i = 0; i < TILE_H * TILE_W * LANES; i++) (&acc[0][0][0])[i] = 0.0f;
    if (live) {
        const int top = out_y * STRIDE_H - p.pad_h, left = out_x * STRIDE_W - p.pad_w;
        const u16* image = p.input + ((long long)n * p.height * p.width * p.vectors + vector) * LANES;
        #pragma unroll
        for (int r = 0; r < ROWS; r++) {
            bool used = false;                     // with a dilation or a stride some rows meet no tap
            #pragma unroll
            for (int t = 0; t < TILE_H; t++)
                used |= r >= t * STRIDE_H && (r - t * STRIDE_H) % DILATION_H == 0 && (r - t * STRIDE_H) / DILATION_H < KERNEL_H;
            if (!used) continue;
            const int y = top + r;
            const bool row_inside = unsigned(y) < unsigned(p.height);
            const u16* row = image + (long long)y * p.width * p.vectors * LANES;
            Vector in[COLUMNS];
            #pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                const int x = left + c;
                in[c] = zeros();
                if (row_inside && unsigned(x) < unsigned(p.width)) in[c] = load_packed<LANES>(row + x * p.vectors * LANES);
            }
            #pragma unroll
            for (int pair = 0; pair < LANES / 2; pair++) {
                float low[COLUMNS], high[COLUMNS];
                #pragma unroll
                for (int c = 0; c < COLUMNS; c++) {
                    low[c] = low_float(in[c].word[pair]);
                    high[c] = high_float(in[c].word[pair]);
                }
                #pragma unroll
                for (int t = 0; t < TILE_H; t++) {
                    const int offset = r - t * STRIDE_H;
                    if (offset < 0 || offset % DILATION_H || offset / DILATION_H >= KERNEL_H) continue;
                    const int tap_h = offset / DILATION_H;
                    #pragma unroll
                    for (int s = 0; s < KERNEL_W; s++) {
                        const int tap = tap_h * KERNEL_W + s;
                        const u32 w = WEIGHTS_IN_SHARED ? shared_weights[tap * p.block_vectors + local].word[pair]
                                                        : own_weights[WEIGHTS_IN_SHARED ? 0 : tap].word[pair];
                        const float w0 = low_float(w), w1 = high_float(w);
                        #pragma unroll
                        for (int x = 0; x < TILE_W; x++) {
                            const int c = x * STRIDE_W + s * DILATION_W;
                            acc[t][x][2 * pair] = fmaf(low[c], w0, acc[t][x][2 * pair]);
                            acc[t][x][2 * pair + 1] = fmaf(high[c], w1, acc[t][x][2 * pair + 1]);
                        }
                    }
                }
            }
        }
    }

    float sum[LANES];
    #pragma unroll
    for (int i = 0; i < LANES; i++) sum[i] = 0.0f;
    #pragma unroll
    for (int t = 0; t < TILE_H; t++) {
        #pragma unroll
        for (int x = 0; x < TILE_W; x++) {
            if (!live || out_y + t >= p.out_h || out_x + x >= p.out_w) continue;
            const long long at = ((((long long)n * p.out_h + out_y + t) * p.out_w + out_x + x) * p.vectors + vector) * LANES;
            Vector r = zeros();
            if (HAS_RESIDUAL) r = load_packed<LANES>(p.residual + at);
            float y[LANES];
            #pragma unroll
            for (int i = 0; i < LANES; i++) {
                y[i] = epilogue(acc[t][x][i], bias[i], element(r, i));
                sum[i] += y[i];
            }
            store_packed(p.output + at, pack<LANES>(y));
        }
    }

#if SQUEEZE
    // The block's sums of each channel over its strips, in a fixed order.
    float* partial = reinterpret_cast<float*>(shared);          // [strips][block_vectors * LANES]
    const int channels = p.block_vectors * LANES, strips = p.strips_x * p.strips_y;
    __syncthreads();                               // the weights have been read
    #pragma unroll
    for (int i = 0; i < LANES; i++) partial[strip * channels + local * LANES + i] = sum[i];
    __syncthreads();
    for (int c = threadIdx.x; c < channels; c += blockDim.x) {
        float total = 0.0f;
        for (int i = 0; i < strips; i++) total += partial[i * channels + c];
        const int channel = blockIdx.x * channels + c;
        if (channel < p.vectors * LANES) {
            if (SQUEEZE == 1)
                p.sums[((long long)n * gridDim.y + blockIdx.y) * p.vectors * LANES + channel] = total;
            else
                p.means[(long long)n * p.vectors * LANES + channel] = pack1(total * p.mean_scale);
        }
    }
#endif
}

struct FinishParams {
    const float* sums;                             // [n][tiles][channels]
    u16* means;                                    // [n][channels]
    int tiles, channels;
    float mean_scale;
};

// Adds the tiles' sums in order: fp32 -> 16-bit means.
extern "C" __global__ void __launch_bounds__(128) squeeze_finish(const FinishParams p) {
    grid_launch_dependents();
    grid_dependency_wait();
    const int channel = blockIdx.x * 128 + threadIdx.x, n = blockIdx.y;
    if (channel >= p.channels) return;
    const float* sums = p.sums + (long long)n * p.tiles * p.channels + channel;
    float total = 0.0f;
    #pragma unroll 8
    for (int i = 0; i < p.tiles; i++) total += sums[(long long)i * p.channels];
    p.means[(long long)n * p.channels + channel] = pack1(total * p.mean_scale);
}
