// Sums of groups of channels over a block. Each thread holds a vector of LANES neighboring channels of a slab of whole groups.
//
// Sums are of differences from a pivot of each group, so that a large mean does not cancel the deviations.
// generated.cuh defines LANES, THREADS, SPAN (groups that a vector may touch) and SHARE (neighboring threads that sum a group: a power of
// two up to 32).
#pragma once
#include "tile_vectors.cuh"

static_assert(SHARE <= 32 && (SHARE & (SHARE - 1)) == 0 && SPAN <= LANES, "part of a warp; a group has a lane");

// The groups of the vector that begins at `channel` of the slab.
struct VectorGroups {
    int first, passed, group;                      // the group of lane 0, its channels before the vector, channels per group

    __device__ __forceinline__ VectorGroups(int channel, int group) : first(channel / group), passed(channel % group), group(group) {}
    // Picks a lane's value from one value per group of the vector.
    __device__ __forceinline__ float pick(const float (&value)[SPAN], int lane) const {
        float picked = value[0];
        #pragma unroll
        for (int k = 1; k < SPAN; k++) picked = passed + lane >= k * group ? value[k] : picked;
        return picked;
    }
    // Sums the lanes of each of the vector's groups.
    __device__ __forceinline__ void fold(const float (&lane_sum)[LANES], float (&sum)[SPAN]) const {
        #pragma unroll
        for (int k = 0; k < SPAN; k++) {
            sum[k] = 0.0f;
            #pragma unroll
            for (int i = 0; i < LANES; i++) {
                const int from_next = passed + i - (k + 1) * group;
                sum[k] += from_next < 0 && from_next >= -group ? lane_sum[i] : 0.0f;
            }
        }
    }
};

// Entries in a row of the table [vectors][SPAN][pitch]: one per line, and one more where that keeps the columns in different banks.
DEVICE int table_pitch(int lines) { return lines | 1; }

// Stores a thread's sums and sums of squares. Called by all threads of all vectors and lines.
DEVICE void put_sums(float2* table, const VectorGroups& own, int vector, int line, int lines, const float (&sum)[LANES],
                     const float (&square)[LANES]) {
    float sums[SPAN], squares[SPAN];
    own.fold(sum, sums);
    own.fold(square, squares);
    const int pitch = table_pitch(lines);
    float2* row = table + vector * SPAN * pitch;
    #pragma unroll
    for (int k = 0; k < SPAN; k++) {
        row[k * pitch + line] = make_float2(sums[k], squares[k]);
        if (line == 0 && pitch > lines) row[k * pitch + lines] = make_float2(0.0f, 0.0f);
    }
}

// The sum and the sum of squares of group g, by SHARE threads. A group's rows are neighbors; only zeros lie between them.
DEVICE float2 group_sums(const float2* table, int g, int group, int lines) {
    const int pitch = table_pitch(lines), from = g * group / LANES, to = (g * group + group - 1) / LANES;
    const int first = from * SPAN + g - from * LANES / group, last = from == to ? first : to * SPAN;
    float sum = 0.0f, square = 0.0f;
    #pragma unroll 4
    for (int i = first * pitch + threadIdx.x % SHARE; i < (last + 1) * pitch; i += SHARE) sum += table[i].x, square += table[i].y;
    return make_float2(warp_sum<SHARE>(sum), warp_sum<SHARE>(square));
}
