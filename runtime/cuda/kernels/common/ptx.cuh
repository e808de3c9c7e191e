// Thin wrappers of the PTX instructions the kernels use. No CUDA header is needed: NVRTC compiles these alone.
// PTX ISA 8.0+: sections "mbarrier", "cp.async.bulk.tensor", "wgmma", "griddepcontrol", "barrier.cluster".
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE static __device__ __forceinline__

// A CUtensorMap, opaque, as the driver encodes it. It is a __grid_constant__ parameter, so TMA may read it in place.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

#include "arithmetic.cuh"
#include "ldmatrix.cuh"

// ---- element types: 16-bit storage, fp32 arithmetic -------------------------------------------------------------

DEVICE float low_half(u32 packed) {
    float value;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(value) : "r"(packed));
    return value;
}
DEVICE float high_half(u32 packed) {
    float value;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(value) : "r"(packed));
    return value;
}
#if defined(DTYPE_BF16)
DEVICE u32 pack2(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
DEVICE float low_float(u32 packed) { return __uint_as_float(packed << 16); }
DEVICE float high_float(u32 packed) { return __uint_as_float(packed & 0xffff0000u); }
DEVICE u32 relu2(u32 packed) {                     // a NaN stays NaN
    asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(packed) : "r"(0u));
    return packed;
}
#else
DEVICE u32 pack2(float low, float high) {
    u32 packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
DEVICE float low_float(u32 packed) { return low_half(packed); }
DEVICE float high_float(u32 packed) { return high_half(packed); }
DEVICE u32 relu2(u32 packed) {                     // a NaN stays NaN
    asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(packed) : "r"(0u));
    return packed;
}
#endif
DEVICE float tanh_fast(float x) {                  // accurate to 11 bits
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// x / (1 + exp(-x)) of two elements. 1 / a and 1 / b come from the reciprocal of a * b: three special-function instructions instead of
// four. The exponent is bounded at 40: beyond it the result is below the least 16-bit value either way. A NaN stays NaN, by the product.
DEVICE void silu_pair(float& x, float& y) {
    const float a = 1.0f + __expf(fminf(-x, 40.0f)), b = 1.0f + __expf(fminf(-y, 40.0f)), r = __fdividef(1.0f, a * b);
    x *= b * r;
    y *= a * r;
}
DEVICE u16 pack1(float value) { return static_cast<u16>(pack2(value, 0.0f)); }
DEVICE float unpack1(u16 bits) { return low_float(bits); }

// An fp32 number rounded to the 11 significant bits of tf32, ties away from zero. A NaN may become zero; the number minus this is NaN then.
DEVICE u32 first_part(u32 bits) { return (bits + 0x1000u) & 0xffffe000u; }
// Replaces a value's bits by those of its first part; returns the rest.
DEVICE u32 divide(u32& bits) {
    const u32 whole = bits;
    bits = first_part(whole);
    return __float_as_uint(__uint_as_float(whole) - __uint_as_float(bits));
}

// ---- in-kernel time marks, for finding where a short kernel's time goes (compile with -DPROFILE) ---------------------

#ifdef PROFILE
__device__ u64 profile_log[2048 * 16];             // nanoseconds: [block][mark]
DEVICE void mark(int index) {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    if (blockIdx.x < 2048) profile_log[blockIdx.x * 16 + index] = now;
}
#else
DEVICE void mark(int) {}
#endif

// ---- programmatic dependent launch -------------------------------------------------------------------------------

// Before this call a kernel may read only constants (weights, biases) and write nothing: buffers are reused across steps.
DEVICE void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void grid_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#include "counts.cuh"

// ---- shared memory -------------------------------------------------------------------------------------------------

DEVICE void shared_load(u32 address, float& v) { asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory"); }
DEVICE void shared_load(u32 address, float2& v) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
}
DEVICE void shared_load(u32 address, float4& v) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
}
DEVICE void shared_load(u32 address, int4& v) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
}
DEVICE uint4 shared_load16(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
}
DEVICE void shared_store16(u32 address, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE void shared_store(u32 address, float v) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory"); }
DEVICE void shared_store(u32 address, uint2 v) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
}
DEVICE void shared_store(u32 address, int v) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(v) : "memory"); }

#if __CUDA_ARCH__ >= 900

// True on one lane of a converged warp. Unlike with lane == 0, the compiler knows that a single lane is active, and issues TMA from
// uniform registers without a loop over lanes.
DEVICE bool elect_one() {
    u32 elected;
    asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(elected));
    return elected;
}

// Moves registers between warpgroups; COUNT: registers per thread afterward. All warps of the warpgroup call it, in a branch of their own.
template <int COUNT> DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// ---- mbarrier ------------------------------------------------------------------------------------------------------

DEVICE void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
DEVICE bool barrier_try(u32 barrier, u32 parity) {
    u32 done;
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, 0x989680; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    return done;
}
DEVICE void barrier_wait(u32 barrier, u32 parity) {
#ifdef BARRIER_TRAP  // a protocol fault ends the kernel with an error instead of hanging the GPU
    for (int tries = 0; !barrier_try(barrier, parity); tries++)
        if (tries > 200) __trap();
#else
    while (!barrier_try(barrier, parity)) {}
#endif
}
// The same for a barrier at which other blocks of the cluster arrive: their stores are visible afterward.
DEVICE void barrier_wait_cluster(u32 barrier, u32 parity) {
    u32 done = 0;
    for (int tries = 0; !done; tries++) {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2, 0x989680; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
#ifdef BARRIER_TRAP
        if (tries > 200) __trap();
#endif
    }
}
DEVICE void named_barrier(u32 id, u32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEVICE void named_barrier_arrive(u32 id, u32 threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
// Whether ``own`` is true in any of the threads at a barrier.
DEVICE bool any_thread(u32 barrier, u32 threads, bool own) {
    u32 any;
    asm volatile("{.reg .pred p, q; setp.ne.b32 p, %3, 0; bar.red.or.pred q, %1, %2, p; selp.u32 %0, 1, 0, q;}"
                 : "=r"(any) : "r"(barrier), "r"(threads), "r"(u32(own)) : "memory");
    return any != 0;
}

// ---- clusters ------------------------------------------------------------------------------------------------------

DEVICE u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// For use where the peers need not see any ordinary store.
DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// For warps whose lanes arrive at different times.
DEVICE void cluster_wait_together() {
    __syncwarp();
    cluster_wait();
}
DEVICE u32 cluster_map(u32 address, u32 rank) {
    u32 remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}
// Arrives at a barrier of any block of the cluster (an address from cluster_map). For threads whose writes no other thread reads: a release
// over the cluster would be a fence of the whole GPU.
DEVICE void cluster_barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// A 16-byte store to a block of the cluster, counted by that block's barrier (both addresses from cluster_map).
DEVICE void cluster_store_async(u32 address, u32 barrier, const float* v) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 ::"r"(address), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(barrier) : "memory");
}
DEVICE void cluster_store_async(u32 address, u32 barrier, const int* v) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
                 ::"r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]), "r"(barrier) : "memory");
}
DEVICE void cluster_store_async(u32 address, u32 barrier, u32 v) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address), "r"(v), "r"(barrier) : "memory");
}
DEVICE void cluster_store_async(u32 address, u32 barrier, float2 v) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
                 ::"r"(address), "f"(v.x), "f"(v.y), "r"(barrier) : "memory");
}
// The same, to the place and barrier at this block's ``address`` and ``barrier`` in block ``rank``. Such stores need no fence: the release of
// a cluster barrier waits for all memory of the GPU.
template <class V> DEVICE void cluster_send(u32 address, u32 barrier, u32 rank, const V& v) {
    cluster_store_async(cluster_map(address, rank), cluster_map(barrier, rank), v);
}

// ---- TMA -----------------------------------------------------------------------------------------------------------

DEVICE void tma_prefetch(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<u64>(map)) : "memory");
}
DEVICE void tma_load_2d(u32 target, const TensorMap* map, u32 barrier, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 ::"r"(target), "l"(reinterpret_cast<u64>(map)), "r"(barrier), "r"(x), "r"(y) : "memory");
}
DEVICE void tma_load_4d(u32 target, const TensorMap* map, u32 barrier, int a, int b, int c, int d) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
                 ::"r"(target), "l"(reinterpret_cast<u64>(map)), "r"(barrier), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
// im2col mode of an NHWC tensor: (w, h, n) is the first pixel's top-left corner, the offsets select the filter tap.
DEVICE void tma_load_im2col(u32 target, const TensorMap* map, u32 barrier, int c, int w, int h, int n, u16 tap_w, u16 tap_h) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], "
                 "[%1, {%3, %4, %5, %6}], [%2], {%7, %8};"
                 ::"r"(target), "l"(reinterpret_cast<u64>(map)), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(n), "h"(tap_w),
                 "h"(tap_h) : "memory");
}
DEVICE void tma_load_5d(u32 target, const TensorMap* map, u32 barrier, int a, int b, int c, int d, int e) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
                 ::"r"(target), "l"(reinterpret_cast<u64>(map)), "r"(barrier), "r"(a), "r"(b), "r"(c), "r"(d), "r"(e) : "memory");
}
// im2col mode of an NDHWC tensor.
DEVICE void tma_load_im2col_5d(u32 target, const TensorMap* map, u32 barrier, int c, int w, int h, int d, int n, u16 tap_w, u16 tap_h,
                               u16 tap_d) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], "
                 "[%1, {%3, %4, %5, %6, %7}], [%2], {%8, %9, %10};"
                 ::"r"(target), "l"(reinterpret_cast<u64>(map)), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(d), "r"(n), "h"(tap_w),
                 "h"(tap_h), "h"(tap_d) : "memory");
}
// The same, to the same offset in every block of the cluster whose bit is set. Each block's barrier counts its own bytes.
DEVICE void tma_multicast_2d(u32 target, const TensorMap* map, u32 barrier, int x, int y, u16 blocks) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4}], [%2], %5;"
                 ::"r"(target), "l"(reinterpret_cast<u64>(map)), "r"(barrier), "r"(x), "r"(y), "h"(blocks) : "memory");
}
DEVICE void tma_multicast_im2col(u32 target, const TensorMap* map, u32 barrier, int c, int w, int h, int n, u16 tap_w, u16 tap_h,
                                 u16 blocks) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
                 "[%1, {%3, %4, %5, %6}], [%2], {%7, %8}, %9;"
                 ::"r"(target), "l"(reinterpret_cast<u64>(map)), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(n), "h"(tap_w),
                 "h"(tap_h), "h"(blocks) : "memory");
}
DEVICE void tma_multicast_im2col_5d(u32 target, const TensorMap* map, u32 barrier, int c, int w, int h, int d, int n, u16 tap_w, u16 tap_h,
                                    u16 tap_d, u16 blocks) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
                 "[%1, {%3, %4, %5, %6, %7}], [%2], {%8, %9, %10}, %11;"
                 ::"r"(target), "l"(reinterpret_cast<u64>(map)), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(d), "r"(n), "h"(tap_w),
                 "h"(tap_h), "h"(tap_d), "h"(blocks) : "memory");
}
// Copies ``bytes`` (a multiple of 16) in memory order.
DEVICE void bulk_load(u32 target, const void* source, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(target), "l"(source), "r"(bytes), "r"(barrier) : "memory");
}
DEVICE void tma_store_2d(const TensorMap* map, u32 source, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];"
                 ::"l"(reinterpret_cast<u64>(map)), "r"(source), "r"(x), "r"(y) : "memory");
}
DEVICE void tma_store_4d(const TensorMap* map, u32 source, int a, int b, int c, int d) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
                 ::"l"(reinterpret_cast<u64>(map)), "r"(source), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
DEVICE void tma_store_5d(const TensorMap* map, u32 source, int a, int b, int c, int d, int e) {
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];"
                 ::"l"(reinterpret_cast<u64>(map)), "r"(source), "r"(a), "r"(b), "r"(c), "r"(d), "r"(e) : "memory");
}
DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
DEVICE void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- wgmma ---------------------------------------------------------------------------------------------------------

// Descriptor of a K-major operand in shared memory. A row is one swizzle span (128 or 64 bytes); the start is aligned to 8 rows.
template <int SPAN> DEVICE u64 wgmma_descriptor(u32 address) {
    constexpr u64 swizzle = SPAN == 128 ? 1 : SPAN == 64 ? 2 : 3;
    constexpr u64 eight_rows = (8 * SPAN) >> 4;
    return (swizzle << 62) | (eight_rows << 32) | (u64(1) << 16) | u64((address & 0x3ffff) >> 4);
}
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

// ---- 8x8 matrices between registers and shared memory, most of them transposed ---------------------------------------------------

DEVICE void stmatrix_x4(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
DEVICE void stmatrix_x2(u32 address, u32 a, u32 b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}
DEVICE void stmatrix_x4_trans(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
DEVICE void stmatrix_x1_trans(u32 address, u32 a) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(address), "r"(a) : "memory");
}
DEVICE void stmatrix_x2_trans(u32 address, u32 a, u32 b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}

#endif  // __CUDA_ARCH__ >= 900

// 16 bytes from global to shared memory, asynchronously; copies_wait() waits for all copies of the thread.
DEVICE void copy_16_async(u32 target, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(__cvta_generic_to_global(source)) : "memory");
}
DEVICE void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
