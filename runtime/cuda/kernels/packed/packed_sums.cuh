// The ends of kernels with packed weights: results in fours, and sums of blocks that share K.
//
// The kernel's Params have bias, residual, output, columns and out_pitch; generated.cuh defines HAS_RESIDUAL and epilogue().
#pragma once

// The biases of four columns, which end at ``columns``. There is memory for a multiple of four.
DEVICE float4 bias_of_four(const float* bias, int column, int columns) {
    return column < columns ? __ldg(reinterpret_cast<const float4*>(bias + column)) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

// Four neighbouring columns of a row. Rows of the output, and of the residual, begin at multiples of 8 bytes where their pitch is a multiple of four.
template <class Params> DEVICE void store_four(const Params& p, int row, int column, const float4& sum, const float4& bias) {
    const float x[4] = {sum.x, sum.y, sum.z, sum.w}, c[4] = {bias.x, bias.y, bias.z, bias.w};
    const long long at = (long long)row * p.out_pitch + column;
    float r[4], y[4];
    const bool whole = column + 4 <= p.columns && p.out_pitch % 4 == 0;
    if (HAS_RESIDUAL && whole) {
        const uint2 v = *reinterpret_cast<const uint2*>(p.residual + at);
        r[0] = low_float(v.x), r[1] = high_float(v.x), r[2] = low_float(v.y), r[3] = high_float(v.y);
    } else {
        #pragma unroll
        for (int i = 0; i < 4; i++) r[i] = HAS_RESIDUAL && column + i < p.columns ? unpack1(p.residual[at + i]) : 0.0f;
    }
    #pragma unroll
    for (int i = 0; i < 4; i++) y[i] = epilogue(x[i], c[i], r[i]);
    if (whole) {
        *reinterpret_cast<uint2*>(p.output + at) = make_uint2(pack2(y[0], y[1]), pack2(y[2], y[3]));
        return;
    }
    #pragma unroll
    for (int i = 0; i < 4; i++)
        if (column + i < p.columns) p.output[at + i] = pack1(y[i]);
}

// The sums, in COUNT fours, of a tile whose K is shared by PARTS blocks.
template <int PARTS, int COUNT> struct PartialSums {
    float4* all;
    u32* arrived;
    u32 tile;

    __device__ __forceinline__ float4* place(int part, int i) const { return all + (u64(tile) * PARTS + part) * COUNT + i; }
    __device__ __forceinline__ void put(int part, int i, const float4& sum) const { *place(part, i) = sum; }

    // Whether this block comes last: told by thread 0, which counts, by the word of shared memory. Behind a fence of what was put.
    template <class Barrier> __device__ __forceinline__ bool is_last(u32* word, const Barrier& barrier) const {
        if (threadIdx.x == 0) {
            *word = count_arrival(arrived + tile) == PARTS - 1;
            if (*word) arrived[tile] = 0;
        }
        barrier();
        if (!*word) return false;
        __threadfence();
        return true;
    }

    // In the order of K.
    __device__ __forceinline__ float4 sum(int i) const {
        float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        #pragma unroll
        for (int part = 0; part < PARTS; part++) {
            const float4 v = __ldcg(place(part, i));
            total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
        }
        return total;
    }
};
