// Device code for measurements: operands that look like activations, and the difference of two results.
#include "general.cuh"
#include "generated.cuh"   // typedef ... Element;

DEVICE u32 mixed(u32 x) {   // Wellons' "lowbias32"
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

struct FillParams { Element* x; u64 count; u32 seed; };

// Approximately normal values, standard deviation 0.7: the sum of two uniform values.
extern "C" __global__ void __launch_bounds__(256) fill(const __grid_constant__ FillParams p) {
    for (u64 i = blockIdx.x * 256ull + threadIdx.x; i < p.count; i += gridDim.x * 256ull) {
        const u32 bits = mixed(u32(i) ^ mixed(p.seed + u32(i >> 32)));
        p.x[i] = narrow<Element>(float(int(bits & 0xffff) + int(bits >> 16) - 0xffff) * (1.7f / 0xffff));
    }
}

struct CompareParams { const Element* a; const Element* b; u64 count; u32* found; };

// found: bits of the largest |a - b|, bits of the largest |b|, and the number of elements that are NaN in only one of the two.
extern "C" __global__ void __launch_bounds__(256) compare(const __grid_constant__ CompareParams p) {
    float error = 0.0f, scale = 0.0f;
    u32 odd = 0;
    for (u64 i = blockIdx.x * 256ull + threadIdx.x; i < p.count; i += gridDim.x * 256ull) {
        const float a = float(widen(p.a[i])), b = float(widen(p.b[i]));
        if (is_nan(a) || is_nan(b)) {
            odd += is_nan(a) != is_nan(b);
        } else if (a != b) {            // equal infinities have no difference
            error = fmaxf(error, fabsf(a - b));
        }
        if (!is_nan(b)) scale = fmaxf(scale, fabsf(b));
    }
    atomicMax(&p.found[0], __float_as_uint(error));     // the bits of nonnegative floats are ordered like the floats
    atomicMax(&p.found[1], __float_as_uint(scale));
    if (odd) atomicAdd(&p.found[2], odd);
}
