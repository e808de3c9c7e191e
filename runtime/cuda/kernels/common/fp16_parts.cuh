// fp32 numbers, times a power of two, as the sums of two numbers of fp16: a first part, rounded to 11 bits, and the rest.
#pragma once

// The exponent of the largest of some numbers, which chooses their scale: it brings this number to 2^14 or more, below 2^15.
DEVICE u32 exponent_of(float most) { return max(__float_as_uint(most) >> 23 & 0xff, 15u); }
DEVICE float scale_of(u32 exponent) { return __uint_as_float((268 - exponent) << 23); }
DEVICE float inverse_scale_of(u32 exponent) { return __uint_as_float((exponent - 14) << 23); }

// Two numbers times ``scale``, divided.
DEVICE void divide_pair(float x, float y, float scale, u32& first, u32& rest) {
    first = pack2(x * scale, y * scale);
    rest = pack2(fmaf(x, scale, -low_half(first)), fmaf(y, scale, -high_half(first)));
}
