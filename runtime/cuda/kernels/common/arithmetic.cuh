// Arithmetic that the compiler does not find by itself. For kernels on ptx.cuh and for general ones.
#pragma once

// a * b + c between 0 and 1, in one instruction: where denormals are flushed, __saturatef(fmaf()) takes two.
DEVICE float saturated_fma(float a, float b, float c) {
    float value;
    asm("fma.rn.ftz.sat.f32 %0, %1, %2, %3;" : "=f"(value) : "f"(a), "f"(b), "f"(c));
    return value;
}
