// Depthwise filters on tensor cores: pixels times diagonal matrices. A matrix holds one tap's weights of eight channels.
#pragma once
#include "ptx.cuh"

#if defined(DTYPE_BF16)
#define MMA_KIND "f32.bf16.bf16.f32"
#else
#define MMA_KIND "f32.f16.f16.f32"
#endif
// 16 pixels x 8 channels of two taps, or of one.
DEVICE void tap_pair(float (&d)[4], const u32 (&a)[4], u32 first, u32 second) {
    asm("mma.sync.aligned.m16n8k16.row.col." MMA_KIND " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(first), "r"(second));
}
DEVICE void one_tap(float (&d)[4], u32 low, u32 high, u32 weight) {
    asm("mma.sync.aligned.m16n8k8.row.col." MMA_KIND " {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(low), "r"(high), "r"(weight));
}
