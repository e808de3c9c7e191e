// Sums and gathers of small arrays over the GPUs of one host, in one launch and one trip over the link: each GPU pushes its part into the
// inboxes of all others, in packets that carry their own flags (packets.cuh), and reads the parts of the others from its own inbox. A sum adds
// in rank order, so all GPUs get the same bits.
//
// A thread communicates with the thread of the same index on each other GPU, and with no other thread. The flag is the epoch, which counts the
// launches of a block. Inboxes alternate between two slots. A GPU that sends epoch e + 1 has ended the launch of epoch e; this GPU has read the
// packets of epoch e + 1 before it overwrites the slot of epoch e with epoch e + 2. Waits end after LIMIT, or when the host requests it. Then
// this GPU hardly waits any more, the results are wrong, and the host raises an error. The host's word is polled rarely: thousands of threads
// that read it together would take a tenth of a millisecond.
//
// generated.cuh defines WORLD, GATHER (otherwise a sum), WIDE (fp32), BFLOAT (bf16), BLOCKS (most blocks), INBOXES (bytes before the
// inboxes) and LIMIT (nanoseconds).
#include "element.cuh"
#include "packets.cuh"

constexpr u32 THREADS = 256, COUNT = 8 / sizeof(Element);      // elements per thread
constexpr u32 CHUNK = THREADS * 16;                // bytes of a block's packets

struct Params {
    const Element* x;
    Element* y;                                    // gathered: [rank][count]
    char* memory[WORLD];                           // per rank: packets [rank][slot][block][thread] after INBOXES
    u32* epochs;                                   // [block], then whether this GPU has given up
    u32* word;                                     // in the host's memory: nonzero where waits must end
    u32 count, rank;
};

// Element i of two words; put_element() needs zero in its place.
#if WIDE
DEVICE Element element(const uint2& words, u32 i) { return __uint_as_float(i == 0 ? words.x : words.y); }
DEVICE void put_element(uint2& words, u32 i, Element v) { (i == 0 ? words.x : words.y) = __float_as_uint(v); }
#else
DEVICE Element element(const uint2& words, u32 i) {
    Element v;
    v.bits = u16((i < 2 ? words.x : words.y) >> i % 2 * 16);
    return v;
}
DEVICE void put_element(uint2& words, u32 i, Element v) { (i < 2 ? words.x : words.y) |= u32(v.bits) << i % 2 * 16; }
#endif

DEVICE char* packet(char* memory, u32 from, u32 slot) {
    return memory + INBOXES + u64((from * 2 + slot) * BLOCKS + blockIdx.x) * CHUNK + threadIdx.x * 16;
}

// Reads the packets of all other ranks, or gives up.
DEVICE void receive(uint2 (&parts)[WORLD], char* mine, u32 slot, u32 epoch, const Params& p) {
    u64 start = 0;
    for (u32 k = 1;; ++k) {
        u32 missing = WORLD;
#pragma unroll
        for (u32 r = 0; r < WORLD; ++r) {
            if (r != p.rank && !take_packet(parts[r], packet(mine, r, slot), epoch)) missing = r;
        }
        if (missing == WORLD) return;
        if (k % 256 == 0 && word_now(p.epochs + BLOCKS) != 0) return;
        if (k % 4096 == 0) {
            if (start == 0) start = nanoseconds();
            if (nanoseconds() - start > LIMIT || word_now(p.word) != 0) {
                tell(p.epochs + BLOCKS, 1);
                tell(p.word, 1 + missing);
                return;
            }
        }
    }
}

DEVICE uint2 load(const Element* at, u32 first, u32 count) {
    if (first + COUNT <= count) return *reinterpret_cast<const uint2*>(at + first);
    uint2 words = {0u, 0u};
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) {
        if (first + i < count) put_element(words, i, at[first + i]);
    }
    return words;
}

DEVICE void store(Element* at, u32 first, u32 count, bool aligned, const uint2& words) {
    if (aligned && first + COUNT <= count) {
        *reinterpret_cast<uint2*>(at + first) = words;
        return;
    }
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) {
        if (first + i < count) at[first + i] = element(words, i);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) flagged(const __grid_constant__ Params p) {
    launch_dependents();
    wait_for_predecessor();
    const u32 b = blockIdx.x, first = (b * THREADS + threadIdx.x) * COUNT, epoch = p.epochs[b] + 1, slot = epoch & 1;
    const uint2 own = load(p.x, first, p.count);
    if (first < p.count) {
        uint2 parts[WORLD];
        char* mine = p.memory[0];
#pragma unroll
        for (u32 r = 0; r < WORLD; ++r) {
            if (r != p.rank) put_packet(packet(p.memory[r], p.rank, slot), own, epoch);
            else mine = p.memory[r], parts[r] = own;
        }
        receive(parts, mine, slot, epoch, p);
#if GATHER
#pragma unroll
        for (u32 r = 0; r < WORLD; ++r) store(p.y + u64(r) * p.count, first, p.count, p.count % COUNT == 0, parts[r]);
#else
        uint2 out = {0u, 0u};
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) {
            float sum = float(widen(element(parts[0], i)));
#pragma unroll
            for (u32 r = 1; r < WORLD; ++r) sum += float(widen(element(parts[r], i)));
            put_element(out, i, narrow<Element>(sum));
        }
        store(p.y, first, p.count, true, out);
#endif
    }
    __syncthreads();                               // all threads have read the epoch
    if (threadIdx.x == 0) p.epochs[b] = epoch;
}
