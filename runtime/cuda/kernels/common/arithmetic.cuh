// Instructions that the compiler does not select by itself. For kernels on ptx.cuh and for general kernels.
#pragma once

// a * b + c clamped to 0 .. 1, in one instruction: where denormals are flushed, __saturatef(fmaf()) takes two.
DEVICE float saturated_fma(float a, float b, float c) {
    float value;
    asm("fma.rn.ftz.sat.f32 %0, %1, %2, %3;" : "=f"(value) : "f"(a), "f"(b), "f"(c));
    return value;
}
