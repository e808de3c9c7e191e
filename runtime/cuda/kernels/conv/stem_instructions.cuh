// Instructions of the kernels of first convolutions (stem.cuh) that need assembly. FINAL_RELU: a last ReLU is part of the rounding.
#pragma once
#include "ptx.cuh"

// d = a b + c; c may be d. With fp32 factors: their bits, of tf32.
DEVICE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const float (&c)[4]) {
#if FACTOR_ITEM == 4
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
#elif defined(DTYPE_BF16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
#endif
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// A factor rounded to tf32, ties away from zero.
DEVICE u32 rounded_to_tf32(u32 bits) {
    u32 rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(bits)));
    return rounded;
}

// Four matrices of weights, or two. No memory clobber: weights do not change.
DEVICE void load_matrices(u32 address, u32 (&a)[2], u32 (&b)[2]) {
    asm("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(a[0]), "=r"(a[1]), "=r"(b[0]), "=r"(b[1]) : "r"(address));
}
DEVICE void load_matrices(u32 address, u32 (&a)[2]) {
    asm("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(a[0]), "=r"(a[1]) : "r"(address));
}

#if FACTOR_ITEM == 2
// Rounds two results; with FINAL_RELU, negative values become 0 (a NaN stays NaN).
DEVICE u32 pack_results(float low, float high) {
    u32 packed;
#if !FINAL_RELU
    packed = pack2(low, high);
#elif defined(DTYPE_BF16)
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#else
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#endif
    return packed;
}
#endif

template <int BYTES> DEVICE void copy_async(u32 to, const void* from) {
    if constexpr (BYTES == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
}
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
DEVICE void copies_landed() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }
DEVICE void store_zeros(u32 to, int bytes) {
    for (int i = 0; i < bytes; i += 4) asm volatile("st.shared.u32 [%0], %1;" ::"r"(to + i), "r"(0) : "memory");
}

#if FACTOR_ITEM == 2
// The element-wise maximum of two pairs; a NaN stays NaN.
DEVICE u32 larger(u32 a, u32 b) {
    u32 found;
#if defined(DTYPE_BF16)
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
#else
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
#endif
    return found;
}
#endif
