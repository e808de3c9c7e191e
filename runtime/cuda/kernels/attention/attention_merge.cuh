// Adds the results of warpgroups that share queries in attention_sm90.cu (SPLIT). Included after exp2_fast().
#pragma once

constexpr u32 MERGE_BARRIER = TURN_BARRIER;        // a split block has no turns
constexpr int MULTIPLYING = WARPGROUPS * 128;      // threads
constexpr int MERGED_PARTS = HEAD / 8 + 1;         // of 16 bytes, which a thread passes on: its maxima and sums, then its results

// Adds the results of the block's warpgroups, which have the same 64 queries and each a part of the keys. Returns true in the first
// warpgroup, which then has the result, its sums and maxima. ``room``: space of the ring, which nobody reads any more.
DEVICE bool merge(float4* room, int group, float factor, float (&out)[HEAD / 2], float (&sum)[2], float (&maximum)[2]) {
    const int thread = threadIdx.x % 128;
    named_barrier(MERGE_BARRIER, MULTIPLYING);
    if (group > 0) {
        float4* own = room + (group - 1) * MERGED_PARTS * 128 + thread;
        own[0] = make_float4(maximum[0], maximum[1], sum[0], sum[1]);
        #pragma unroll
        for (int j = 0; j < HEAD / 8; j++) own[(j + 1) * 128] = make_float4(out[4 * j], out[4 * j + 1], out[4 * j + 2], out[4 * j + 3]);
        named_barrier_arrive(MERGE_BARRIER, MULTIPLYING);
        return false;
    }
    named_barrier(MERGE_BARRIER, MULTIPLYING);
    float4 ends[WARPGROUPS];                       // maxima and sums of each warpgroup
    ends[0] = make_float4(maximum[0], maximum[1], sum[0], sum[1]);
    float shift[2] = {maximum[0], maximum[1]};
    #pragma unroll
    for (int g = 1; g < WARPGROUPS; g++) {
        ends[g] = room[(g - 1) * MERGED_PARTS * 128 + thread];
        shift[0] = fmaxf(shift[0], ends[g].x), shift[1] = fmaxf(shift[1], ends[g].y);
    }
    sum[0] = sum[1] = 0.0f;
    maximum[0] = shift[0], maximum[1] = shift[1];
    #pragma unroll
    for (int i = 0; i < 2; i++) shift[i] = shift[i] == __int_as_float(0xff800000) ? 0.0f : shift[i] * factor;
    #pragma unroll
    for (int g = 0; g < WARPGROUPS; g++) {
        const float scale[2] = {exp2_fast(ends[g].x * factor - shift[0]), exp2_fast(ends[g].y * factor - shift[1])};
        sum[0] = fmaf(ends[g].z, scale[0], sum[0]), sum[1] = fmaf(ends[g].w, scale[1], sum[1]);
        #pragma unroll
        for (int j = 0; j < HEAD / 8; j++) {
            float* to = out + 4 * j;
            if (g == 0) {
                to[0] *= scale[0], to[1] *= scale[0], to[2] *= scale[1], to[3] *= scale[1];
            } else {
                const float4 more = room[((g - 1) * MERGED_PARTS + j + 1) * 128 + thread];
                to[0] = fmaf(more.x, scale[0], to[0]), to[1] = fmaf(more.y, scale[0], to[1]);
                to[2] = fmaf(more.z, scale[1], to[2]), to[3] = fmaf(more.w, scale[1], to[3]);
            }
        }
    }
    return true;
}
