// Vectors of 16-bit elements in global memory <-> fp32 registers: one access of LANES * 2 bytes, aligned to its size.
#pragma once
#include "ptx.cuh"

template <int LANES> struct Packed;                // LANES elements as 32-bit words
template <> struct Packed<8> { u32 word[4]; };
template <> struct Packed<4> { u32 word[2]; };
template <> struct Packed<2> { u32 word[1]; };
template <> struct Packed<1> { u32 word[1]; };

template <int LANES> DEVICE Packed<LANES> load_packed(const u16* at) {
    Packed<LANES> v;
    if constexpr (LANES == 8) {
        const uint4 x = *reinterpret_cast<const uint4*>(at);
        v.word[0] = x.x, v.word[1] = x.y, v.word[2] = x.z, v.word[3] = x.w;
    } else if constexpr (LANES == 4) {
        const uint2 x = *reinterpret_cast<const uint2*>(at);
        v.word[0] = x.x, v.word[1] = x.y;
    } else if constexpr (LANES == 2) {
        v.word[0] = *reinterpret_cast<const u32*>(at);
    } else {
        v.word[0] = *at;
    }
    return v;
}

template <int LANES> DEVICE void store_packed(u16* at, const Packed<LANES>& v) {
    if constexpr (LANES == 8)
        *reinterpret_cast<uint4*>(at) = make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]);
    else if constexpr (LANES == 4)
        *reinterpret_cast<uint2*>(at) = make_uint2(v.word[0], v.word[1]);
    else if constexpr (LANES == 2)
        *reinterpret_cast<u32*>(at) = v.word[0];
    else
        *at = static_cast<u16>(v.word[0]);
}

template <int LANES> DEVICE float element(const Packed<LANES>& v, int i) {
    return i % 2 ? high_float(v.word[i / 2]) : low_float(v.word[i / 2]);
}

template <int LANES> DEVICE Packed<LANES> pack(const float* x) {
    Packed<LANES> v;
    if constexpr (LANES == 1) {
        v.word[0] = pack1(x[0]);
    } else {
        #pragma unroll
        for (int i = 0; i < LANES / 2; i++) v.word[i] = pack2(x[2 * i], x[2 * i + 1]);
    }
    return v;
}

// fp32 vectors (parameters of norms).
template <int LANES> DEVICE void load_floats(float* x, const float* at) {
    if constexpr (LANES % 4 == 0) {
        #pragma unroll
        for (int i = 0; i < LANES / 4; i++) {
            const float4 v = __ldg(reinterpret_cast<const float4*>(at) + i);
            x[4 * i] = v.x, x[4 * i + 1] = v.y, x[4 * i + 2] = v.z, x[4 * i + 3] = v.w;
        }
    } else {
        #pragma unroll
        for (int i = 0; i < LANES; i++) x[i] = __ldg(at + i);
    }
}
