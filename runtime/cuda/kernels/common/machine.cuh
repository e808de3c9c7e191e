// The instructions that general.cuh needs: conversions of 16-bit floats, dependent launch, and barriers of blocks. The rest of general.cuh is
// plain C++, so tests can run the generated kernels on a processor, with processor versions of these few functions.
#pragma once
#include "arithmetic.cuh"
#include "grid_meeting.cuh"

DEVICE float half_to_float(u16 bits) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(bits));
    return out;
}
DEVICE u16 float_to_half(float v) {
    u16 out;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(v));
    return out;
}
DEVICE u16 double_to_half(double v) {
    u16 out;
    asm("cvt.rn.f16.f64 %0, %1;" : "=h"(out) : "d"(v));
    return out;
}
DEVICE u16 float_to_bfloat(float v) {
    u16 out;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(v));
    return out;
}

// The maxima of two pairs of 16-bit floats; a NaN wins.
DEVICE u32 max2_f16(u32 a, u32 b) {
    u32 best;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(best) : "r"(a), "r"(b));
    return best;
}
DEVICE u32 max2_bf16(u32 a, u32 b) {
    u32 best;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(best) : "r"(a), "r"(b));
    return best;
}

DEVICE void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
DEVICE void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

