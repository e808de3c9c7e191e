// Adds the results of warpgroups, and of blocks, that share queries in attention_sm90.cu (SPLIT, SHARERS). Included after exp2_fast().
#pragma once

constexpr u32 MERGE_BARRIER = TURN_BARRIER;        // a split block has no turns
constexpr int MULTIPLYING = WARPGROUPS * 128;      // threads
constexpr int MERGED_PARTS = HEAD / 8 + 1;         // of 16 bytes, which a thread passes on: its maxima and sums, then its results

// Adds the results of COUNT warpgroups with the same queries and each a part of the keys; the first one's are in registers. ``part_of``:
// 16 bytes of another one's results: part 0 has its maxima and sums.
template <int COUNT, class PartOf> DEVICE void add_results(PartOf part_of, float factor, float (&out)[HEAD / 2], float (&sum)[2], float (&maximum)[2]) {
    float4 ends[COUNT];                            // maxima and sums of each warpgroup
    ends[0] = make_float4(maximum[0], maximum[1], sum[0], sum[1]);
    float shift[2] = {maximum[0], maximum[1]};
    #pragma unroll
    for (int g = 1; g < COUNT; g++) {
        ends[g] = part_of(g, 0);
        shift[0] = fmaxf(shift[0], ends[g].x), shift[1] = fmaxf(shift[1], ends[g].y);
    }
    sum[0] = sum[1] = 0.0f;
    maximum[0] = shift[0], maximum[1] = shift[1];
    #pragma unroll
    for (int i = 0; i < 2; i++) shift[i] = shift[i] == __int_as_float(0xff800000) ? 0.0f : shift[i] * factor;
    #pragma unroll
    for (int g = 0; g < COUNT; g++) {
        const float scale[2] = {exp2_fast(ends[g].x * factor - shift[0]), exp2_fast(ends[g].y * factor - shift[1])};
        sum[0] = fmaf(ends[g].z, scale[0], sum[0]), sum[1] = fmaf(ends[g].w, scale[1], sum[1]);
        #pragma unroll
        for (int j = 0; j < HEAD / 8; j++) {
            float* to = out + 4 * j;
            if (g == 0) {
                to[0] *= scale[0], to[1] *= scale[0], to[2] *= scale[1], to[3] *= scale[1];
            } else {
                const float4 more = part_of(g, j + 1);
                to[0] = fmaf(more.x, scale[0], to[0]), to[1] = fmaf(more.y, scale[0], to[1]);
                to[2] = fmaf(more.z, scale[1], to[2]), to[3] = fmaf(more.w, scale[1], to[3]);
            }
        }
    }
}

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
    add_results<WARPGROUPS>([&](int g, int part) { return room[((g - 1) * MERGED_PARTS + part) * 128 + thread]; }, factor, out, sum, maximum);
    return true;
}

#if SHARERS > 1
constexpr int OTHERS_THREADS = LIVE_WARPS * 32;    // of a warpgroup, with queries
constexpr u32 OTHERS_BYTES = MERGED_PARTS * OTHERS_THREADS * 16;

// Adds the results of the cluster's blocks, each in its first warpgroup. The other blocks send theirs to the first one when nobody reads
// its ring any more. Returns true in the first block.
DEVICE bool merge_blocks(const Room& at, int warp, int lane, float factor, float (&out)[HEAD / 2], float (&sum)[2], float (&maximum)[2]) {
    const int rank = cluster_rank();
    settle(out);
    __syncwarp();
    cluster_arrive_relaxed();
    cluster_wait();
    if (rank == 0) {
        if (warp >= LIVE_WARPS) return true;
        barrier_wait_cluster(at.others_full, 0);
        const float4* room = at.merged + warp * 32 + lane;
        add_results<SHARERS>([&](int r, int part) { return room[((r - 1) * MERGED_PARTS + part) * OTHERS_THREADS]; }, factor, out, sum, maximum);
        return true;
    }
    if (warp >= LIVE_WARPS) return false;
    const u32 barrier = cluster_map(at.others_full, 0);
    const u32 room = cluster_map(at.keys, 0) + ((rank - 1) * MERGED_PARTS * OTHERS_THREADS + warp * 32 + lane) * 16;
    const float ends[4] = {maximum[0], maximum[1], sum[0], sum[1]};
    cluster_store_async(room, barrier, ends);
    #pragma unroll
    for (int j = 0; j < HEAD / 8; j++) cluster_store_async(room + (j + 1) * OTHERS_THREADS * 16, barrier, out + 4 * j);
    return false;
}
#else
constexpr u32 OTHERS_BYTES = 0;
#endif
