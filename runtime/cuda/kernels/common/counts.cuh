// Counts in global memory that blocks of a grid tell one another by. For kernels on ptx.cuh and for general ones.
#pragma once

DEVICE u32 load_acquire(const u32* count) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(count) : "memory");
    return value;
}
DEVICE void add_release(u32* count, u32 value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(count), "r"(value) : "memory");
}
