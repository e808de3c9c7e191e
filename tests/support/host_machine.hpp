#pragma once
static inline float __double2float_rz(double v) { float f = float(v); return fabs(double(f)) > fabs(v) ? nextafterf(f, 0) : f; }
static inline float half_to_float(u16 bits) { _Float16 h; memcpy(&h, &bits, 2); return float(h); }
static inline u16 float_to_half(float v) { _Float16 h = _Float16(v); u16 bits; memcpy(&bits, &h, 2); return bits; }
#ifndef ARITHMETIC                                 // general kernels on warps have both files
#define ARITHMETIC
static inline float saturated_fma(float a, float b, float c) { return fminf(fmaxf(fmaf(a, b, c), 0.0f), 1.0f); }
#endif
static inline u16 double_to_half(double v) { _Float16 h = _Float16(v); u16 bits; memcpy(&bits, &h, 2); return bits; }
static inline u16 float_to_bfloat(float v) {
    if (v != v) return 0x7fff;
    unsigned u = __float_as_uint(v);
    return u16((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
static inline u16 max_f16(u16 a, u16 b) { float x = half_to_float(a), y = half_to_float(b); return x > y || x != x ? a : b; }
static inline u16 max_bf16(u16 a, u16 b) {
    float x = __uint_as_float(unsigned(a) << 16), y = __uint_as_float(unsigned(b) << 16);
    return x > y || x != x ? a : b;
}
static inline u32 max2_f16(u32 a, u32 b) { return max_f16(a, b) | u32(max_f16(a >> 16, b >> 16)) << 16; }
static inline u32 max2_bf16(u32 a, u32 b) { return max_bf16(a, b) | u32(max_bf16(a >> 16, b >> 16)) << 16; }
static inline void launch_dependents() {}
static inline void wait_for_predecessor() {}

static void __syncwarp() { __syncthreads(); }
static bool later_row[MOST];
// All threads of the block shuffle together, as often as each other. Two rows of places take turns: a slow thread reads the one before.
template <class T> static T of_thread(T v, unsigned from) {
    static T places[2][MOST];
    const unsigned own = threadIdx.x;
    T* const row = places[later_row[own] = !later_row[own]];
    row[own] = v;
    __syncthreads();
    return row[from];
}
template <class T> static T __shfl_xor_sync(unsigned, T v, int mask) { return of_thread(v, threadIdx.x ^ mask); }
template <class T> static T __shfl_up_sync(unsigned, T v, unsigned by) { return of_thread(v, threadIdx.x - (threadIdx.x % 32 < by ? 0 : by)); }
template <class T> static T __shfl_sync(unsigned, T v, unsigned lane) { return of_thread(v, threadIdx.x / 32 * 32 + lane); }

static u32 __reduce_add_sync(unsigned, u32 v) {
    u32 sum = v;
    for (int mask = 16; mask; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
    return sum;
}

// As grid_meeting.cuh's: blocks that meet are processes, see host.py.
static void meet(u32* rounds) {
    __syncthreads();
    if (threadIdx.x == 0) {
        const u32 round = __atomic_load_n(rounds, __ATOMIC_ACQUIRE);
        if (__atomic_fetch_add(rounds + 1, 1u, __ATOMIC_ACQ_REL) == gridDim.x - 1) {
            rounds[1] = 0;
            __atomic_add_fetch(rounds, 1u, __ATOMIC_RELEASE);
        }
        while (__atomic_load_n(rounds, __ATOMIC_ACQUIRE) == round) sched_yield();
    }
    __syncthreads();
}
static bool arrives_last(u32* arrived, u32 count) {
    static bool last;
    if (threadIdx.x == 0) last = ++*arrived == count, *arrived = last ? 0 : *arrived;
    __syncthreads();
    return last;
}
