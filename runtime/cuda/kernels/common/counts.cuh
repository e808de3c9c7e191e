// Counters in global memory by which blocks of a grid signal one another. For kernels on ptx.cuh and for general kernels.
#pragma once

DEVICE u32 load_acquire(const u32* count) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(count) : "memory");
    return value;
}
DEVICE void add_release(u32* count, u32 value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(count), "r"(value) : "memory");
}
