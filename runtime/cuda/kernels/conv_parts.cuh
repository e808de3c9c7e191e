// How blocks of a cluster that share K exchange their sums, each of which then finishes a part of the tile's pixels: part of conv_sm90.cu.
//
// A block keeps its sums of its own pixels, and sends each of the others those of theirs, into the ring of stages, which has no operands
// left to carry once all blocks of the cluster have multiplied. So no shared memory is set apart for the exchange, and tiles can be large.
#pragma once

#if PARTS
static_assert(SPLIT > 1 && SHARERS == 1 && !DIRECT && !STREAM && !ALTERNATE && !WEIGHTS_STATIONARY && !SCATTER && !PROLOGUE && OUT_BUFFERS == 1,
              "parts are of blocks that share K and nothing else, each with one tile");
static_assert(BN % (8 * SPLIT) == 0 && OUT_ITEM == 2, "a part is whole groups of eight pixels in 16 bits");

struct Parts {
    static constexpr int BLOCKS = OWN_PIXELS / 8;                                  // of eight pixels
    static constexpr u32 FROM_ONE = MT * BLOCKS * 2048;                            // bytes of one block's sums, of a warpgroup
    static constexpr u32 INBOX_BYTES = (SPLIT - 1) * FROM_ONE;

    // Afterwards the first OWN_PIXELS columns are the whole sums of the block's own pixels. ``inbox``: of this warpgroup, at the same address
    // in every block; ``reduced`` counts what comes. Own sums come first, then the others' in the order of ranks: results repeat to the bit.
    static __device__ __forceinline__ void exchange(Acc (&sum)[MT][BN / 2], u32 inbox, u32 reduced, int rank) {
        const u32 fragment = inbox + threadIdx.x % 128 * 16;
        turn(sum, rank);
        __syncwarp();
        cluster_arrive();
        cluster_wait();                            // all have multiplied: their rings are free, and their barriers count
        #pragma unroll
        for (int next = 1; next < SPLIT; next++) {
            const int to = rank + next < SPLIT ? rank + next : rank + next - SPLIT;
            const u32 target = cluster_map(fragment + (rank < to ? rank : rank - 1) * FROM_ONE, to), barrier = cluster_map(reduced, to);
            #pragma unroll
            for (int i = 0; i < MT * BLOCKS; i++)
                cluster_store_async(target + i * 2048, barrier, &sum[i / BLOCKS][(next * BLOCKS + i % BLOCKS) * 4]);
        }
        barrier_wait_cluster(reduced, 0);
        #pragma unroll
        for (int from = 0; from < SPLIT - 1; from++) {
            #pragma unroll
            for (int i = 0; i < MT * BLOCKS; i++) {
                Acc4 part;
                shared_load(fragment + from * FROM_ONE + i * 2048, part);
                Acc* v = &sum[i / BLOCKS][i % BLOCKS * 4];
                v[0] += part.x, v[1] += part.y, v[2] += part.z, v[3] += part.w;
            }
        }
    }

    // Parts in turn, this rank's first. Indices of registers are constants, so each bit of the rank turns by its value, or not.
    static __device__ __forceinline__ void turn(Acc (&sum)[MT][BN / 2], int rank) {
        #pragma unroll
        for (int by = 1; by < SPLIT; by *= 2) {
            const bool wanted = rank & by;
            #pragma unroll
            for (int i = 0; i < MT * OWN_PIXELS / 2; i++) {
                Acc* at = &sum[i / (OWN_PIXELS / 2)][i % (OWN_PIXELS / 2)];
                Acc v[SPLIT];
                #pragma unroll
                for (int part = 0; part < SPLIT; part++) v[part] = at[part * OWN_PIXELS / 2];
                #pragma unroll
                for (int part = 0; part < SPLIT; part++)
                    at[part * OWN_PIXELS / 2] = wanted ? v[(part + by) % SPLIT] : v[part];
            }
        }
    }
};
static_assert(GROUPS * Parts::INBOX_BYTES <= STAGES * STAGE_BYTES, "the ring holds what a block is sent");
#endif
