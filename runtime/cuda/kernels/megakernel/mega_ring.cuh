// A ring of slots in shared memory. All that a block reads from memory passes through it, job after job: weights, and keys and values of
// caches. PRODUCERS threads request it, WARPS warps consume it. The data of a later job is in flight while an earlier job waits for rows.
//
// Few requests are in flight at a time (REQUESTS slots per block: 34 KB, about latency times bandwidth). A full ring of requests would
// queue at the memory, and rows that pass between jobs would wait behind it. A job of many slots has LONG_REQUESTS.
//
// generated.cuh defines SLOTS, SLOT_BYTES, REQUESTS and LONG_REQUESTS.
#pragma once

constexpr int WARPS = 16, THREADS = WARPS * 32, PRODUCERS = 4;
static_assert(REQUESTS < SLOTS && LONG_REQUESTS < SLOTS, "a slot that is waited for is not asked for again");

struct Ring {
    u32 base, full, empty;                         // slots, and their barriers
    int slot = 0;
    u32 phase = 0;

    __device__ __forceinline__ Ring(u8* shared)
        : base(smem_address(shared)), full(base + SLOTS * SLOT_BYTES), empty(full + SLOTS * 8) {}
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < SLOTS; i++) barrier_init(full + i * 8, PRODUCERS), barrier_init(empty + i * 8, WARPS);
        barrier_init_fence();
    }
    __device__ __forceinline__ void next() {
        if (++slot == SLOTS) slot = 0, phase ^= 1;
    }
    __device__ __forceinline__ u32 at() const { return base + slot * SLOT_BYTES; }
    __device__ __forceinline__ u32 full_at() const { return full + slot * 8; }
    __device__ __forceinline__ void wait_full() const { barrier_wait(full_at(), phase); }
    __device__ __forceinline__ void wait_empty() const { barrier_wait(empty + slot * 8, phase ^ 1); }
    // The warp has read the slot.
    __device__ __forceinline__ void release(int lane) const {
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + slot * 8);
    }
};
constexpr int RING_BYTES = (SLOTS * (SLOT_BYTES + 16) + 127) / 128 * 128;

// One of the threads that request slots: each thread loads its part of every slot.
struct Producer {
    int part;
    Ring ring, before;                             // ``before``: the first slot that may be in flight
    int waiting = 0, most = REQUESTS;              // slots in flight, and their limit
    u64 policy;                                    // weights are read once: L2 evicts them before data that is read again

    __device__ __forceinline__ Producer(u8* shared, int part) : part(part), ring(shared), before(shared) {
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    }
    // Begins a job of ``slots`` slots.
    __device__ __forceinline__ void job(int slots) { most = slots > 2 * SLOTS ? LONG_REQUESTS : REQUESTS; }
    // Waits until the next slot is free, and fewer than ``most`` others are in flight.
    __device__ __forceinline__ void begin(u32 bytes) {
        ring.wait_empty();
        for (; waiting >= most; waiting--) before.wait_full(), before.next();
        waiting++;
        if (bytes) barrier_expect(ring.full_at(), bytes);
        else barrier_arrive(ring.full_at());
    }
    __device__ __forceinline__ void weights(u32 at, const void* from, u32 bytes) const {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                     ::"r"(ring.at() + at), "l"(from), "r"(bytes), "r"(ring.full_at()), "l"(policy) : "memory");
    }
    __device__ __forceinline__ void cached(u32 at, const void* from, u32 bytes) const { bulk_load(ring.at() + at, from, bytes, ring.full_at()); }
    __device__ __forceinline__ void end() { ring.next(); }
};

DEVICE void sync_warps() { named_barrier(1, THREADS); }        // the consumers of slots
