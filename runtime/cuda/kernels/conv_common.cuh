// What the two Hopper convolution kernels share: the parameter block and the epilogue on wgmma's accumulators.
#pragma once
#include "ptx.cuh"
#include "generated.cuh"

struct Source {
    int channel_blocks, taps_h, taps_w, dilation_h, dilation_w, stride_h, stride_w, pad_h, pad_w;
};

struct Params {
    TensorMap weights, pixels0, pixels1, output, residual;
    const float* bias;
    u16* output_pointer;          // a cluster's reduction stores and reads these directly
    const u16* residual_pointer;
    int channels, pixel_count, out_h, out_w;
    int channel_tiles, tiles, k_steps, reverse;
    Source source[2];
};

// Accumulators of 16 channels (this warp's rows: lane / 4 and + 8) x 16 pixels -> epilogue -> 16-bit [pixel][channel] rows.
// ``address`` is this lane's row of the four 8x8 matrices: lanes 0-7 and 8-15 name pixels 0-7 of channels 0-7 and 8-15, lanes
// 16-31 pixels 8-15. With HAS_RESIDUAL the rows hold the residual before, and are overwritten in place.
DEVICE void finish_16_pixels(u32 address, const float* v, const float (&bias)[2]) {
    u32 r0 = 0, r1 = 0, r2 = 0, r3 = 0;
    if (HAS_RESIDUAL) ldmatrix_x4_trans(address, r0, r1, r2, r3);
    stmatrix_x4_trans(address,
        pack2(epilogue(v[0], bias[0], low_float(r0)), epilogue(v[1], bias[0], high_float(r0))),
        pack2(epilogue(v[2], bias[1], low_float(r1)), epilogue(v[3], bias[1], high_float(r1))),
        pack2(epilogue(v[4], bias[0], low_float(r2)), epilogue(v[5], bias[0], high_float(r2))),
        pack2(epilogue(v[6], bias[1], low_float(r3)), epilogue(v[7], bias[1], high_float(r3))));
}

// The same of eight pixels: lanes 0-15 name the rows (16-31 repeat valid ones).
DEVICE void finish_8_pixels(u32 address, const float* v, const float (&bias)[2]) {
    u32 r0 = 0, r1 = 0;
    if (HAS_RESIDUAL) ldmatrix_x2_trans(address, r0, r1);
    stmatrix_x2_trans(address,
        pack2(epilogue(v[0], bias[0], low_float(r0)), epilogue(v[1], bias[0], high_float(r0))),
        pack2(epilogue(v[2], bias[1], low_float(r1)), epilogue(v[3], bias[1], high_float(r1))));
}
