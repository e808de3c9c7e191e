// The work of a block of the Hopper convolution: whole tiles, a part of one tile's K (SPLIT), or a span of the K steps of many (STREAM).
//
// STREAM is stream-K (Osama et al., 2023): the K steps of all tiles form one sequence, which is cut into one equal span per block. A tile
// that is cut belongs to the span with its first steps. The later spans begin with their part of this tile, send its accumulators through
// global memory, and continue. The owner reaches the tile at the end of its span, when these partial sums have long arrived, and adds them
// in the order of K: results repeat to the bit. The copy engine loads them through the ring of stages, which then carries no operands.
//
// An owner waits only for blocks of lower index (spans are numbered from the end of the grid). The GPU starts those blocks first, and they
// wait for no block above them, so the owner makes progress even where not all blocks are resident. p.arrived counts the warps of a span
// that have sent; it is zero between launches, since the one block that reads a count resets it.
#pragma once

struct Span {
    int number;
    u32 begin, end;                                // K steps, counted over all tiles
};

struct Work {                                      // the K steps of a tile to compute
    int tile, k_begin, k_count;
};

// The beginning of a span; span_begin(last + 1) is the end of the last. The host ensures that this does not overflow.
DEVICE u32 span_begin(const Params& p, int span) { return u32(p.tiles) * u32(p.k_steps) * u32(span) / gridDim.x; }

DEVICE Span own_span(const Params& p) {
    const int number = gridDim.x - 1 - blockIdx.x;
    return {number, span_begin(p, number), span_begin(p, number + 1)};
}

DEVICE Work first_work(const Params& p, const Span& span) {
    const int tile = span.begin / p.k_steps, k = span.begin % p.k_steps;
    return {tile, k, min(p.k_steps - k, int(span.end - span.begin))};
}

DEVICE Work split_work(const Params& p, int tile, int rank) {
    const int k_begin = SPLIT > 1 ? p.k_steps * rank / SPLIT : 0;
    return {tile, k_begin, (SPLIT > 1 ? p.k_steps * (rank + 1) / SPLIT : p.k_steps) - k_begin};
}

// Advances to the next tile; false at the end.
DEVICE bool next_work(const Params& p, const Span& span, Work& work, int tile_step) {
    if (!STREAM) {
        work.tile += tile_step;
        return work.tile < p.tiles;
    }
    work.tile++;
    work.k_begin = 0;
    work.k_count = min(p.k_steps, int(span.end) - work.tile * p.k_steps);
    return work.k_count > 0;
}

#if STREAM
// The last span that holds steps of this span's last tile. The span's own number if that tile is complete or another span owns it.
DEVICE int last_sender(const Params& p, const Span& span) {
    const u32 tile = (span.end - 1) / p.k_steps * p.k_steps;
    int last = span.number;
    if (tile >= span.begin)
        while (span_begin(p, last + 1) < tile + p.k_steps) last++;
    return last;
}

// Waits until a span has sent its accumulators. Called by one thread, which then lets the copy engine read them.
DEVICE void await_sums(const Params& p, int span) {
    u32 count = 0;
    for (int tries = 0; count != CONSUMERS / 32; tries++) {
        count = load_acquire(p.arrived + span);
#ifdef BARRIER_TRAP
        if (tries > 20000000) __trap();
#endif
    }
    p.arrived[span] = 0;
    asm volatile("fence.proxy.async;" ::: "memory");
}

// The accumulators of a span's first tile in global memory: pieces of 16 bytes of each thread in turn, in register order.
struct Sums {
    static constexpr int PIECES = MT * BN / 8;     // of 16 bytes, per thread
    static constexpr u32 PIECE_BYTES = CONSUMERS * 16;
    static constexpr int CHUNK = STAGE_BYTES / PIECE_BYTES;    // pieces per stage of the ring
    static constexpr int CHUNKS = (PIECES + CHUNK - 1) / CHUNK;

    static __device__ __forceinline__ u32 chunk_bytes(int chunk) { return min(CHUNK, PIECES - chunk * CHUNK) * PIECE_BYTES; }
    static __device__ __forceinline__ u8* chunk(const Params& p, int span, int chunk) {
        return p.partial + (u64(span) * PIECES + chunk * CHUNK) * PIECE_BYTES;
    }

    static __device__ __forceinline__ void send(const Params& p, int span, const Acc (&sum)[MT][BN / 2]) {
        Acc4* to = reinterpret_cast<Acc4*>(chunk(p, span, 0)) + threadIdx.x;
        #pragma unroll
        for (int i = 0; i < PIECES; i++) {
            const Acc* v = &sum[i / (BN / 8)][i % (BN / 8) * 4];
            Acc4 four;
            four.x = v[0], four.y = v[1], four.z = v[2], four.w = v[3];
            to[i * CONSUMERS] = four;
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) add_release(p.arrived + span, 1);
    }

    // wait() gives the next stage once it is full; done() releases it.
    template <class Wait, class Done>
    static __device__ __forceinline__ void receive(Acc (&sum)[MT][BN / 2], u32 ring, const Wait& wait, const Done& done) {
        #pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            const u32 at = ring + wait() * STAGE_BYTES + threadIdx.x * 16;
            #pragma unroll
            for (int i = 0; i < CHUNK; i++) {
                const int piece = chunk * CHUNK + i;
                if (piece >= PIECES) break;
                Acc4 four;
                shared_load(at + i * PIECE_BYTES, four);
                Acc* v = &sum[piece / (BN / 8)][piece % (BN / 8) * 4];
                v[0] += four.x, v[1] += four.y, v[2] += four.z, v[3] += four.w;
            }
            __syncwarp();
            done();
        }
    }
};
#endif
