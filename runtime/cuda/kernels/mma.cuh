// What kernels on mma.sync fed by cp.async need beside ptx.cuh: every GPU from sm_80 on.
#pragma once

// 16 bytes from global to shared memory, or as many zeros (the source is an address all the same).
DEVICE void copy_16_or_zeros(u32 target, const void* source, bool live) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(target), "l"(__cvta_generic_to_global(source)), "r"(live ? 16 : 0) : "memory");
}
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all of the thread's groups of copies but the last so many.
template <int PENDING> DEVICE void copies_wait_but() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
