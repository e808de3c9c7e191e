// What the two Hopper convolution kernels share: the parameter block and the epilogue on wgmma's accumulators.
#pragma once
#include "ptx.cuh"
#include "generated.cuh"

struct Source {
    int channel_blocks, taps_h, taps_w, dilation_h, dilation_w, stride_h, stride_w, pad_h, pad_w;
};

struct Params {
    TensorMap weights, pixels0, pixels1, output, residual;
    const float* bias;
    u16* output_pointer;          // a cluster's reduction stores and reads these directly
    const u16* residual_pointer;
    int channels, pixel_count, out_h, out_w;
    int channel_tiles, tiles, k_steps, reverse;
    Source source[2];
};

// Accumulators of 16 channels (this warp's rows: lane / 4 and + 8) x 16 pixels -> epilogue -> 16-bit [pixel][channel] rows.
// ``address`` is this lane's row of the four 8x8 matrices: lanes 0-7 and 8-15 name pixels 0-7 of channels 0-7 and 8-15, lanes
// 16-31 pixels 8-15. With HAS_RESIDUAL the rows hold the residual before, and are overwritten in place.
DEVICE void finish_16_pixels(u32 address, const float* v, const float (&bias)[2]) {
    u32 r0 = 0, r1 = 0, r2 = 0, r3 = 0;
    if (HAS_RESIDUAL) ldmatrix_x4_trans(address, r0, r1, r2, r3);
    stmatrix_x4_trans(address,
        pack2(epilogue(v[0], bias[0], low_float(r0)), epilogue(v[1], bias[0], high_float(r0))),
        pack2(epilogue(v[2], bias[1], low_float(r1)), epilogue(v[3], bias[1], high_float(r1))),
        pack2(epilogue(v[4], bias[0], low_float(r2)), epilogue(v[5], bias[0], high_float(r2))),
        pack2(epilogue(v[6], bias[1], low_float(r3)), epilogue(v[7], bias[1], high_float(r3))));
}

// The same of eight pixels: lanes 0-15 name the rows (16-31 repeat valid ones).
DEVICE void finish_8_pixels(u32 address, const float* v, const float (&bias)[2]) {
    u32 r0 = 0, r1 = 0;
    if (HAS_RESIDUAL) ldmatrix_x2_trans(address, r0, r1);
    stmatrix_x2_trans(address,
        pack2(epilogue(v[0], bias[0], low_float(r0)), epilogue(v[1], bias[0], high_float(r0))),
        pack2(epilogue(v[2], bias[1], low_float(r1)), epilogue(v[3], bias[1], high_float(r1))));
}

// ---- the epilogue of short kernels: partial sums of a cluster, direct stores --------------------------------------------

// One warpgroup's tile of 64 * M_TILES channels x COLUMNS pixels, shared by the SPLIT ranks of a cluster that each hold a partial
// sum over their part of K. Rank r owns the blocks r, r + SPLIT, ... of eight columns: the others send it their accumulators as
// they lie in registers, and it adds them in rank order (deterministic). Then each warp turns its 16 channels x 8 columns around in
// shared memory, and a lane finishes and stores four channels of one pixel. With SPLIT == 1 nothing is sent: stores without the
// barriers and the copy engine's latency that a TMA store has.
template <int M_TILES, int COLUMNS, int SPLIT_WAYS> struct DirectStore {
    static constexpr int SLOTS = (COLUMNS / 8 + SPLIT_WAYS - 1) / SPLIT_WAYS;
    static constexpr u32 INBOX_BYTES = SPLIT_WAYS > 1 ? M_TILES * SLOTS * SPLIT_WAYS * 2048 : 0;   // of one warpgroup
    static constexpr u32 SCRATCH_BYTES = 4 * M_TILES * SLOTS * 640;
    static constexpr u32 BYTES = INBOX_BYTES + SCRATCH_BYTES;

    // Bytes that this rank's barrier waits for, of one warpgroup.
    static __device__ __forceinline__ u32 expected(int rank) {
        return M_TILES * ((COLUMNS / 8 + SPLIT_WAYS - 1 - rank) / SPLIT_WAYS) * SPLIT_WAYS * 2048;
    }

    int channel, rank, lane, quarter;
    long long offset[SLOTS];                       // of the pixel's first channel; negative: outside
    float4 bias[M_TILES];
    uint2 residual[M_TILES][SLOTS];

    // Before griddepcontrol.wait: addresses and constants. locate(column) gives the pixel's element offset or -1.
    template <class Locate>
    __device__ __forceinline__ void prepare(const Params& p, int first_channel, int rank_, int quarter_, int lane_, const Locate& locate) {
        rank = rank_, lane = lane_, quarter = quarter_;
        channel = first_channel + quarter * 16 + lane % 4 * 4;
        #pragma unroll
        for (int m = 0; m < M_TILES; m++)
            bias[m] = channel + m * 64 < p.channels ? __ldg(reinterpret_cast<const float4*>(p.bias + channel + m * 64)) : make_float4(0, 0, 0, 0);
        #pragma unroll
        for (int i = 0; i < SLOTS; i++) {
            const int column = (rank + i * SPLIT_WAYS) * 8 + lane / 4;
            offset[i] = column < COLUMNS ? locate(column) : -1;
        }
    }

    // After it.
    __device__ __forceinline__ void load_residual(const Params& p) {
        if (!HAS_RESIDUAL) return;
        #pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            #pragma unroll
            for (int i = 0; i < SLOTS; i++) {
                residual[m][i] = make_uint2(0u, 0u);
                if (offset[i] >= 0 && channel + m * 64 < p.channels)
                    residual[m][i] = *reinterpret_cast<const uint2*>(p.residual_pointer + offset[i] + channel + m * 64);
            }
        }
    }

    // ``memory``: BYTES of shared memory of this warpgroup, at the same address in every block of the cluster.
    __device__ __forceinline__ void finish(const Params& p, float (&acc)[M_TILES][COLUMNS / 2], u32 memory, u32 reduced) {
        const u32 own_fragment = (quarter * 32 + lane) * 16;
        if (SPLIT_WAYS > 1) {
            __syncwarp();
            cluster_wait();                        // the peers run, and their barriers count: their shared memory may be written
            #pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                #pragma unroll
                for (int j = 0; j < COLUMNS / 8; j++) {
                    const u32 slot = memory + ((m * SLOTS + j / SPLIT_WAYS) * SPLIT_WAYS + rank) * 2048 + own_fragment;
                    cluster_store_async(cluster_map(slot, j % SPLIT_WAYS), cluster_map(reduced, j % SPLIT_WAYS), &acc[m][j * 4]);
                }
            }
            if (threadIdx.x == 0) mark(5);
            barrier_wait_cluster(reduced, 0);
            if (threadIdx.x == 0) mark(6);
        }
        const u32 scratch = memory + INBOX_BYTES + quarter * (M_TILES * SLOTS * 640);
        const u32 column = scratch + (lane % 4 * 2 * 20 + lane / 4) * 4;   // [8 pixels][16 channels], pitch 20: no bank conflicts
        #pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            #pragma unroll
            for (int i = 0; i < SLOTS; i++) {
                float4 sum;
                if (SPLIT_WAYS > 1) {
                    const u32 slot = memory + (m * SLOTS + i) * SPLIT_WAYS * 2048 + own_fragment;
                    float4 part[SPLIT_WAYS];
                    #pragma unroll
                    for (int r = 0; r < SPLIT_WAYS; r++) part[r] = shared_load(slot + r * 2048);
                    sum = part[0];
                    #pragma unroll
                    for (int r = 1; r < SPLIT_WAYS; r++) {
                        sum.x += part[r].x;
                        sum.y += part[r].y;
                        sum.z += part[r].z;
                        sum.w += part[r].w;
                    }
                } else {
                    sum = make_float4(acc[m][i * 4], acc[m][i * 4 + 1], acc[m][i * 4 + 2], acc[m][i * 4 + 3]);
                }
                const u32 target = column + (m * SLOTS + i) * 640;
                shared_store(target, sum.x);
                shared_store(target + 80, sum.y);
                shared_store(target + 32, sum.z);
                shared_store(target + 112, sum.w);
            }
        }
        __syncwarp();
        #pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            #pragma unroll
            for (int i = 0; i < SLOTS; i++) {
                const float4 v = shared_load(scratch + (m * SLOTS + i) * 640 + (lane / 4 * 20 + lane % 4 * 4) * 4);
                const uint2 r = HAS_RESIDUAL ? residual[m][i] : make_uint2(0u, 0u);
                const float4 c = bias[m];
                if (offset[i] >= 0 && channel + m * 64 < p.channels)
                    *reinterpret_cast<uint2*>(p.output_pointer + offset[i] + channel + m * 64) =
                        make_uint2(pack2(epilogue(v.x, c.x, low_float(r.x)), epilogue(v.y, c.y, high_float(r.x))),
                                   pack2(epilogue(v.z, c.z, low_float(r.y)), epilogue(v.w, c.w, high_float(r.y))));
            }
        }
    }
};
