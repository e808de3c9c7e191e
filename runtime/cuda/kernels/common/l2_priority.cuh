// Loads that give L2 a priority for keeping their lines.
#pragma once
#include "ptx.cuh"

DEVICE u64 evict_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
DEVICE u64 evict_normally() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

DEVICE void load_words(u32 (&word)[4], const void* at, u64 policy) {
    asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3]) : "l"(at), "l"(policy) : "memory");
}
DEVICE void load_words(u32 (&word)[2], const void* at, u64 policy) {
    asm volatile("ld.global.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;" : "=r"(word[0]), "=r"(word[1]) : "l"(at), "l"(policy) : "memory");
}
DEVICE void load_words(u32 (&word)[1], const void* at, u64 policy) {
    asm volatile("ld.global.L2::cache_hint.u32 %0, [%1], %2;" : "=r"(word[0]) : "l"(at), "l"(policy) : "memory");
}
