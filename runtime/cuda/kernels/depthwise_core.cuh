// What both depthwise kernels do in registers: TILE_H x TILE_W output pixels of LANES channels per thread, from rows of input vectors.
#pragma once
#include "vectors.cuh"
#include "generated.cuh"

constexpr int TAPS = KERNEL_H * KERNEL_W;
constexpr int ROWS = (TILE_H - 1) * STRIDE_H + (KERNEL_H - 1) * DILATION_H + 1;
constexpr int COLUMNS = (TILE_W - 1) * STRIDE_W + (KERNEL_W - 1) * DILATION_W + 1;
constexpr bool WEIGHTS_IN_SHARED = TAPS > 9;

typedef Packed<LANES> Vector;
typedef float Tile[TILE_H][TILE_W][LANES];

DEVICE Vector zeros() {
    Vector v;
    #pragma unroll
    for (int i = 0; i < LANES / 2; i++) v.word[i] = 0u;
    return v;
}

constexpr __device__ bool meets(int r, int t) {    // whether input row r meets a tap of output row t
    return r >= t * STRIDE_H && (r - t * STRIDE_H) % DILATION_H == 0 && (r - t * STRIDE_H) / DILATION_H < KERNEL_H;
}

// load(r, in) fills a row of COLUMNS vectors; weight(tap) gives a tap's. Each row is loaded once.
template <class Load, class Weight> DEVICE void accumulate(Tile& acc, const Load& load, const Weight& weight) {
    #pragma unroll
    for (int i = 0; i < TILE_H * TILE_W * LANES; i++) (&acc[0][0][0])[i] = 0.0f;
    #pragma unroll
    for (int r = 0; r < ROWS; r++) {
        bool used = false;                         // with a dilation or a stride some rows meet no tap
        #pragma unroll
        for (int t = 0; t < TILE_H; t++) used |= meets(r, t);
        if (!used) continue;
        Vector in[COLUMNS];
        load(r, in);
        #pragma unroll
        for (int t = 0; t < TILE_H; t++) {
            if (!meets(r, t)) continue;
            #pragma unroll
            for (int s = 0; s < KERNEL_W; s++) {
                const Vector w = weight((r - t * STRIDE_H) / DILATION_H * KERNEL_W + s);
                #pragma unroll
                for (int i = 0; i < LANES; i++) {
                    const float factor = element(w, i);
                    #pragma unroll
                    for (int x = 0; x < TILE_W; x++)
                        acc[t][x][i] = fmaf(element(in[x * STRIDE_W + s * DILATION_W], i), factor, acc[t][x][i]);
                }
            }
        }
    }
}

struct Output {
    u16* output;                                   // [n][out_h][out_w][channels]
    const u16* residual;                           // as output
    int out_h, out_w, vectors;
};

// Epilogue and store of what lies inside the image; adds up each channel for the squeeze.
DEVICE void finish(const Output& p, const Tile& acc, const float (&bias)[LANES], float (&sum)[LANES], bool live, int n, int out_y, int out_x,
                   int vector) {
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
}
