// ONNX's DynamicQuantizeLinear in one launch: the range of a tensor, its scale and zero point, and the tensor rounded by them to uint8.
//
// One cluster takes the tensor, in the order of memory. A thread loads its elements once and keeps them in registers. Each block sends its
// range to all blocks, so each one computes scale and zero point, and rounds its own elements. A NaN makes the range NaN.
//
// generated.cuh defines CLUSTER (blocks), THREADS, VECTORS (accesses of 16 bytes per thread) and WIDE (fp32 elements; otherwise 16 bits).
#include "vectors.cuh"
#include "mma.cuh"
#include "generated.cuh"

constexpr int WARPS = THREADS / 32, LANES = WIDE ? 4 : 8;
static_assert(WARPS <= 32 && (WARPS & (WARPS - 1)) == 0, "a warp joins the ranges of all warps");
static_assert(CLUSTER <= 32 && (CLUSTER & (CLUSTER - 1)) == 0, "a warp joins the ranges of all blocks");

struct Params {
    const u16* x;                                  // of fp32 elements: their halves
    u8* output;
    float* scale;
    u8* zero;
    int vectors;                                   // accesses of the whole tensor
};

DEVICE float at(const Packed<8>& v, int i) {
#if WIDE
    return __uint_as_float(v.word[i]);
#else
    return element(v, i);
#endif
}
DEVICE float smaller(float a, float b) { return a < b || a != a ? a : b; }
DEVICE float larger(float a, float b) { return a > b || a != a ? a : b; }

// Joins the ranges of ``count`` neighboring lanes.
DEVICE void join(float& low, float& high, int count) {
    #pragma unroll
    for (int distance = count / 2; distance > 0; distance /= 2) {
        low = smaller(low, __shfl_xor_sync(0xffffffffu, low, distance));
        high = larger(high, __shfl_xor_sync(0xffffffffu, high, distance));
    }
}

// The range of all threads of the block, in each of them. ``of_warps``: room for each warp's range.
DEVICE void join_warps(float& low, float& high, float2* of_warps) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    join(low, high, 32);
    if (lane == 0) of_warps[warp] = make_float2(low, high);
    __syncthreads();
    low = of_warps[lane % WARPS].x, high = of_warps[lane % WARPS].y;
    join(low, high, WARPS);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) dynamic_rounding(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) u8 shared[];
    float2* of_warps = reinterpret_cast<float2*>(shared + 16);
#if CLUSTER > 1
    float2* of_blocks = of_warps + WARPS;
    const u32 met = smem_address(shared);          // a barrier that counts bytes from all blocks
    const int rank = int(cluster_rank());
    if (threadIdx.x == 0) {
        barrier_init(met, 1);
        barrier_init_fence();
        barrier_expect(met, 8 * CLUSTER);
    }
    cluster_arrive_relaxed();
#else
    const int rank = 0;
#endif
    grid_launch_dependents();
    grid_dependency_wait();
    const int first = rank * THREADS + int(threadIdx.x);
    Packed<8> kept[VECTORS];
    #pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        const int vector = first + k * CLUSTER * THREADS;
        if (vector < p.vectors)
            kept[k] = load_packed<8>(p.x + (long long)vector * 8);
        else
            kept[k].word[0] = kept[k].word[1] = kept[k].word[2] = kept[k].word[3] = 0;   // each range has 0
    }
    float low = 0.0f, high = 0.0f;
    #pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        #pragma unroll
        for (int i = 0; i < LANES; i++) low = smaller(low, at(kept[k], i)), high = larger(high, at(kept[k], i));
    }
    join_warps(low, high, of_warps);
#if CLUSTER > 1
    cluster_wait();                                // the peers run and their barriers are initialized
    if (threadIdx.x < CLUSTER) cluster_send(smem_address(of_blocks + rank), met, threadIdx.x, make_float2(low, high));
    barrier_wait_cluster(met, 0);
    low = of_blocks[threadIdx.x % CLUSTER].x, high = of_blocks[threadIdx.x % CLUSTER].y;
    join(low, high, CLUSTER);
#endif
    float scale = (high - low) / 255.0f;
    scale = scale > 0.0f ? scale : 1.0f;
    const float zero = rintf(smaller(larger(-low / scale, 0.0f), 255.0f));
    if (first == 0) p.scale[0] = scale, p.zero[0] = u8(int(zero));
    #pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        const int vector = first + k * CLUSTER * THREADS;
        if (vector >= p.vectors) break;
        u32 word[2] = {0, 0};
        #pragma unroll
        for (int i = 0; i < LANES; i++) {
            const float y = smaller(larger(rintf(at(kept[k], i) / scale) + zero, 0.0f), 255.0f);
            word[i / 4] |= u32(int(y)) << (i % 4 * 8);
        }
#if WIDE
        reinterpret_cast<u32*>(p.output)[vector] = word[0];
#else
        reinterpret_cast<uint2*>(p.output)[vector] = make_uint2(word[0], word[1]);
#endif
    }
}
