// Rows pass from job to job as packets: two 16-bit values and a tag, eight bytes that are written and read in one access. A reader that sees
// the expected job's tag also has its values: no flag, no fence, no grid barrier. A fence would wait for earlier stores while memory is busy
// (0.5 to 1.4 us). Tags continue from launch to launch, so that nothing has to be cleared.
//
// A job may run alone, as a launch of its own: then its rows come from plain buffers that earlier launches wrote.
#pragma once
#include "packets.cuh"

struct Source {
    const u16* plain;
    const uint2* packets;                          // packets of the first value, whose index is even
    int from;                                      // the job of the run that produces it, -1: none
    int pitch;                                     // elements between rows, of both forms
};
struct Target {
    u16* plain;
    uint2* packets;
    int pitch;
};
// The launch: the index of its first job, and the tag of a job.
struct Now {
    u32 base;
    int first;
    __device__ __forceinline__ bool here(const Source& s) const { return s.from >= first; }
    __device__ __forceinline__ u32 tag(int job) const { return base + job; }
};

DEVICE uint4 read_packets(const uint2* from) {     // two packets; bypasses L1
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
    return v;
}
DEVICE uint2 read_packet(const uint2* from) {
    uint2 v;
    asm volatile("ld.volatile.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from) : "memory");
    return v;
}
DEVICE void write_packet(uint2* to, u32 word, u32 tag) {
    asm volatile("st.volatile.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(word), "r"(tag) : "memory");
}
DEVICE void write_packets(uint2* to, u32 first, u32 second, u32 tag) { put_packet(reinterpret_cast<char*>(to), make_uint2(first, second), tag); }
struct Tries {
    int count = 0;
    __device__ __forceinline__ void next() {
#ifdef BARRIER_TRAP                                // a protocol fault ends the kernel with an error instead of hanging the GPU
        if (++count > 4000000) __trap();
#endif
    }
};
// Waits for one packet by one lane: waiting for a whole row then causes little traffic.
DEVICE void wait_packet(const uint2* at, u32 tag, int lane) {
    Tries tries;
    if (lane == 0)
        while (read_packet(at).y != tag) tries.next();
    __syncwarp();
}
// Reads N pairs of packets where ``live``; the reads are in flight together.
template <int N> DEVICE void receive(uint2 (&words)[N], const uint2* const (&at)[N], const bool (&live)[N], u32 tag) {
    Tries tries;
    for (bool there = false; !there; tries.next()) {
        uint4 v[N];
        #pragma unroll
        for (int i = 0; i < N; i++)
            if (live[i]) v[i] = read_packets(at[i]);
        there = true;
        #pragma unroll
        for (int i = 0; i < N; i++)
            if (live[i]) there = there && v[i].y == tag && v[i].w == tag, words[i] = make_uint2(v[i].x, v[i].z);
    }
}
// Reads two values of a row, from element ``n`` (even) on.
DEVICE u32 receive_word(const Source& s, long long n, const Now& now) {
    if (!now.here(s)) return __ldcg(reinterpret_cast<const u32*>(s.plain + n));
    Tries tries;
    for (;; tries.next()) {
        const uint2 v = read_packet(s.packets + n / 2);
        if (v.y == now.tag(s.from)) return v.x;
    }
}
