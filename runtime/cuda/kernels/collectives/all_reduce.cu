// The sum of a small array over the GPUs of one host, in one launch: each GPU pushes its part into the inboxes of all others, and adds the
// parts in its own inbox in rank order. So all GPUs get the same bits.
//
// Block b of a GPU communicates with block b of each other GPU, and with no other block. Epochs count the launches of a block. Inboxes
// alternate between two slots: a block that sees the flag of epoch e + 1 knows that the sender has left epoch e, whose slot epoch e + 2
// overwrites. A flag is released to, and acquired from, the whole system. Waits end after LIMIT, or when the host requests it. Then this GPU
// does not wait any more, its results are wrong, and the host raises an error.
//
// generated.cuh defines WORLD, WIDE (fp32), BFLOAT (bf16), BLOCKS (most blocks) and LIMIT (nanoseconds).
#include "element.cuh"
#include "packets.cuh"

constexpr u32 THREADS = 256, VECTOR = 16 / sizeof(Element);
constexpr u32 CHUNK = THREADS * 16;                // bytes per block
constexpr u32 FLAGS = 1 << 16;                     // bytes before the inboxes
static_assert(WORLD >= 2 && WORLD * BLOCKS * 4 <= FLAGS, "a flag for each block of each rank");

struct Params {
    const Element* x;
    Element* y;
    char* memory[WORLD];                           // per rank: flags [rank][block], then inboxes [rank][slot][block][CHUNK]
    u32* epochs;                                   // [block], then whether this GPU has given up
    u32* word;                                     // in the host's memory: nonzero where waits must end
    u32 count, rank;
};

union Words {
    uint4 bits;
    Element at[VECTOR];
};

DEVICE uint4 fresh(const char* at) {               // bypasses L1: writes of another GPU do not reach it
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}

DEVICE char* inbox(char* memory, u32 from, u32 slot) {
    return memory + FLAGS + u64((from * 2 + slot) * BLOCKS + blockIdx.x) * CHUNK + threadIdx.x * 16;
}

// Waits for a rank's flag of this epoch; false after the limit.
DEVICE bool arrived(const u32* flag, u32 epoch, const u32* word) {
    const u64 start = nanoseconds();
    for (u32 k = 1; word_now(flag) != epoch; ++k) {
        if (k % 256 == 0 && (nanoseconds() - start > LIMIT || word_now(word) != 0)) return false;
    }
    return true;
}

extern "C" __global__ void __launch_bounds__(THREADS) all_reduce(const __grid_constant__ Params p) {
    wait_for_predecessor();
    launch_dependents();
    const u32 b = blockIdx.x, t = threadIdx.x, first = (b * THREADS + t) * VECTOR;
    const u32 epoch = p.epochs[b] + 1, slot = epoch & 1;
    const bool whole = first + VECTOR <= p.count, some = first < p.count;
    Words own;
    if (whole) {
        own.bits = *reinterpret_cast<const uint4*>(p.x + first);
    } else if (some) {
#pragma unroll
        for (u32 i = 0; i < VECTOR; ++i) own.at[i] = p.x[min(first + i, p.count - 1)];
    }
    if (some) {
#pragma unroll
        for (u32 r = 0; r < WORLD; ++r) {
            if (r != p.rank) *reinterpret_cast<uint4*>(inbox(p.memory[r], p.rank, slot)) = own.bits;
        }
    }
    __syncthreads();
    if (t < WORLD && t != p.rank) {
        char* other = p.memory[0];
#pragma unroll
        for (u32 r = 1; r < WORLD; ++r) other = t == r ? p.memory[r] : other;
        char* mine = p.memory[0];
#pragma unroll
        for (u32 r = 1; r < WORLD; ++r) mine = p.rank == r ? p.memory[r] : mine;
        asm volatile("fence.acq_rel.sys;" ::: "memory");
        tell(reinterpret_cast<u32*>(other) + p.rank * BLOCKS + b, epoch);
        u32* given_up = p.epochs + BLOCKS;
        if (word_now(given_up) == 0 && !arrived(reinterpret_cast<const u32*>(mine) + t * BLOCKS + b, epoch, p.word)) {
            tell(given_up, 1 + t);
            tell(p.word, 1 + t);
        }
    }
    __syncthreads();
    if (some) {
        float sum[VECTOR] = {};
#pragma unroll
        for (u32 r = 0; r < WORLD; ++r) {
            Words v;
            char* mine = p.memory[0];
#pragma unroll
            for (u32 k = 1; k < WORLD; ++k) mine = p.rank == k ? p.memory[k] : mine;
            v.bits = r == p.rank ? own.bits : fresh(inbox(mine, r, slot));
#pragma unroll
            for (u32 i = 0; i < VECTOR; ++i) sum[i] = r ? sum[i] + float(widen(v.at[i])) : float(widen(v.at[i]));
        }
        Words out;
#pragma unroll
        for (u32 i = 0; i < VECTOR; ++i) out.at[i] = narrow<Element>(sum[i]);
        if (whole) {
            *reinterpret_cast<uint4*>(p.y + first) = out.bits;
        } else {
            for (u32 i = 0; first + i < p.count; ++i) p.y[first + i] = out.at[i];
        }
    }
    if (t == 0) p.epochs[b] = epoch;
}
