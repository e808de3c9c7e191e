// Final steps of kernels with packed weights: results in groups of four, and the sums of blocks that split K.
//
// The kernel's Params have bias, residual, output, columns and out_pitch; generated.cuh defines HAS_RESIDUAL and epilogue().
#pragma once

// The biases of four columns before ``columns``. The array is padded to a multiple of four.
DEVICE float4 bias_of_four(const float* bias, int column, int columns) {
    return column < columns ? __ldg(reinterpret_cast<const float4*>(bias + column)) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

// Whether four neighboring columns of a row are stored, and read as a residual, in one access: rows of both begin at multiples of 8 bytes
// where their pitch is a multiple of four.
template <class Params> DEVICE bool is_whole(const Params& p, int column) { return column + 4 <= p.columns && p.out_pitch % 4 == 0; }

template <class Params> DEVICE float4 residual_of_four(const Params& p, int row, int column) {
    const u16* const at = p.residual + (long long)row * p.out_pitch + column;
    if (is_whole(p, column)) {
        const uint2 v = *reinterpret_cast<const uint2*>(at);
        return make_float4(low_float(v.x), high_float(v.x), low_float(v.y), high_float(v.y));
    }
    float r[4];
    #pragma unroll
    for (int i = 0; i < 4; i++) r[i] = column + i < p.columns ? unpack1(at[i]) : 0.0f;
    return make_float4(r[0], r[1], r[2], r[3]);
}

// Stores values of four neighboring columns of a row.
template <class Params> DEVICE void store_values(const Params& p, int row, int column, const float4& v) {
    u16* const to = p.output + (long long)row * p.out_pitch + column;
    if (is_whole(p, column)) {
        *reinterpret_cast<uint2*>(to) = make_uint2(pack2(v.x, v.y), pack2(v.z, v.w));
        return;
    }
    const float y[4] = {v.x, v.y, v.z, v.w};
    #pragma unroll
    for (int i = 0; i < 4; i++)
        if (column + i < p.columns) to[i] = pack1(y[i]);
}

// Stores four results from their accumulators.
template <class Params> DEVICE void store_four(const Params& p, int row, int column, const float4& sum, const float4& bias) {
    const float4 r = HAS_RESIDUAL ? residual_of_four(p, row, column) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    store_values(p, row, column, make_float4(epilogue(sum.x, bias.x, r.x), epilogue(sum.y, bias.y, r.y), epilogue(sum.z, bias.z, r.z), epilogue(sum.w, bias.w, r.w)));
}

// The partial sums of a tile, COUNT groups of four, where PARTS blocks split K.
template <int PARTS, int COUNT> struct PartialSums {
    float4* all;
    u32* arrived;
    u32 tile;

    __device__ __forceinline__ float4* place(int part, int i) const { return all + (u64(tile) * PARTS + part) * COUNT + i; }
    __device__ __forceinline__ void put(int part, int i, const float4& sum) const { *place(part, i) = sum; }

    // Whether this block arrives last. Thread 0 counts, and tells the others through ``word`` in shared memory. The caller puts a fence after its
    // stores.
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

    // Adds the parts in the order of K.
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
