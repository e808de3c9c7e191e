// The inner part of products in true fp32 on scalar units (conv_fp32.cu, and generated matrix products): copies into a ring of tiles, and
// a block's multiply-adds on them. Operands are K-major, [K][pixels or rows] and [K][channels or columns], so that four neighbors are
// one 16-byte load. A warp takes 4 TM x 8 TN of the results, a thread TM x TN.
//
// The including text defines BM, BN, TM, TN (4 or 8), BK (a multiple of 8), STAGES, EARLY, B_PAD (elements between the rows of the second
// operand); DEVICE, u32, u64.
#pragma once

constexpr int WARPS_M = BM / (4 * TM), WARPS_N = BN / (8 * TN), THREADS = 32 * WARPS_M * WARPS_N;
constexpr int A_PITCH = BM + 4;                    // lane l writes row l % 8: rows are four banks apart
constexpr int B_PITCH = BN + B_PAD;
constexpr int STAGE = BK * (A_PITCH + B_PITCH);    // floats
constexpr int ROWS = BM * 8 / THREADS;             // rows of the first operand that a thread copies, each at BK / 8 positions of K
constexpr int CHUNKS = BK * BN / 4 / THREADS;      // 16-byte pieces of the second operand that a thread copies
constexpr int EACH = THREADS / (BN / 4);           // rows of K between them

constexpr int NOWHERE = -0x7fffffff - 1;

// Copies element ``at`` of ``source``, which may be negative; zero where it is NOWHERE.
DEVICE void copy_4(u32 target, const float* source, int at) {
    u64 address;                                   // by one instruction, where the compiler would use four
    asm("mad.wide.s32 %0, %1, 4, %2;" : "=l"(address) : "r"(at), "l"(source));
    asm volatile("{.reg .pred p; setp.eq.s32 p, %2, 0x80000000; cp.async.ca.shared.global [%0], [%1], 4, p;}" ::"r"(target), "l"(address), "r"(at) : "memory");
}
DEVICE void copy_16(u32 target, const float* source, bool valid) {
    asm volatile("{.reg .pred p; setp.eq.u32 p, %2, 0; cp.async.cg.shared.global [%0], [%1], 16, p;}" ::"r"(target), "l"(source), "r"(u32(valid)) : "memory");
}
DEVICE void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
DEVICE void await_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory"); }

// The first row and column of a thread. Its TM rows are four neighbors, then four more 16 further; its TN columns the same, 32 further. The
// lanes are arranged so that a quarter warp reads few 16-byte words of either operand.
DEVICE int own_row() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    return warp % WARPS_M * 4 * TM + ((lane >> 3 & 2) | (lane & 1)) * 4;
}
DEVICE int own_column() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    return warp / WARPS_M * 8 * TN + (lane >> 1 & 7) * 4;
}
constexpr int __device__ row_of(int i) { return i / 4 * 16 + i % 4; }
constexpr int __device__ column_of(int j) { return j / 4 * 32 + j % 4; }

// Loads four elements of shared memory by one instruction. NVRTC may split a plain vector load, and combine its parts differently from run to
// run. (shared_load of ptx.cuh is unknown to the text that includes this file.)
DEVICE void fetch_4(float* to, u32 at) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3]) : "r"(at) : "memory");
}

// A block's multiply-adds over ``steps`` stages of the ring. STAGES - 1 stages are in flight; load(stage) requests the next one. With EARLY
// the barrier between two steps precedes the last products of the first step, which hide it.
template <class Load> DEVICE void multiply_ring(float (&acc)[TM][TN], const float* shared, int steps, const Load& load) {
    float x[2][TM], y[2][TN];                      // of the current position of K, and of the next
    const u32 base = u32(__cvta_generic_to_shared(shared)), a = base + own_row() * 4, b = base + (BK * A_PITCH + own_column()) * 4;
    auto fetch = [&](int at, int k) {
        #pragma unroll
        for (int i = 0; i < TM; i += 4) fetch_4(&x[k % 2][i], a + (at + k * A_PITCH + i * 4) * 4);
        #pragma unroll
        for (int i = 0; i < TN; i += 4) fetch_4(&y[k % 2][i], b + (at + k * B_PITCH + i * 8) * 4);
    };
    #pragma unroll
    for (int i = 0; i < TM * TN; i++) acc[i / TN][i % TN] = 0.0f;
    auto next_step = [&](int at) {
        await_copies();
        __syncthreads();                           // the next step has landed for all threads; all have read the previous step
        fetch(at, 0);
    };
    int at = 0, fill = STAGES - 1;
    if (EARLY) next_step(at);
    #pragma unroll 1
    for (int step = 0; step < steps; step++) {
        if (!EARLY) next_step(at);
        if (step + STAGES - 1 < steps) load(fill);
        copies_end();
        fill = fill + 1 == STAGES ? 0 : fill + 1;
        const int next = at + STAGE == STAGES * STAGE ? 0 : at + STAGE;
        #pragma unroll
        for (int k = 0; k < BK; k++) {
            if (k + 1 < BK) fetch(at, k + 1);
            else if (EARLY) next_step(next);       // after the last step: useless, but harmless
            #pragma unroll
            for (int i = 0; i < TM; i++)
                #pragma unroll
                for (int j = 0; j < TN; j++) acc[i][j] = fmaf(x[k % 2][i], y[k % 2][j], acc[i][j]);
        }
        at = next;
    }
}
