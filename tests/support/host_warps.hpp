// Warps on a processor, enough for kernels on mma.sync: the 32 lanes of a warp are fibers that meet at every instruction of the whole
// warp, warps meet at __syncthreads(). What an instruction does to fragments is written down from the PTX ISA ("mma.m16n8k16",
// "ldmatrix"); copies to shared memory land when they are waited for, no sooner.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>
using std::max;
using std::min;

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE static inline
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n)
#define __shared__
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct Index { unsigned x, y, z; };
static Index threadIdx, blockIdx, gridDim;

enum { MOST = 256, STACK = 1 << 18, SHARED = 1 << 18 };
enum Meeting { RUNNING, WARP, BLOCK, ENDED };
alignas(128) static u8 memory[SHARED];
static ucontext_t scheduler, fibers[MOST];
static Meeting meeting[MOST];
static char* stacks;
static void (*entry)();
static void run_fiber() { entry(); meeting[threadIdx.x] = ENDED; }
static void meet(Meeting where) {
    const unsigned thread = threadIdx.x;
    meeting[thread] = where;
    swapcontext(&fibers[thread], &scheduler);
}
static void __syncthreads() { meet(BLOCK); }
static void __syncwarp() { meet(WARP); }

// Copies of each thread that are under way: groups of (target, source or null).
struct Copy { u32 target; const void* source; };
static std::vector<std::vector<Copy>> copies[MOST];

static bool run_block(unsigned threads) {              // false where threads of a warp or a block miss one another
    if (!stacks) stacks = static_cast<char*>(malloc(size_t(MOST) * STACK));
    memset(memory, 0xff, SHARED);
    for (unsigned t = 0; t < threads; t++) {
        getcontext(&fibers[t]);
        fibers[t].uc_stack.ss_sp = stacks + size_t(t) * STACK;
        fibers[t].uc_stack.ss_size = STACK;
        fibers[t].uc_link = &scheduler;
        meeting[t] = RUNNING;
        copies[t].assign(1, {});
        makecontext(&fibers[t], run_fiber, 0);
    }
    for (bool left = true; left;) {
        left = false;
        for (unsigned w = 0; w < threads; w += 32) {
            if (meeting[w] == ENDED) continue;
            do {
                for (unsigned t = w; t < w + 32; t++) {
                    threadIdx = {t, 0, 0};
                    swapcontext(&scheduler, &fibers[t]);
                    if (meeting[t] != meeting[w]) return false;
                }
            } while (meeting[w] == WARP);
            left |= meeting[w] == BLOCK;
        }
        for (unsigned t = 0; t < threads; t++)
            if (meeting[t] != meeting[0]) return false;
    }
    for (unsigned t = 0; t < threads; t++)
        for (auto& group : copies[t])
            if (!group.empty()) return false;          // a copy that nobody waited for
    return true;
}

static u32 passed[MOST][8];                            // what lanes show one another
static void show(const u32* values, int count) {
    meet(WARP);                                        // all have read what was shown before
    memcpy(passed[threadIdx.x], values, 4 * count);
    meet(WARP);
}
static const u32* shown(unsigned lane) { return passed[threadIdx.x / 32 * 32 + lane]; }

static inline float __uint_as_float(u32 v) { float f; memcpy(&f, &v, 4); return f; }
static inline float __int_as_float(int v) { float f; memcpy(&f, &v, 4); return f; }
static inline u32 __float_as_uint(float v) { u32 u; memcpy(&u, &v, 4); return u; }
static inline float __fdividef(float a, float b) { return a / b; }
static float __shfl_xor_sync(u32, float value, unsigned mask) {
    const u32 bits = __float_as_uint(value);
    show(&bits, 1);
    return __uint_as_float(shown(threadIdx.x % 32 ^ mask)[0]);
}
static inline float exp2_fast(float x) { return exp2f(x); }

#ifdef DTYPE_BF16
static inline float unpack1(u16 bits) { return __uint_as_float(u32(bits) << 16); }
static inline u16 pack1(float v) {
    const u32 u = __float_as_uint(v);
    return v != v ? 0x7fff : u16((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
#else
static inline float unpack1(u16 bits) { _Float16 h; memcpy(&h, &bits, 2); return float(h); }
static inline u16 pack1(float v) { const _Float16 h = _Float16(v); u16 bits; memcpy(&bits, &h, 2); return bits; }
#endif
static inline u32 pack2(float low, float high) { return pack1(low) | u32(pack1(high)) << 16; }
static inline float low_float(u32 packed) { return unpack1(u16(packed)); }
static inline float high_float(u32 packed) { return unpack1(u16(packed >> 16)); }

static inline u32 smem_address(const void* pointer) { return u32(static_cast<const u8*>(pointer) - memory); }
static inline void grid_dependency_wait() {}
static inline void grid_launch_dependents() {}
static inline void copy_16_or_zeros(u32 target, const void* source, bool live) {
    if (target % 16 || reinterpret_cast<u64>(source) % 16 || target + 16 > SHARED) abort();
    copies[threadIdx.x].back().push_back({target, live ? source : nullptr});
}
static inline void copies_commit() { copies[threadIdx.x].push_back({}); }
template <int PENDING> static void copies_wait_but() {
    auto& own = copies[threadIdx.x];                   // the last entry is the group that is not committed yet
    while (own.size() > PENDING + 1) {
        for (const Copy& c : own.front()) {
            if (c.source) memcpy(memory + c.target, c.source, 16);
            else memset(memory + c.target, 0, 16);
        }
        own.erase(own.begin());
    }
}

// Matrix i has the rows at the addresses of lanes 8 i to 8 i + 7; a lane gets two neighbours of row lane / 4, transposed of column lane / 4.
static void load_matrices(u32 address, u32* registers, bool turned) {
    if (address % 16 || address + 16 > SHARED) abort();
    show(&address, 1);
    const unsigned lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4 * 2;
    for (unsigned i = 0; i < 4; i++) {
        u16 two[2];
        for (unsigned j = 0; j < 2; j++) {
            const unsigned row = turned ? pair + j : group, column = turned ? group : pair + j;
            memcpy(&two[j], memory + shown(8 * i + row)[0] + 2 * column, 2);
        }
        registers[i] = two[0] | u32(two[1]) << 16;
    }
}
static void ldmatrix_x4(u32 address, u32& a, u32& b, u32& c, u32& d) {
    u32 r[4];
    load_matrices(address, r, false);
    a = r[0], b = r[1], c = r[2], d = r[3];
}
static void ldmatrix_x4_trans(u32 address, u32& a, u32& b, u32& c, u32& d) {
    u32 r[4];
    load_matrices(address, r, true);
    a = r[0], b = r[1], c = r[2], d = r[3];
}

static float half_of(u32 packed, unsigned high) { return high ? high_float(packed) : low_float(packed); }
static void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const u32 own[6] = {a[0], a[1], a[2], a[3], b0, b1};
    show(own, 6);
    const unsigned lane = threadIdx.x % 32;
    for (unsigned i = 0; i < 4; i++) {
        const unsigned row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        float total = 0;
        for (unsigned k = 0; k < 16; k++) {
            // A: row g + 8 (r % 2), columns 2 t + (0, 1) + 8 (r / 2) in register r of lane 4 g + t; B: rows likewise, column g.
            const float x = half_of(shown(row % 8 * 4 + k % 8 / 2)[row / 8 + k / 8 * 2], k % 2);
            const float y = half_of(shown(column * 4 + k % 8 / 2)[4 + k / 8], k % 2);
            total += x * y;
        }
        d[i] += total;
    }
}

struct Narrow { float factor, low, high; int zero; };
template <bool FLOAT8> static u32 narrow_four(const Narrow& n, float a, float b, float c, float d) {
    static_assert(!FLOAT8, "integers alone");
    const float v[4] = {a, b, c, d};
    u32 word = 0;
    for (int i = 0; i < 4; i++) word |= u32(u8(int(nearbyintf(min(max(v[i] * n.factor, n.low), n.high))) + n.zero)) << (8 * i);
    return word;
}
