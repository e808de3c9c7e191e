// The two small products of squeeze-and-excitation in one launch, for Hopper:
//
//   hidden[n, h] = between_one(sum_c x[n, c] * first[h, c]);   out[n, o] = epilogue(sum_h hidden[n, h] * second[o, h])
//
// Latency bounds it. A cluster of SPLIT blocks takes IMAGES images. Each block makes p.hidden_block hidden values of each image, sends them
// to all blocks of the cluster, and makes p.out_block results. Both parts of the weights are on their way to shared memory before
// griddepcontrol.wait. Images are the rows of mma.sync, of which eight are used.
//
// Sums have one order for all SPLIT and IMAGES: warps take steps of K in turn, and the warps' sums are added in their order.
//
// Rows in shared memory have an odd multiple of 64 bytes, so that the 16 bytes of eight lanes lie in different banks. A lane's 16 bytes
// are its operands of two products: the order of K within 32 elements is free.
//
// generated.cuh defines IMAGES (up to 8), SPLIT, WARPS, between_one() and epilogue().
#include "vectors.cuh"
#include "generated.cuh"

constexpr int THREADS = WARPS * 32, STEP = 32, AHEAD = 4;
static_assert(IMAGES >= 1 && IMAGES <= 8 && SPLIT >= 2 && SPLIT <= 16, "a tile of this kernel");

struct Params {
    const u16* x;                                  // [images][x_pitch]
    const u16* first;                              // [SPLIT * hidden_block][first_pitch], zero-filled
    const u16* second;                             // [SPLIT * out_block][second_pitch], zero-filled
    const float* first_bias;                       // [SPLIT * hidden_block]
    const float* bias;                             // [SPLIT * out_block]
    u16* output;                                   // [images][out_pitch]
    int images, channels, hidden, results;
    int x_pitch, out_pitch, first_pitch, second_pitch;
    int hidden_block, out_block;                   // multiples of eight
};

struct Room {                                      // shared memory, by bytes from its begin
    int hidden, sums, first, second;
    __device__ __forceinline__ explicit Room(const Params& p) {
        hidden = 128;                              // behind two barriers
        sums = hidden + 8 * p.second_pitch * 2;
        first = sums + WARPS * 8 * p.hidden_block * 4;
        second = first + p.hidden_block * p.first_pitch * 2;
    }
};

DEVICE uint4 shared_row(const u8* shared, int begin, int row, int pitch, int k) {
    return *reinterpret_cast<const uint4*>(shared + begin + (row * pitch + k) * 2);
}

// Eight images (rows) times eight columns; the rows behind them are zero.
DEVICE void multiply(float (&d)[4], u32 x0, u32 x1, u32 w0, u32 w1) {
#if defined(DTYPE_BF16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %6, %5, %6}, {%7, %8}, {%0, %1, %2, %3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %6, %5, %6}, {%7, %8}, {%0, %1, %2, %3};"
#endif
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(x0), "r"(x1), "r"(0u), "r"(w0), "r"(w1));
}

// A step of K, in two sums, so that products do not wait for each other.
struct Sums {
    float even[4] = {}, odd[4] = {};
    __device__ __forceinline__ void step(const uint4& x, const uint4& w) {
        multiply(even, x.x, x.y, w.x, w.y);
        multiply(odd, x.z, x.w, w.z, w.w);
    }
    __device__ __forceinline__ float2 whole() const { return make_float2(even[0] + odd[0], even[1] + odd[1]); }
};

// Sums of this warp's steps of K over the block's hidden values.
DEVICE void sum_hidden(const Params& p, u8* shared, const Room& room, int image, int warp, int lane) {
    const int row = lane / 4, k_lane = lane % 4 * 8, steps = (p.channels + STEP - 1) / STEP;
    const bool mine = row < IMAGES && image + row < p.images;
    const u16* x = p.x + (long long)(image + (mine ? row : 0)) * p.x_pitch + k_lane;
    float* sums = reinterpret_cast<float*>(shared + room.sums) + (warp * 8 + row) * p.hidden_block + lane % 4 * 2;
    for (int tile = 0; tile < p.hidden_block; tile += 16) {
        const bool two = tile + 8 < p.hidden_block;
        Sums sum[2];
        for (int begin = warp; begin < steps; begin += WARPS * AHEAD) {
            uint4 v[AHEAD];
            #pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int k = (begin + i * WARPS) * STEP;
                v[i] = mine && k + k_lane < p.channels ? *reinterpret_cast<const uint4*>(x + k) : make_uint4(0u, 0u, 0u, 0u);
            }
            #pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int k = (begin + i * WARPS) * STEP;
                if (k >= p.channels) break;
                sum[0].step(v[i], shared_row(shared, room.first, tile + row, p.first_pitch, k + k_lane));
                if (two) sum[1].step(v[i], shared_row(shared, room.first, tile + 8 + row, p.first_pitch, k + k_lane));
            }
        }
        *reinterpret_cast<float2*>(sums + tile) = sum[0].whole();
        if (two) *reinterpret_cast<float2*>(sums + tile + 8) = sum[1].whole();
    }
}

// Adds the warps' sums, and sends eight hidden values of an image at a time to each block of the cluster.
DEVICE void send_hidden(const Params& p, u8* shared, const Room& room, int rank) {
    const int eights = p.hidden_block / 8;
    for (int i = threadIdx.x; i < SPLIT * IMAGES * eights; i += THREADS) {
        const int part = i % eights * 8, image = i / eights % IMAGES, peer = i / eights / IMAGES;
        const float* at = reinterpret_cast<const float*>(shared + room.sums) + image * p.hidden_block + part;
        float sum[8] = {};
        #pragma unroll
        for (int w = 0; w < WARPS; w++) {
            #pragma unroll
            for (int j = 0; j < 8; j += 4) {
                const float4 v = *reinterpret_cast<const float4*>(at + w * 8 * p.hidden_block + j);
                sum[j] += v.x, sum[j + 1] += v.y, sum[j + 2] += v.z, sum[j + 3] += v.w;
            }
        }
        const int hidden = rank * p.hidden_block + part;
        #pragma unroll
        for (int j = 0; j < 8; j++)                // zeros behind the last: the activation need not make a number of them
            sum[j] = hidden + j < p.hidden ? between_one(sum[j], __ldg(p.first_bias + hidden + j), 0.0f) : 0.0f;
        const Packed<8> packed = pack<8>(sum);
        const int word[4] = {int(packed.word[0]), int(packed.word[1]), int(packed.word[2]), int(packed.word[3])};
        const u32 target = smem_address(shared) + room.hidden + (image * p.second_pitch + hidden) * 2;
        cluster_store_async(cluster_map(target, peer), cluster_map(smem_address(shared) + 8, peer), word);
    }
}

// The block's results.
DEVICE void make_results(const Params& p, const u8* shared, const Room& room, int image, int rank, int warp, int lane) {
    const int row = lane / 4, k_lane = lane % 4 * 8, begin = rank * p.out_block;
    const bool mine = row < IMAGES && image + row < p.images;
    for (int tile = warp * 8; tile < p.out_block; tile += WARPS * 8) {
        const int channel = begin + tile + lane % 4 * 2;
        if (begin + tile >= p.results) break;
        const float2 bias = __ldg(reinterpret_cast<const float2*>(p.bias + channel));
        Sums sums;
        for (int k = 0; k < SPLIT * p.hidden_block; k += STEP)
            sums.step(shared_row(shared, room.hidden, row, p.second_pitch, k + k_lane),
                      shared_row(shared, room.second, tile + row, p.second_pitch, k + k_lane));
        const float2 sum = sums.whole();
        if (mine)
            *reinterpret_cast<u32*>(p.output + (long long)(image + row) * p.out_pitch + channel) =
                pack2(epilogue(sum.x, bias.x, 0.0f), epilogue(sum.y, bias.y, 0.0f));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) excitation_sm90(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 shared[];
    grid_launch_dependents();
    const int rank = int(cluster_rank()), image = int(blockIdx.x) / SPLIT * IMAGES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Room room(p);
    const u32 weights = smem_address(shared), arrived = weights + 8;   // barriers
    const u32 first_bytes = p.hidden_block * p.first_pitch * 2, second_bytes = p.out_block * p.second_pitch * 2;
    if (threadIdx.x == 0) {
        barrier_init(weights, 1);
        barrier_init(arrived, 1);
        barrier_init_fence();
        barrier_expect(arrived, SPLIT * IMAGES * p.hidden_block * 2);
        barrier_expect(weights, first_bytes + second_bytes);
        bulk_load(smem_address(shared) + room.first, p.first + (long long)rank * p.hidden_block * p.first_pitch, first_bytes, weights);
        bulk_load(smem_address(shared) + room.second, p.second + (long long)rank * p.out_block * p.second_pitch, second_bytes, weights);
    }
    // What no block sends: rows of absent images, and the last step's elements behind the hidden values.
    const int sent = SPLIT * p.hidden_block;
    for (int i = threadIdx.x; i < 8 * p.second_pitch / 8; i += THREADS) {
        const int row = i / (p.second_pitch / 8), k = i % (p.second_pitch / 8) * 8;
        if (row >= IMAGES || k >= sent)
            *reinterpret_cast<uint4*>(shared + room.hidden + (row * p.second_pitch + k) * 2) = make_uint4(0u, 0u, 0u, 0u);
    }
    __syncthreads();
    cluster_arrive();
    barrier_wait(weights, 0);
    grid_dependency_wait();
    sum_hidden(p, shared, room, image, warp, lane);
    __syncthreads();
    cluster_wait();                                // every block's barriers are ready
    send_hidden(p, shared, room, rank);
    barrier_wait_cluster(arrived, 0);
    make_results(p, shared, room, image, rank, warp, lane);
}
