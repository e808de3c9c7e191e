// Warps on a processor, enough for kernels on mma.sync: the 32 lanes of a warp are fibers that meet at every instruction of the whole
// warp, warps meet at __syncthreads(). What an instruction does to fragments is written down from the PTX ISA ("mma",
// "ldmatrix"); copies to shared memory land when they are waited for, no sooner.
#pragma once
#include <algorithm>
#include "host_math.hpp"
#include <cstdlib>
#include <cstring>
#include "host_fibers.hpp"
#include <vector>
using std::max;
using std::min;

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE static inline
#define __device__
#define __forceinline__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n)
#define __shared__ static                             // one block at a time
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <class T> static inline T __ldg(const T* p) { return *p; }
template <class T> static inline T __ldcg(const T* p) { return *p; }
struct Index { unsigned x, y, z; };
static Index threadIdx, blockIdx, gridDim, blockDim;

enum { MOST = 512, STACK = 1 << 18, SHARED = 1 << 18 };
enum Meeting { RUNNING, WARP, BLOCK, POLL, ENDED };
alignas(128) static u8 memory[SHARED];
alignas(16) static u8 barriers[4096];                  // 16 bytes for each 8 of a barrier in shared memory
static unsigned found;                                 // waits that ended
static unsigned reserved = SHARED;                     // bytes of shared memory that the launch reserves
static Fibers<MOST, STACK> fibers;
static Meeting meeting[MOST];
static void (*entry)();
static void run_fiber() {
    entry();
    meeting[threadIdx.x] = ENDED;
    fibers.end();
}
static void meet(Meeting where) {
    const unsigned thread = threadIdx.x;
    meeting[thread] = where;
    fibers.wait(thread);
}
static void __syncthreads() { meet(BLOCK); }
static void __syncwarp() { meet(WARP); }
static void __threadfence() {}
static inline void prefetch_l2(const void*) {}
static inline void bulk_prefetch(const void*, u32) {}
static inline double atomicAdd(double* at, double v) { double old = *at; *at += v; return old; }
static u32 count_arrival(u32* count) { return (*count)++; }

// Copies of each thread that are under way, in groups.
struct Copy { u32 target; const void* source; int bytes, whole; };
static std::vector<std::vector<Copy>> copies[MOST];

static unsigned awaiting;                              // threads that wait for what other blocks send
static bool unfinished;                                // whether a block ended there

static bool run_block(unsigned threads) {              // false where threads of a warp or a block miss one another, or go beyond shared memory
    fibers.entry = run_fiber;
    memset(memory, 0xff, SHARED);
    awaiting = 0;
    for (unsigned t = 0; t < threads; t++) {
        fibers.make(t);
        meeting[t] = RUNNING;
        copies[t].assign(1, {});
    }
    unsigned polled = 0;                               // rounds in which threads did nothing but look, and found nothing
    for (bool left = true; left;) {
        left = false;
        bool all = true, moved = false;
        const unsigned before = found;
        for (unsigned t = 0; t < threads; t++) all &= meeting[t] == BLOCK || meeting[t] == RUNNING;
        for (unsigned w = 0; w < threads; w += 32) {
            if (meeting[w] == BLOCK && !all) {         // it waits for those that look
                left = true;
                continue;
            }
            bool warp;
            do {
                warp = false;
                for (unsigned t = w; t < w + 32; t++) {
                    if (meeting[t] == ENDED) continue;
                    moved |= meeting[t] != POLL;
                    threadIdx = {t, 0, 0};
                    fibers.enter(t);
                    moved |= meeting[t] != POLL;
                    warp |= meeting[t] == WARP;
                    left |= meeting[t] == BLOCK || meeting[t] == POLL;
                }
                for (unsigned t = w; t < w + 32; t++)
                    if ((warp || meeting[t] == BLOCK || meeting[w] == BLOCK) && meeting[t] != meeting[w]) return false;
            } while (warp);
        }
        bool block = false, ended = false;
        for (unsigned t = 0; t < threads; t++) block |= meeting[t] == BLOCK, ended |= meeting[t] == ENDED;
        if (block && ended) return false;
        polled = moved || found != before ? 0 : polled + 1;
        if (polled > 2 && awaiting) return unfinished = true;
        if (polled > 2) return false;                  // nobody will come
    }
    for (unsigned t = 0; t < threads; t++)
        for (auto& group : copies[t])
            if (!group.empty()) return false;          // a copy that nobody waited for
    for (unsigned at = reserved; at < SHARED; at++)
        if (memory[at] != 0xff) return false;          // written beyond what the launch reserves
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
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline int __float2int_rn(float x) { return isnan(x) ? 0 : int(nearbyintf(x)); }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline u32 __byte_perm(u32 low, u32 high, u32 selector) {
    const u64 bytes = low | u64(high) << 32;
    u32 word = 0;
    for (int i = 0; i < 4; i++) word |= u32(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return word;
}
static inline u32 first_part(u32 bits) { return (bits + 0x1000) & 0xffffe000u; }
static inline u32 divide(u32& bits) {
    const u32 whole = bits;
    bits = first_part(whole);
    return __float_as_uint(__uint_as_float(whole) - __uint_as_float(bits));
}
static inline u32 rounded_to_tf32(u32 bits) { return first_part(bits); }                  // of finite numbers
static inline float __fdividef(float a, float b) { return a / b; }
#define __expf expf
#define __sinf sinf
#define __cosf cosf
static float __shfl_xor_sync(u32, float value, unsigned mask) {
    const u32 bits = __float_as_uint(value);
    show(&bits, 1);
    return __uint_as_float(shown(threadIdx.x % 32 ^ mask)[0]);
}
static u32 __shfl_xor_sync(u32, u32 value, unsigned mask) {
    show(&value, 1);
    return shown(threadIdx.x % 32 ^ mask)[0];
}
static int __shfl_xor_sync(u32 all, int value, unsigned mask) { return int(__shfl_xor_sync(all, u32(value), mask)); }
static u32 __reduce_max_sync(u32, u32 value) {
    show(&value, 1);
    u32 most = 0;
    for (unsigned lane = 0; lane < 32; lane++) most = max(most, shown(lane)[0]);
    return most;
}
static inline float max_or_nan(float a, float b) { return a != a || b != b ? NAN : max(a, b); }
static inline int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 32; i += 8) sum += int(static_cast<signed char>(a >> i)) * static_cast<signed char>(b >> i);
    return sum;
}
constexpr float LOG2_E = 1.4426950408889634f;
static inline float exp2_fast(float x) { return exp2f(x); }
#ifndef ARITHMETIC                                 // general kernels on warps have both files
#define ARITHMETIC
static inline float saturated_fma(float a, float b, float c) { return fminf(fmaxf(fmaf(a, b, c), 0.0f), 1.0f); }
#endif
static inline float tanh_fast(float x) { return tanhf(x); }
static inline void silu_pair(float& x, float& y) { x /= 1.0f + expf(-x), y /= 1.0f + expf(-y); }

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
static inline u32 relu2(u32 packed) { return pack2(max_or_nan(low_float(packed), 0.0f), max_or_nan(high_float(packed), 0.0f)); }

static inline u32 smem_address(const void* pointer) { return u32(static_cast<const u8*>(pointer) - memory); }
static inline u16 half_bits(float v) { const _Float16 h = _Float16(v); u16 bits; memcpy(&bits, &h, 2); return bits; }
static inline float low_half(u32 packed) { const u16 bits = u16(packed); _Float16 h; memcpy(&h, &bits, 2); return float(h); }
static inline float high_half(u32 packed) { return low_half(packed >> 16); }
static inline u32 fma2(u32 a, u32 b, u32 c) {
    return pack2(low_float(a) * low_float(b) + low_float(c), high_float(a) * high_float(b) + high_float(c));
}
static inline float float8(u8 bits) {                  // e4m3, finite
    const int exponent = bits >> 3 & 15, mantissa = bits & 7;
    const float size = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
    return bits & 0x80 ? -size : size;
}
static inline u32 float8_to_half(u32 word) { return half_bits(float8(word)) | u32(half_bits(float8(word >> 8))) << 16; }
static inline void copy_16_or_zeros(u32 target, const void* source, int bytes);
struct Stream {
    uint4 operator()(const void* at) const {
        if (reinterpret_cast<u64>(at) % 16) abort();
        return *static_cast<const uint4*>(at);
    }
    void copy(u32 target, const void* source) const { copy_16_or_zeros(target, source, 16); }
};
template <class T> static T __shfl_sync(u32, T value, unsigned lane) {
    static_assert(sizeof(T) == 4, "one register");
    u32 bits;
    memcpy(&bits, &value, 4);
    show(&bits, 1);
    memcpy(&value, &shown(lane)[0], 4);
    return value;
}

// Hopper's barriers, loads of tiles and wgmma, all of which are done at once; lanes look again and again where they wait.
struct Barrier { u32 phase, expected, pending; int bytes; };
static Barrier& barrier_at(u32 address) { return *reinterpret_cast<Barrier*>(barriers + address * 2); }
static void settle(Barrier& b) {
    if (b.pending == 0 && b.bytes == 0) b.phase++, b.pending = b.expected;
}
static inline bool elect_one() { return threadIdx.x % 32 == 0; }
static inline void barrier_init(u32 address, u32 arrivals) { barrier_at(address) = {0, arrivals, arrivals, 0}; }
static inline void barrier_init_fence() {}
static inline void async_proxy_fence() {}
static inline void barrier_arrive(u32 address) {
    Barrier& b = barrier_at(address);
    if (b.pending-- == 0) abort();
    settle(b);
}
static inline void barrier_expect(u32 address, u32 bytes) {
    barrier_at(address).bytes += bytes;
    barrier_arrive(address);
}
static inline void barrier_wait(u32 address, u32 parity) {
    while ((barrier_at(address).phase & 1) == parity) meet(POLL);
    found++;
}
static struct { u32 arrived, turn; } named[16];
static inline void named_barrier(u32 id, u32 count) {
    const u32 turn = named[id].turn;
    if (++named[id].arrived == count) named[id].arrived = 0, named[id].turn++;
    do meet(POLL);                                     // so that all lanes of a warp find the same
    while (named[id].turn == turn);
    found++;
}
static inline void named_barrier_arrive(u32 id, u32 count) {
    if (++named[id].arrived == count) named[id].arrived = 0, named[id].turn++;
}
struct alignas(64) TensorMap { u64 opaque[16]; };      // address, columns, rows, bytes of a row, box; the box's rows have 128 bytes
static inline void tma_prefetch(const TensorMap*) {}
static inline void tma_load_2d(u32 target, const TensorMap* map, u32 barrier, int x, int y) {
    const auto [from, columns, rows, pitch, width, height] = [&] {
        struct { const u8* from; long long columns, rows, pitch, width, height; } m;
        memcpy(&m, map->opaque, sizeof m);
        return m;
    }();
    const int item = width == 128 ? 1 : 2;
    if (target % 1024 || width * item != 128) abort();
    for (int r = 0; r < height; r++)
        for (int c = 0; c < width; c++) {
            const u32 at = target + r * 128 + c * item;
            u16 bits = 0;
            if (y + r < rows && x + c < columns) memcpy(&bits, from + (y + r) * pitch + (x + c) * item, item);
            memcpy(memory + (at ^ (at >> 7 & 7) << 4), &bits, item);
        }
    Barrier& b = barrier_at(barrier);
    b.bytes -= int(128 * height);
    settle(b);
}
static inline void tma_store_2d(const TensorMap* map, u32 source, int x, int y) {
    struct { u8* to; long long columns, rows, pitch, width, height; } m;
    memcpy(&m, map->opaque, sizeof m);
    const int item = m.width == 128 ? 1 : 2;
    if (source % 1024 || m.width * item != 128) abort();
    for (int r = 0; r < m.height; r++)
        for (int c = 0; c < m.width; c++) {
            const u32 at = source + r * 128 + c * item;
            if (y + r < m.rows && x + c < m.columns) memcpy(m.to + (y + r) * m.pitch + (x + c) * item, memory + (at ^ (at >> 7 & 7) << 4), item);
        }
}
// Boxes of four or five axes: address, sizes, strides, box, swizzle, bytes of an element. What lies outside arrives as zeros, and is not
// stored.
template <int AXES> struct BoxMap { u8* from; long long size[AXES], stride[AXES - 1], box[AXES]; int swizzle, item; };
template <int AXES, class Visit> static void visit_box(const TensorMap* map, u32 shared, const int (&corner)[AXES], const Visit& visit) {
    BoxMap<AXES> m;
    memcpy(&m, map->opaque, sizeof m);
    if (shared % (m.swizzle ? 1024 : 128) || (m.swizzle && m.swizzle != m.box[0] * m.item)) abort();
    const u32 mask = m.swizzle ? (u32(m.swizzle) / 16 - 1) << 4 : 0;
    u32 at = shared;
    long long count = 1;
    for (int k = 0; k < AXES; k++) count *= m.box[k];
    for (long long e = 0; e < count; e++, at += m.item) {
        bool inside = true;
        u8* there = m.from;
        long long rest = e;
        for (int k = 0; k < AXES; k++) {
            const long long i = corner[k] + rest % m.box[k];
            rest /= m.box[k];
            inside &= i >= 0 && i < m.size[k];
            there += i * (k ? m.stride[k - 1] : m.item);
        }
        visit(memory + (at ^ (at >> 3 & mask)), inside ? there : nullptr, m.item);
    }
}
template <int AXES> static void load_box(u32 target, const TensorMap* map, u32 barrier, const int (&corner)[AXES]) {
    int bytes = 0;
    visit_box(map, target, corner, [&](u8* here, const u8* there, int item) {
        bytes += item;
        if (there) memcpy(here, there, item);
        else memset(here, 0, item);
    });
    Barrier& arrived = barrier_at(barrier);
    arrived.bytes -= bytes;
    settle(arrived);
}
template <int AXES> static void store_box(const TensorMap* map, u32 source, const int (&corner)[AXES]) {
    visit_box(map, source, corner, [&](const u8* here, u8* there, int item) {
        if (there) memcpy(there, here, item);
    });
}
static inline void tma_load_4d(u32 target, const TensorMap* map, u32 barrier, int a, int b, int c, int d) { load_box(target, map, barrier, {a, b, c, d}); }
static inline void tma_load_5d(u32 target, const TensorMap* map, u32 barrier, int a, int b, int c, int d, int e) {
    load_box(target, map, barrier, {a, b, c, d, e});
}
static inline void tma_store_4d(const TensorMap* map, u32 source, int a, int b, int c, int d) { store_box(map, source, {a, b, c, d}); }
static inline void tma_store_5d(const TensorMap* map, u32 source, int a, int b, int c, int d, int e) { store_box(map, source, {a, b, c, d, e}); }
static inline void tma_store_commit() {}
template <int PENDING> static void tma_store_wait_read() {}
static inline uint4 shared_load16(u32 address) {
    if (address % 16 || address + 16 > SHARED) abort();
    return *reinterpret_cast<const uint4*>(memory + address);
}
static inline void shared_store16(u32 address, uint4 v) {
    if (address % 16 || address + 16 > SHARED) abort();
    memcpy(memory + address, &v, 16);
}
static inline void shared_store(u32 address, int v) { memcpy(memory + address, &v, 4); }
static inline void shared_store(u32 address, float v) { memcpy(memory + address, &v, 4); }
static inline void shared_store(u32 address, uint2 v) {
    if (address % 8 || address + 8 > SHARED) abort();
    memcpy(memory + address, &v, 8);
}
static inline void shared_load(u32 address, float& v) { memcpy(&v, memory + address, 4); }
static inline void shared_load(u32 address, float2& v) { memcpy(&v, memory + address, 8); }
static inline void shared_load(u32 address, float4& v) { memcpy(&v, memory + address, 16); }
static inline void bulk_load(u32 target, const void* source, u32 bytes, u32 barrier) {
    if (target % 16 || reinterpret_cast<u64>(source) % 16 || bytes % 16 || bytes == 0 || target + bytes > SHARED) abort();
    memcpy(memory + target, source, bytes);
    Barrier& b = barrier_at(barrier);
    b.bytes -= int(bytes);
    settle(b);
}
template <int SPAN> static u64 wgmma_descriptor(u32 address) { return address >> 4; }
static inline void wgmma_fence() {}
static inline void wgmma_commit() {}
template <int PENDING> static void wgmma_wait() {}
// Operand B has rows of 64 of K; or, where the descriptor has strides, is made of core matrices without a swizzle.
template <int N> static void wgmma_pixels(float (&d)[N], const u32 (&a)[4], u64 b, int accumulate) {
    show(a, 4);
    const unsigned lane = threadIdx.x % 32, deep = unsigned(b >> 16 & 0x3fff) << 4, wide = unsigned(b >> 32 & 0x3fff) << 4;
    for (int i = 0; i < N; i++) {
        const unsigned row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        float total = 0;
        for (unsigned k = 0; k < 16; k++) {
            const u32 left = shown(row % 8 * 4 + k % 8 / 2)[row / 8 + k / 8 * 2], at = u32(b << 4) + column * 128 + k * 2;
            const u32 apart = u32((b & 0x3fff) << 4) + column / 8 * wide + k / 8 * deep + column % 8 * 16 + k % 8 * 2;
            u16 bits;
            memcpy(&bits, memory + (wide ? apart : at ^ (at >> 7 & 7) << 4), 2);
            total += (k % 2 ? high_float(left) : low_float(left)) * unpack1(bits);
        }
        d[i] = (accumulate ? d[i] : 0) + total;
    }
}
// Both operands in shared memory, rows of 64 of K.
template <int N> static void wgmma_step(float (&d)[N], u64 a, u64 b, int accumulate) {
    const unsigned lane = threadIdx.x % 32;
    const auto element = [](u64 matrix, unsigned row, unsigned k) {
        const u32 at = u32(matrix << 4) + row * 128 + k * 2;
        u16 bits;
        memcpy(&bits, memory + (at ^ (at >> 7 & 7) << 4), 2);
        return unpack1(bits);
    };
    for (int i = 0; i < N; i++) {
        const unsigned row = threadIdx.x / 32 % 4 * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        float total = 0;
        for (unsigned k = 0; k < 16; k++) total += element(a, row, k) * element(b, column, k);
        d[i] = (accumulate ? d[i] : 0) + total;
    }
}
// Of bytes, rows of 128 of K; operand B signed or not.
template <bool UNSIGNED, int N> static void wgmma_bytes(int (&d)[N], u64 a, u64 b, int accumulate) {
    const unsigned lane = threadIdx.x % 32;
    const auto element = [](u64 matrix, unsigned row, unsigned k) {
        const u32 at = u32(matrix << 4) + row * 128 + k;
        return memory[at ^ (at >> 7 & 7) << 4];
    };
    for (int i = 0; i < N; i++) {
        const unsigned row = threadIdx.x / 32 % 4 * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        int total = 0;
        for (unsigned k = 0; k < 32; k++) {
            const u8 right = element(b, column, k);
            total += static_cast<signed char>(element(a, row, k)) * (UNSIGNED ? int(right) : int(static_cast<signed char>(right)));
        }
        d[i] = (accumulate ? d[i] : 0) + total;
    }
}
template <int> static void give_registers() {}
template <int> static void take_registers() {}
static inline void grid_dependency_wait() {}
static inline void grid_launch_dependents() {}
template <int WHOLE> static void copy_or_zeros(u32 target, const void* source, int bytes) {
    if (target % WHOLE || reinterpret_cast<u64>(source) % WHOLE || target + WHOLE > SHARED) abort();
    copies[threadIdx.x].back().push_back({target, source, bytes, WHOLE});
}
static inline void copy_16_or_zeros(u32 target, const void* source, int bytes) { copy_or_zeros<16>(target, source, bytes); }
static inline void copies_commit() { copies[threadIdx.x].push_back({}); }
template <int PENDING> static void copies_wait_but();

// Clusters whose blocks send one another numbers. Several groups of warps may wait, each with a barrier of its own. The blocks run one after
// another, in rounds: with what all blocks sent in the round before, until each of them ends.
struct Sent { u32 target, barrier, bytes; u8 v[16]; bool received; };
enum { MOST_ROUNDS = 4 };
static std::vector<Sent> sent[16], incoming[16];
static unsigned cluster_blocks = 1;                    // of each
static inline u32 cluster_rank() { return blockIdx.x % cluster_blocks; }
static inline u32 cluster_map(u32 address, u32 rank) { return address | rank << 24; }
static inline void cluster_arrive_relaxed() {}
static inline void cluster_wait() {}
static inline void cluster_wait_together() {}
static void cluster_store(u32 address, u32 barrier, const void* v, u32 bytes) {
    if (address >> 24 != barrier >> 24 || address >> 24 >= cluster_blocks) abort();
    Sent s = {address & 0xffffff, barrier & 0xffffff, bytes, {}, false};
    memcpy(s.v, v, bytes);
    sent[address >> 24].push_back(s);
}
static inline void cluster_store_async(u32 address, u32 barrier, const float* v) { cluster_store(address, barrier, v, 16); }
static inline void cluster_store_async(u32 address, u32 barrier, u32 v) { cluster_store(address, barrier, &v, 4); }
template <class V> static void cluster_send(u32 address, u32 barrier, u32 rank, const V& v) {
    cluster_store_async(cluster_map(address, rank), cluster_map(barrier, rank), v);
}
static void barrier_wait_cluster(u32 barrier, u32 parity) {
    for (Sent& s : incoming[cluster_rank()]) {
        if (s.barrier != barrier || s.received) continue;
        if (s.target % s.bytes || s.target + s.bytes > SHARED) abort();
        memcpy(memory + s.target, s.v, s.bytes);
        barrier_at(barrier).bytes -= int(s.bytes);
        s.received = true;
    }
    settle(barrier_at(barrier));
    awaiting++;
    while ((barrier_at(barrier).phase & 1) == parity) meet(POLL);
    awaiting--;
    found++;
}
static bool run_cluster(unsigned x, unsigned y, unsigned z, unsigned threads) {
    for (auto& mail : incoming) mail.clear();
    for (unsigned round = 0; round < MOST_ROUNDS; round++) {
        unfinished = false;
        for (auto& mail : sent) mail.clear();
        for (unsigned i = 0; i < cluster_blocks; i++) {
            blockIdx = {x + i, y, z};
            if (!run_block(threads)) return false;
        }
        if (!unfinished) return true;
        for (unsigned i = 0; i < 16; i++) incoming[i] = sent[i];
    }
    return false;
}
template <int PENDING> static void copies_wait_but() {
    auto& own = copies[threadIdx.x];                   // the last entry is the group that is not committed yet
    while (own.size() > PENDING + 1) {
        for (const Copy& c : own.front()) {
            memset(memory + c.target, 0, c.whole);
            memcpy(memory + c.target, c.source, c.bytes);
        }
        own.erase(own.begin());
    }
}

// Matrix i has the rows at the addresses of lanes 8 i to 8 i + 7; a lane gets two neighbors of row lane / 4, transposed of column lane / 4.
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

// Elements of a fragment's register: of 32, 16 or 8 bits. Pixels may be unsigned.
#ifndef OPERAND_ITEM
#define OPERAND_ITEM 2
#endif
#if OPERAND_ITEM == 4
typedef float Sum;
static float element_of(u32 word, unsigned, bool) { return __uint_as_float(word & 0xffffe000u); }  // tf32: the rest is not multiplied
#elif OPERAND_ITEM == 2
typedef float Sum;
static float element_of(u32 packed, unsigned i, bool) { return i ? high_float(packed) : low_float(packed); }
#else
typedef int Sum;
static int element_of(u32 word, unsigned i, bool pixels) {
    const u8 byte = word >> 8 * i;
#ifdef PIXELS_UNSIGNED
    if (pixels) return byte;
#endif
    return static_cast<signed char>(byte);
}
#endif

static void multiply(Sum (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const u32 own[6] = {a[0], a[1], a[2], a[3], b0, b1};
    show(own, 6);
    constexpr unsigned EACH = 4 / OPERAND_ITEM, HALF = 4 * EACH;   // elements of a register, and of four lanes'
    const unsigned lane = threadIdx.x % 32;
    for (unsigned i = 0; i < 4; i++) {
        const unsigned row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        Sum total = 0;
        for (unsigned k = 0; k < 2 * HALF; k++) {
            // A: row g + 8 (r % 2), elements t EACH + (0, 1, ...) + HALF (r / 2) in register r of lane 4 g + t; B: rows likewise, column g.
            const unsigned at = k % HALF / EACH;
            total += element_of(shown(row % 8 * 4 + at)[row / 8 + k / HALF * 2], k % EACH, true) *
                     element_of(shown(column * 4 + at)[4 + k / HALF], k % EACH, false);
        }
        d[i] += total;
    }
}

// 16 pixels x 8 channels of two taps of a depthwise filter, or of one.
#if OPERAND_ITEM == 2
static void tap_pair(float (&d)[4], const u32 (&a)[4], u32 first, u32 second) { multiply(d, a, first, second); }
static void one_tap(float (&d)[4], u32 low, u32 high, u32 weight) { multiply(d, {low, high, 0u, 0u}, weight, 0u); }
#endif

// The counterpart of load_matrices(): a lane's two neighbors of row lane / 4 of each matrix.
static void stmatrix_x4(u32 address, u32 a, u32 b, u32 c, u32 d) {
    if (address % 16 || address + 16 > SHARED) abort();
    show(&address, 1);
    const u32 words[4] = {a, b, c, d};
    const unsigned lane = threadIdx.x % 32;
    for (unsigned i = 0; i < 4; i++) memcpy(memory + shown(8 * i + lane / 4)[0] + lane % 4 * 4, &words[i], 4);
    meet(WARP);
}

static void stmatrix_x4_trans(u32 address, u32 a, u32 b, u32 c, u32 d) {
    if (address % 16 || address + 16 > SHARED) abort();
    show(&address, 1);
    const u32 words[4] = {a, b, c, d};
    const unsigned lane = threadIdx.x % 32;
    for (unsigned i = 0; i < 4; i++)
        for (unsigned j = 0; j < 2; j++) {             // two neighbors of column lane / 4
            const u16 bits = u16(words[i] >> 16 * j);
            memcpy(memory + shown(8 * i + lane % 4 * 2 + j)[0] + lane / 4 * 2, &bits, 2);
        }
    meet(WARP);
}

static float bounded(float x, float low, float high) { return fminf(fmaxf(x, low), high); }
struct Narrow { float factor, low, high; int zero; };
template <bool FLOAT8> static u32 narrow_four(const Narrow& n, float a, float b, float c, float d) {
    static_assert(!FLOAT8, "integers alone");
    const float v[4] = {a, b, c, d};
    u32 word = 0;
    for (int i = 0; i < 4; i++) word |= u32(u8(int(nearbyintf(min(max(v[i] * n.factor, n.low), n.high))) + n.zero)) << (8 * i);
    return word;
}
template <bool UNSIGNED> static void widen_four(u32 word, float offset, float scale, float (&r)[4]) {
    for (int i = 0; i < 4; i++) r[i] = (float(((UNSIGNED ? word : word ^ 0x80808080u) >> (8 * i) & 255u) + 8388608u) - offset) * scale;
}
template <bool FLOAT8> static u32 narrow_four(float a, float b, float c, float d, float low, float high, int zero) {
    return narrow_four<FLOAT8>(Narrow{1.0f, low, high, zero}, a, b, c, d);
}
