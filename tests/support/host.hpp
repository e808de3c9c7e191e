// CUDA C++ on a processor, enough for the generated kernels. The threads of a block are fibers that take turns: each runs until it
// waits at a barrier (or ends), so __syncthreads() means what it should.
#pragma once
#include "host_math.hpp"
#include <cstdlib>
#include <cstring>
#include <sched.h>
#include "host_fibers.hpp"
using namespace std;

#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n)
#define __shared__ static
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct Index { unsigned x, y, z; };
static Index threadIdx, blockIdx, gridDim;

enum { MOST = 1024, STACK = 32768 };
static Fibers<MOST, STACK> fibers;
static bool ended[MOST];
static void (*entry)();
static void run_fiber() {
    entry();
    ended[threadIdx.x] = true;
    fibers.end();
}
static void __syncthreads() { fibers.wait(threadIdx.x); }

alignas(16) static unsigned char dynamic_memory[232448];
extern "C" { int only_block = -1; }                // of a launch whose blocks are processes of their own

// Every thread of the current block.
static void run_block(unsigned threads, bool synchronized) {
    if (!synchronized) {
        for (unsigned t = 0; t < threads; t++) { threadIdx = {t, 0, 0}; entry(); }
        return;
    }
    fibers.entry = run_fiber;
    for (unsigned t = 0; t < threads; t++) {
        fibers.make(t);
        ended[t] = false;
    }
    for (unsigned left = threads; left;) {
        left = 0;
        for (unsigned t = 0; t < threads; t++) {
            if (ended[t]) continue;
            threadIdx = {t, 0, 0};
            fibers.enter(t);
            left += !ended[t];
        }
    }
}

static inline unsigned atomicAdd(unsigned* at, unsigned v) { unsigned old = *at; *at += v; return old; }
static inline double atomicAdd(double* at, double v) { double old = *at; *at += v; return old; }
static inline unsigned long long __double_as_longlong(double v) { unsigned long long u; memcpy(&u, &v, 8); return u; }
static inline float __uint_as_float(unsigned v) { float f; memcpy(&f, &v, 4); return f; }
static inline float __int_as_float(int v) { float f; memcpy(&f, &v, 4); return f; }
#define __expf expf
#define __sinf sinf
#define __cosf cosf
static inline float __fdividef(float a, float b) { return a / b; }
static inline unsigned __float_as_uint(float v) { unsigned u; memcpy(&u, &v, 4); return u; }
