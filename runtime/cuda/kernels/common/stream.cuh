// Loads of weights that are read once. They bypass L1. Where L2 cannot hold the weights, they do not evict data that is read in every
// run.
//
// generated.cuh defines PASSING (the weights do not fit L2).
#pragma once

struct Stream {
#if PASSING
    u64 policy;
    __device__ __forceinline__ Stream() { asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy)); }
    __device__ __forceinline__ uint4 operator()(const void* at) const {
        uint4 v;
        asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at), "l"(policy));
        return v;
    }
    // Copies 16 bytes to shared memory; copies_commit() closes the group to wait for.
    __device__ __forceinline__ void copy(u32 target, const void* source) const {
        asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2;"
                     ::"r"(target), "l"(__cvta_generic_to_global(source)), "l"(policy) : "memory");
    }
#else
    __device__ __forceinline__ uint4 operator()(const void* at) const {
        uint4 v;
        asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
        return v;
    }
    __device__ __forceinline__ void copy(u32 target, const void* source) const {
        asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;"
                     ::"r"(target), "l"(__cvta_generic_to_global(source)) : "memory");
    }
#endif
};
