// The rows that selected a matrix, for kernels whose blocks each take one matrix. The including text defines THREADS, BM (rows of a tile), INDICES
// (that a thread reads at a time), Params (rows, index, matrices) and meet(), a barrier of all threads.
#pragma once

constexpr int CHUNK = THREADS * INDICES, WARPS = THREADS / 32;

// The rows of the current tile, and those found after them.
struct Rows {
    int* list;                                     // BM + CHUNK
    int* counts;                                   // WARPS
    int held, next;                                // rows in the list; the next row to look at
    int matrix;

    // Appends those of the next CHUNK rows that select the matrix, in a fixed order. All threads call it.
    __device__ __forceinline__ void collect(const Params& p) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        u32 chosen = 0;
        #pragma unroll
        for (int i = 0; i < INDICES; i++) {
            const int row = next + i * THREADS + threadIdx.x;
            const long long given = row < p.rows ? p.index[row] : 0, wanted = given < 0 ? given + p.matrices : given;
            chosen |= u32(row < p.rows && min(max(wanted, 0ll), p.matrices - 1) == matrix) << i;
        }
        int upto = __popc(chosen);                 // of this lane and the lanes before it
        #pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int before = __shfl_up_sync(~0u, upto, step);
            if (lane >= step) upto += before;
        }
        if (lane == 31) counts[warp] = upto;
        meet();
        int place = held + upto - __popc(chosen), total = 0;
        #pragma unroll
        for (int w = 0; w < WARPS; w++) {
            if (w < warp) place += counts[w];
            total += counts[w];
        }
        #pragma unroll
        for (int i = 0; i < INDICES; i++)
            if (chosen >> i & 1) list[place++] = next + i * THREADS + threadIdx.x;
        held += total;
        next += CHUNK;
        meet();
    }

    // The number of rows of the next tile; 0 after the last one.
    __device__ __forceinline__ int find(const Params& p) {
        while (held < BM && next < p.rows) collect(p);
        return min(held, BM);
    }

    // Moves what is behind the tile to the front.
    __device__ __forceinline__ void drop() {
        held = max(held - BM, 0);
        if (!held) return;
        int rest[INDICES];
        #pragma unroll
        for (int i = 0; i < INDICES; i++) {
            const int at = i * THREADS + threadIdx.x;
            rest[i] = at < held ? list[BM + at] : 0;
        }
        meet();
        #pragma unroll
        for (int i = 0; i < INDICES; i++) {
            const int at = i * THREADS + threadIdx.x;
            if (at < held) list[at] = rest[i];
        }
        meet();
    }
};
