// Two products of a vector for each image, the second of what the first one makes: the gate of squeeze-and-excitation.
//
//   hidden[h] = round(between_one(sum_k first[h, k] x[k]))        out[c] = epilogue(sum_h second[c, h] hidden[h])
//
// A cluster of CLUSTER blocks takes an image. Each block makes a share of the hidden vector and tells it to all of them, then a share of the
// result. Both shares of the weights are in shared memory before the kernel that makes the vectors has ended: they depend on
// no other one. 16-bit operands, fp32 sums in one order.
//
// generated.cuh defines CLUSTER, WARPS, between_one() and epilogue().
#include "vectors.cuh"
#include "mma.cuh"
#include "generated.cuh"

constexpr int THREADS = WARPS * 32, PART = 8;      // lanes that share a sum of the second product

struct Params {
    const u16* x;                                  // [images][x_pitch]
    const u16* first;                              // [hidden][depth]
    const float* first_bias;                       // [hidden]
    const u16* second;                             // [channels][hidden]
    const float* second_bias;                      // [channels]
    u16* output;                                   // [images][out_pitch]
    int depth, hidden, channels;                   // depth and hidden: multiples of 8
    int rows, columns;                             // of the hidden vector and of the result, that a block makes
    int x_pitch, out_pitch;
};

DEVICE void copy(u16* to, const u16* from, int elements) {
    for (int i = threadIdx.x * 8; i < elements; i += THREADS * 8) copy_16_or_zeros(smem_address(to + i), from + i, 16);
}
DEVICE void add_products(float& sum, const u16* a, const u16* b) {
    const Packed<8> v = load_packed<8>(a), w = load_packed<8>(b);
    #pragma unroll
    for (int i = 0; i < 8; i++) sum = fmaf(element(v, i), element(w, i), sum);
}

#if CLUSTER > 1
DEVICE void put(float* at, int rank, float v) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(cluster_map(smem_address(at), rank)), "f"(v) : "memory");
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS) gemv_pair(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) u8 shared[];
    grid_launch_dependents();
#if CLUSTER > 1
    const int rank = int(cluster_rank());
#else
    const int rank = 0;
#endif
    const int image = blockIdx.x / CLUSTER, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = rank * p.rows, rows = min(p.rows, p.hidden - row);             // none, or fewer, for the last blocks
    const int column = rank * p.columns, columns = min(p.columns, p.channels - column);
    float* hidden = reinterpret_cast<float*>(shared);                              // [p.hidden], of all blocks
    u16* x = reinterpret_cast<u16*>(hidden + p.hidden);
    u16* first = x + p.depth;
    u16* second = first + p.rows * p.depth;
    float* first_bias = reinterpret_cast<float*>(second + p.columns * p.hidden);
    float* second_bias = first_bias + p.rows;
    copy(first, p.first + (long long)row * p.depth, rows * p.depth);
    copy(second, p.second + (long long)column * p.hidden, columns * p.hidden);
    for (int i = threadIdx.x; i < rows; i += THREADS) first_bias[i] = __ldg(p.first_bias + row + i);
    for (int i = threadIdx.x; i < columns; i += THREADS) second_bias[i] = __ldg(p.second_bias + column + i);
#if CLUSTER > 1
    cluster_arrive();
#endif
    grid_dependency_wait();
    copy(x, p.x + (long long)image * p.x_pitch, p.depth);
    copies_commit();
    copies_wait_but<0>();
    __syncthreads();
#if CLUSTER > 1
    cluster_wait();                                // the peers run: their shared memory may be written
#endif
    for (int r = warp; r < rows; r += WARPS) {
        float sum = 0.0f;
        for (int k = lane * 8; k < p.depth; k += 256) add_products(sum, x + k, first + r * p.depth + k);
        #pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
        const float y = unpack1(pack1(between_one(sum, first_bias[r], 0.0f)));
#if CLUSTER > 1
        if (lane < CLUSTER) put(hidden + row + r, lane, y);
#else
        if (lane == 0) hidden[row + r] = y;
#endif
    }
#if CLUSTER > 1
    cluster_arrive();
    cluster_wait();
#else
    __syncthreads();
#endif
    for (int begin = 0; begin < columns; begin += THREADS / PART) {
        const int c = begin + int(threadIdx.x) / PART;
        float sum = 0.0f;
        for (int k = lane % PART * 8; k < p.hidden && c < columns; k += PART * 8) {
            const Packed<8> w = load_packed<8>(second + c * p.hidden + k);
            #pragma unroll
            for (int i = 0; i < 8; i++) sum = fmaf(element(w, i), hidden[k + i], sum);
        }
        #pragma unroll
        for (int mask = PART / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
        if (lane % PART == 0 && c < columns)
            p.output[(long long)image * p.out_pitch + column + c] = pack1(epilogue(sum, second_bias[c], 0.0f));
    }
}
