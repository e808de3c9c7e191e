// LayerNorm and RMSNorm of the rows of a stack of matrices [images][rows][length] where some tensors are transposed ("across"): neighbors
// in memory are neighbors in a column. 16-bit storage, fp32 statistics.
//
// A block takes ROWS rows of one image, a warp one row at a time. Tensors that lie across go through shared memory, where the tile is stored
// in rows. A global access covers eight rows of a column, and neighboring lanes take the next eight.
//
// generated.cuh defines OPERATION (0 layer norm, 1 RMS norm), VECTORS (accesses of eight elements per lane and row), ROWS, THREADS,
// HAS_ADD (the normalized row is input + addend, and the addend lies across; that sum is an output, in rows), INPUT_ACROSS (the addend is
// the input), OUTPUT_ACROSS, HAS_SCALE and HAS_BIAS.
#include "vectors.cuh"
#include "generated.cuh"

constexpr int LANES = 8, WARPS = THREADS / 32, OCTETS = ROWS / LANES;
static_assert(ROWS % LANES == 0 && ROWS % WARPS == 0 && (OCTETS & (OCTETS - 1)) == 0, "a tile's columns are whole vectors");

struct Across {
    long long image, column;                       // elements between images, and between columns
};

struct Params {
    const u16* input;                              // in rows, without gaps
    const u16* addend;
    const float* scale;                            // [length]
    const float* bias;                             // [length]
    u16* output;
    u16* sum;
    int rows, length, tiles;                       // of an image; tiles: ceil(rows / ROWS)
    float epsilon, inverse_length;
    Across addend_at, output_at;
};

extern __shared__ __align__(16) u16 tile[];        // [ROWS][length + 8]

DEVICE float warp_sum(float x) {
    #pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}

// Copies the addend's columns into the tile's rows. Rows beyond the image are not written.
DEVICE void gather(const Params& p, const u16* from, int rows, int pitch) {
    for (int i = threadIdx.x; i < p.length * OCTETS; i += THREADS) {
        const int column = i / OCTETS, row = i % OCTETS * LANES;
        const u16* at = from + column * p.addend_at.column + row;
        if (row + LANES <= rows) {
            const Packed<LANES> v = load_packed<LANES>(at);
            #pragma unroll
            for (int k = 0; k < LANES; k++) tile[(row + k) * pitch + column] = u16(v.word[k / 2] >> (k % 2 * 16));
        } else {
            for (int k = 0; row + k < rows; k++) tile[(row + k) * pitch + column] = at[k];
        }
    }
}

// Copies the tile's rows into the output's columns, two at a time.
DEVICE void scatter(const Params& p, u16* to, int rows, int pitch) {
    for (int i = threadIdx.x; i < p.length / 2 * OCTETS; i += THREADS) {
        const int column = i / OCTETS * 2, row = i % OCTETS * LANES;
        u32 pairs[LANES];                          // both columns of each row
        #pragma unroll
        for (int k = 0; k < LANES; k++) pairs[k] = *reinterpret_cast<const u32*>(tile + (row + k) * pitch + column);
        u16* at = to + column * p.output_at.column + row;
        if (row + LANES <= rows) {
            Packed<LANES> first, second;
            #pragma unroll
            for (int k = 0; k < LANES / 2; k++) {
                first.word[k] = __byte_perm(pairs[2 * k], pairs[2 * k + 1], 0x5410);
                second.word[k] = __byte_perm(pairs[2 * k], pairs[2 * k + 1], 0x7632);
            }
            store_packed(at, first);
            store_packed(at + p.output_at.column, second);
        } else {
            for (int k = 0; row + k < rows; k++) at[k] = u16(pairs[k]), at[k + p.output_at.column] = u16(pairs[k] >> 16);
        }
    }
}

// Normalizes one row, in the registers of a warp: statistics, then the result in place.
DEVICE void normalize(const Params& p, float (&x)[VECTORS][LANES], int lane) {
    float total = 0.0f;
    #pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        #pragma unroll
        for (int i = 0; i < LANES; i++) total += OPERATION == 0 ? x[v][i] : x[v][i] * x[v][i];
    }
    float shift = 0.0f, squares = warp_sum(total);
    if (OPERATION == 0) {
        shift = squares * p.inverse_length;
        squares = 0.0f;
        #pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            if ((v * 32 + lane) * LANES >= p.length) continue;
            #pragma unroll
            for (int i = 0; i < LANES; i++) squares = fmaf(x[v][i] - shift, x[v][i] - shift, squares);
        }
        squares = warp_sum(squares);
    }
    const float factor = rsqrtf(squares * p.inverse_length + p.epsilon);
    #pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int column = (v * 32 + lane) * LANES;
        if (column >= p.length) continue;
        float scale[LANES], bias[LANES];
        if (HAS_SCALE) load_floats<LANES>(scale, p.scale + column);
        if (HAS_BIAS) load_floats<LANES>(bias, p.bias + column);
        #pragma unroll
        for (int i = 0; i < LANES; i++) {
            x[v][i] = (x[v][i] - shift) * factor;
            if (HAS_SCALE) x[v][i] *= scale[i];
            if (HAS_BIAS) x[v][i] += bias[i];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) rows_across(const __grid_constant__ Params p) {
    grid_launch_dependents();
    const int image = blockIdx.x / p.tiles, first = blockIdx.x % p.tiles * ROWS, rows = min(ROWS, p.rows - first);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pitch = p.length + LANES;
    const long long start = ((long long)image * p.rows + first) * p.length;
    grid_dependency_wait();
    if (HAS_ADD || INPUT_ACROSS) {
        gather(p, p.addend + image * p.addend_at.image + first, rows, pitch);
        __syncthreads();
    }
    for (int row = warp; row < rows; row += WARPS) {
        float x[VECTORS][LANES];
        #pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            const int column = (v * 32 + lane) * LANES;
            Packed<LANES> raw = {}, other = {};
            if (column < p.length) {
                if (!INPUT_ACROSS) raw = load_packed<LANES>(p.input + start + (long long)row * p.length + column);
                if (HAS_ADD || INPUT_ACROSS) other = load_packed<LANES>(tile + row * pitch + column);
            }
            #pragma unroll
            for (int i = 0; i < LANES; i++) x[v][i] = INPUT_ACROSS ? element(other, i) : element(raw, i) + (HAS_ADD ? element(other, i) : 0.0f);
            if (HAS_ADD && column < p.length) store_packed(p.sum + start + (long long)row * p.length + column, pack<LANES>(x[v]));
        }
        normalize(p, x, lane);
        #pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            const int column = (v * 32 + lane) * LANES;
            if (column >= p.length) continue;
            u16* at = OUTPUT_ACROSS ? tile + row * pitch + column : p.output + start + (long long)row * p.length + column;
            store_packed(at, pack<LANES>(x[v]));
        }
    }
    if (OUTPUT_ACROSS) {
        __syncthreads();
        scatter(p, p.output + image * p.output_at.image + first, rows, pitch);
    }
}
