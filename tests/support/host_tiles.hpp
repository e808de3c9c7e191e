// Warps, on top of host.hpp: barriers that wait for every thread of a block, however often its warp has met for a shuffle, and the
// functions of ptx.cuh that plain kernels use.
#include <algorithm>
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define DEVICE static inline
#define __align__(n)
#undef __launch_bounds__
#define __launch_bounds__(...)
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
template <class T> static T __ldg(const T* at) { return *at; }
static float rsqrtf(float x) { return 1.0f / sqrtf(x); }

static unsigned arrived, alive, generation;
alignas(16) static char dynamic_shared[1 << 18];
static float passed[2][MOST];
static unsigned char turn[MOST];
static void yield() { fibers.wait(threadIdx.x); }
static void leave() {
    if (--alive && arrived == alive) arrived = 0, generation++;
}
static void block_barrier() {
    const unsigned mine = generation;
    if (++arrived == alive) arrived = 0, generation++;
    else while (generation == mine) yield();
}
// The lanes of a warp come to a shuffle in one turn of the scheduler; one may be a shuffle ahead when another one reads.
static float __shfl_xor_sync(unsigned, float v, int distance) {
    float* slots = passed[turn[threadIdx.x] ^= 1];
    slots[threadIdx.x] = v;
    yield();
    return slots[threadIdx.x ^ distance];
}
#define __syncthreads block_barrier

static float half_to_float(u16 bits) { _Float16 h; memcpy(&h, &bits, 2); return float(h); }
static u16 float_to_half(float v) { _Float16 h = _Float16(v); u16 bits; memcpy(&bits, &h, 2); return bits; }
static u32 pack2(float low, float high) { return float_to_half(low) | u32(float_to_half(high)) << 16; }
static float low_float(u32 packed) { return half_to_float(u16(packed)); }
static float high_float(u32 packed) { return half_to_float(u16(packed >> 16)); }
static u16 pack1(float v) { return float_to_half(v); }
static float unpack1(u16 bits) { return half_to_float(bits); }
static void grid_dependency_wait() {}
static void grid_launch_dependents() {}

// Blocks run one after the other: a second run of the launch finds what all of them told in the first.
static void meet(u32*) { block_barrier(); }
