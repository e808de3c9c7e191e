// The rows of a patch that a warp's strips of 16 pixels meet, for kernels that load each row once for all their strips. generated.cuh
// defines STRIPS, STRIP_W, STRIDE_H, DILATION_H and KERNEL_H.
#pragma once

constexpr int STRIP_H = 16 / STRIP_W, ROWS = (STRIPS - 1) * STRIP_H * STRIDE_H + (KERNEL_H - 1) * DILATION_H + 1;

constexpr __device__ bool meets(int row, int strip) {      // whether a row of the patch meets a tap of the strip's first row
    const int below = row - strip * STRIP_H * STRIDE_H;
    return below >= 0 && below % DILATION_H == 0 && below / DILATION_H < KERNEL_H;
}
constexpr __device__ bool used(int row) {
    for (int m = 0; m < STRIPS; m++)
        if (meets(row, m)) return true;
    return false;
}
