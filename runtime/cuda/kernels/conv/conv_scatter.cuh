// Store of results whose channels are blocks of pixels (a transposed convolution by sub-pixels).
#pragma once
#include "ptx.cuh"

// Channel (dy * stride_w + dx) * channels + c of pixel (h, w) is channel c of pixel (h * stride_h + dy - crop_h, w * stride_w + dx -
// crop_w) of an image of height x width, if that pixel is inside. Strides of the images are in elements.
struct Scatter {
    int stride_h, stride_w, crop_h, crop_w, channels, height, width;
    int image, row, column;
};

#if SCATTER
// Where neighboring channels of pixel ``from`` go, which belong to one pixel of its block; null: nowhere.
DEVICE u8* scattered(const Scatter& s, u8* output, int item, int channel, int from, int out_h, int out_w) {
    const int place = channel / s.channels, row = from / out_w;
    const int y = row % out_h * s.stride_h + place / s.stride_w - s.crop_h, x = from % out_w * s.stride_w + place % s.stride_w - s.crop_w;
    if (u32(y) >= u32(s.height) || u32(x) >= u32(s.width)) return nullptr;
    return output + ((long long)(row / out_h) * s.image + (long long)y * s.row + (long long)x * s.column + channel % s.channels) * item;
}

// Stores rows of 64 finished 16-bit channels of a warpgroup's pixels from shared memory (128 bytes, with TMA's swizzle): eight threads per
// row. locate(row, n, h, w) sets the pixel of a row; it returns false for a row without a pixel.
template <class Locate>
DEVICE void scatter_rows(const Scatter& s, u8* output, u32 tile, int rows, int first_channel, int all_channels, int thread, const Locate& locate) {
    const int chunk = thread % 8, channel = first_channel + chunk * 8;
    if (channel >= all_channels) return;
    const int place = channel / s.channels, c = channel % s.channels;
    const int dy = place / s.stride_w - s.crop_h, dx = place % s.stride_w - s.crop_w;
    for (int row = thread / 8; row < rows; row += 16) {
        int n, h, w;
        if (!locate(row, n, h, w)) continue;
        const int y = h * s.stride_h + dy, x = w * s.stride_w + dx;
        if (u32(y) >= u32(s.height) || u32(x) >= u32(s.width)) continue;
        const long long at = (long long)n * s.image + (long long)y * s.row + (long long)x * s.column + c;
        *reinterpret_cast<uint4*>(output + at * 2) = shared_load16(tile + row * 128 + ((chunk ^ (row & 7)) << 4));
    }
}
#endif
