// What follows a norm in its launch, besides stages without operands: a modulation (with MODULATED), and per-channel operands of a stage
// (with CHANNEL_STAGES).
#pragma once
#include "tile_vectors.cuh"

// A factor and a shift for each image and channel, after the scale and bias of a norm: (x * scale + bias) * (factor + plus) + shift.
struct Modulation {
    const Element* factor;                         // a vector of channels for each image
    const Element* shift;                          // likewise; null: no shift
    int factor_pitch, shift_pitch;                 // elements between the vectors of consecutive images; 0: one vector for all
    float plus;

    // Makes the modulation a part of scale and bias of LANES channels from `channel` on.
    __device__ __forceinline__ void apply(float (&scale)[LANES], float (&bias)[LANES], int image, int channel) const {
        const u64 policy = evict_normally();
        const Vector factors = load_vector(factor + (long long)image * factor_pitch + channel, policy);
        Vector shifts = {};
        if (shift) shifts = load_vector(shift + (long long)image * shift_pitch + channel, policy);
        #pragma unroll
        for (int i = 0; i < LANES; i++) {
            const float by = lane_of(factors, i) + plus;
            scale[i] *= by;
            bias[i] = fmaf(bias[i], by, lane_of(shifts, i));
        }
    }
};

// The second argument of epilogue() for each of LANES channels from `channel` on. ``numbers``: [2][channels].
#if CHANNEL_STAGES
struct StageOperands {
    float first[LANES], second[LANES];

    __device__ __forceinline__ StageOperands(const float* numbers, int channels, int channel) {
        load_floats<LANES>(first, numbers + channel);
        load_floats<LANES>(second, numbers + channels + channel);
    }
    __device__ __forceinline__ float4 of(int lane) const { return make_float4(0.0f, first[lane], second[lane], 0.0f); }
};
#else
struct StageOperands {
    __device__ __forceinline__ StageOperands(const float*, int, int) {}
    __device__ __forceinline__ float of(int) const { return 0.0f; }
};
#endif
