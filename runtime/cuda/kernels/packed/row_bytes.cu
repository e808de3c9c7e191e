// Rows of 16-bit floats as int8, with a scale per row: its largest magnitude becomes 127.
//
//   scale[row] = largest / 127,  number[row, k] = round(x[row, k] * (127 / largest))
//
// A block has a row, which it reads once. A row that is not finite gets a scale that is not finite.
//
// generated.cuh defines THREADS and VECTORS (of eight elements, per thread).
#include "ptx.cuh"
#include "generated.cuh"

struct Params {
    const u16* x;                                  // [rows][pitch], rows aligned to 16 bytes
    u8* numbers;                                   // [rows][stored], stored a multiple of 16; zeros beyond depth
    float* scales;
    int depth, pitch, stored;
};

// The maximum over all threads, returned to all of them.
DEVICE u32 largest_of_block(u32 value) {
    __shared__ u32 of_warp[THREADS / 32];
    value = __reduce_max_sync(0xffffffffu, value);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    return __reduce_max_sync(0xffffffffu, of_warp[threadIdx.x % (THREADS / 32)]);
}

DEVICE u32 magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }    // a NaN exceeds every other value

// Four int8 results in a word.
DEVICE u32 four_bytes(float a, float b, float c, float d, float inverse) {
    const u32 low = __byte_perm(__float2int_rn(__fmul_rn(a, inverse)), __float2int_rn(__fmul_rn(b, inverse)), 0x0040);
    const u32 high = __byte_perm(__float2int_rn(__fmul_rn(c, inverse)), __float2int_rn(__fmul_rn(d, inverse)), 0x0040);
    return __byte_perm(low, high, 0x5410);
}

extern "C" __global__ void __launch_bounds__(THREADS) row_bytes(const __grid_constant__ Params p) {
    grid_launch_dependents();
    grid_dependency_wait();
    const u16* row = p.x + (long long)blockIdx.x * p.pitch;
    uint4 held[VECTORS];
    u32 found = 0;
    #pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int at = (v * THREADS + threadIdx.x) * 8;
        held[v] = at < p.depth ? *reinterpret_cast<const uint4*>(row + at) : make_uint4(0, 0, 0, 0);
    }
    #pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int left = p.depth - (v * THREADS + threadIdx.x) * 8;
        u32* word = reinterpret_cast<u32*>(&held[v]);
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            if (left < 2 * i + 2) word[i] &= left < 2 * i + 1 ? 0u : 0xffffu;      // memory after the row
            found = max(found, max(magnitude(low_float(word[i])), magnitude(high_float(word[i]))));
        }
    }
    const float largest = __uint_as_float(largest_of_block(found));
    const float inverse = largest > 0.0f ? __fdiv_rn(127.0f, largest) : 0.0f;
    if (threadIdx.x == 0) p.scales[blockIdx.x] = __fdiv_rn(largest, 127.0f);
    #pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int at = (v * THREADS + threadIdx.x) * 8;
        const u32* word = reinterpret_cast<const u32*>(&held[v]);
        uint2 made;
        made.x = four_bytes(low_float(word[0]), high_float(word[0]), low_float(word[1]), high_float(word[1]), inverse);
        made.y = four_bytes(low_float(word[2]), high_float(word[2]), low_float(word[3]), high_float(word[3]), inverse);
        if (at < p.stored) *reinterpret_cast<uint2*>(p.numbers + (long long)blockIdx.x * p.stored + at) = made;
    }
}
