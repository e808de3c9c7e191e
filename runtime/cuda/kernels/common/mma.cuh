// Additions to ptx.cuh for kernels on mma.sync fed by cp.async: every GPU from sm_80 on.
#pragma once

// Copies the first ``bytes`` of WHOLE (4, 8 or 16) from global to shared memory, then zeros. The source must be an address even for 0 bytes.
template <int WHOLE> DEVICE void copy_or_zeros(u32 target, const void* source, int bytes) {
#ifdef INITCHECK                                   // initcheck and memcheck take every copy for a read of all bytes
    if (bytes < WHOLE) {
        for (int i = 0; i < WHOLE; i++) {
            const u32 value = i < bytes ? static_cast<const u8*>(source)[i] : 0;
            asm volatile("st.shared.u8 [%0], %1;" ::"r"(target + i), "r"(value) : "memory");
        }
        return;
    }
#endif
    if constexpr (WHOLE == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     ::"r"(target), "l"(__cvta_generic_to_global(source)), "r"(bytes) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                     ::"r"(target), "l"(__cvta_generic_to_global(source)), "n"(WHOLE), "r"(bytes) : "memory");
}
DEVICE void copy_16_or_zeros(u32 target, const void* source, int bytes) { copy_or_zeros<16>(target, source, bytes); }
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all of the thread's groups of copies except the last PENDING.
template <int PENDING> DEVICE void copies_wait_but() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

DEVICE void prefetch_l2(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(at))); }

// Counts one more arrival; returns the number before. Later arrivals see this thread's earlier writes.
DEVICE u32 count_arrival(u32* count) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(count) : "memory");
    return before;
}

DEVICE u32 rounded_to_tf32(u32 bits) {             // ties away from zero
    u32 rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(bits)));
    return rounded;
}

DEVICE float max_or_nan(float a, float b) {
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
    return most;
}

constexpr float LOG2_E = 1.4426950408889634f;
DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// a * b + c for pairs of 16-bit floats.
DEVICE u32 fma2(u32 a, u32 b, u32 c) {
    u32 d;
#if defined(DTYPE_BF16)
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
#else
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
#endif
    return d;
}

#if __CUDA_ARCH__ >= 890
// The low two floats of 8 bits (e4m3) as fp16.
DEVICE u32 float8_to_half(u32 word) {
    u32 pair;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, l;}" : "=r"(pair) : "r"(word));
    return pair;
}
#endif
