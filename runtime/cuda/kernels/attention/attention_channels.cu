// Attention between channels (cross-covariance attention: El-Nouby et al., "XCiT", 2021; DaViT's channel attention): for each head of
// C channels over many tokens, out = softmax(factor * (q / |q|) (k / |k|)^T) v, where q, k and v are [channel][token], C x C scores are sums
// over all tokens, and |.| is the norm of a channel over its tokens. In memory the channels of a token are contiguous.
//
// A block makes all scores of a head and the results of WARPS x 16 tokens: other blocks of the head make the same scores, which costs
// less than a launch. Each warp sums q^T k over every WARPS-th sixteen of tokens by mma.sync, and the squares of what it loads for that;
// norms become factors of rows and columns of the scores. Then the warps add their sums up in a fixed order, take the softmax of a row
// each, and multiply it with their own tokens' values.
//
// generated.cuh defines WARPS, CHANNELS (C, filled up to a multiple of 16 with zeros), SLOTS (sixteens of tokens in a warp's ring),
// WIDTH (bytes of a copy: 16 by cp.async, or 4), NORMALIZE and multiply().
#include "ptx.cuh"
#include "mma.cuh"
#include "generated.cuh"

constexpr int THREADS = WARPS * 32, TILES = CHANNELS / 16;
constexpr int PITCH = CHANNELS + 8;                // of a row in shared memory: eight rows of an ldmatrix hit all banks
constexpr int TOKENS_BYTES = 16 * PITCH * 2, SLOT_BYTES = 2 * TOKENS_BYTES;
constexpr int VALUES_BYTES = WARPS * TOKENS_BYTES, WEIGHTS_BYTES = CHANNELS * PITCH * 2;
constexpr int SQUARES = 2 * CHANNELS, SUMS = CHANNELS * PITCH;
constexpr float LOG2_E = 1.4426950408889634f;
static_assert(CHANNELS % 16 == 0 && CHANNELS <= 64 && CHANNELS % WARPS == 0, "a lane has two columns at most, a warp whole rows");

struct View {                                      // strides in elements; channels are contiguous
    long long batch, head;
    int position;
};

struct Params {
    const u16 *queries, *keys, *values;
    u16* output;
    const float* factors;                          // of each head's scores
    int tokens, channels;
    float least_query, least_key;                  // the least norms that are divided by
    View of_queries, of_keys, of_values, of_output;
};

// Sixteen tokens from ``first`` on, by one warp; zeros behind the last token and the last channel.
DEVICE void load_tokens(u8* shared, u32 at, const u16* source, int position, int first, const Params& p) {
    constexpr int EACH = WIDTH / 2, COPIES = CHANNELS / EACH;
    #pragma unroll
    for (int n = 0; n < 16 * COPIES / 32; n++) {
        const int i = n * 32 + threadIdx.x % 32, row = i / COPIES, channel = i % COPIES * EACH;
        const bool live = first + row < p.tokens && channel < p.channels;
        const u16* from = live ? source + (long long)(first + row) * position + channel : source;
        const u32 to = at + (row * PITCH + channel) * 2;
        if (WIDTH == 16)
            copy_16_or_zeros(smem_address(shared + to), from, live ? 16 : 0);
        else
            *reinterpret_cast<u32*>(shared + to) = live ? *reinterpret_cast<const u32*>(from) : 0u;
    }
}

DEVICE float squares(u32 packed) { return low_float(packed) * low_float(packed) + high_float(packed) * high_float(packed); }

// The sum over the four lanes that share a row of a fragment.
DEVICE float sum_of_four(float v) {
    v += __shfl_xor_sync(0xffffffffu, v, 1);
    return v + __shfl_xor_sync(0xffffffffu, v, 2);
}

// What a channel with these sums of squares (one of each warp) is multiplied by.
DEVICE float reciprocal_norm(const float* sums, float least) {
    if (!NORMALIZE) return 1.0f;
    float total = 0.0f;
    #pragma unroll
    for (int w = 0; w < WARPS; w++) total += sums[w * SQUARES];
    const float norm = fmaxf(sqrtf(total), least);
    return norm == 0.0f ? 1.0f : 1.0f / norm;
}

struct Sums {
    float scores[TILES][2 * TILES][4];             // a fragment's row: a channel of the queries; column: of the keys
    float query[TILES][2], key[2 * TILES];         // squares

    inline __device__ void clear() {
        #pragma unroll
        for (int m = 0; m < TILES; m++) {
            query[m][0] = query[m][1] = 0.0f;
            #pragma unroll
            for (int n = 0; n < 2 * TILES; n++)
                #pragma unroll
                for (int i = 0; i < 4; i++) scores[m][n][i] = 0.0f;
        }
        #pragma unroll
        for (int n = 0; n < 2 * TILES; n++) key[n] = 0.0f;
    }

    // Adds sixteen tokens, which lie in shared memory as [token][channel].
    inline __device__ void add(u32 queries, u32 keys) {
        const int lane = threadIdx.x % 32;
        const u32 rows = (lane % 8 + lane / 16 * 8) * PITCH * 2 + lane / 8 % 2 * 16;   // of q^T: channels 0-7, 8-15 of tokens 0-7, then 8-15
        const u32 columns = lane % 16 * PITCH * 2 + lane / 16 * 16;                    // of k: tokens 0-7, 8-15 of channels 0-7, then 8-15
        u32 a[TILES][4];
        #pragma unroll
        for (int m = 0; m < TILES; m++) {
            ldmatrix_x4_trans(queries + rows + m * 32, a[m][0], a[m][1], a[m][2], a[m][3]);
            query[m][0] += squares(a[m][0]) + squares(a[m][2]);
            query[m][1] += squares(a[m][1]) + squares(a[m][3]);
        }
        #pragma unroll
        for (int n = 0; n < TILES; n++) {
            u32 b[4];
            ldmatrix_x4_trans(keys + columns + n * 32, b[0], b[1], b[2], b[3]);
            key[2 * n] += squares(b[0]) + squares(b[1]);
            key[2 * n + 1] += squares(b[2]) + squares(b[3]);
            #pragma unroll
            for (int m = 0; m < TILES; m++) {
                multiply(scores[m][2 * n], a[m], b[0], b[1]);
                multiply(scores[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }

    // The warp's part of the scores [channel][PITCH], and of the squares [queries, keys][channel].
    inline __device__ void store(float* sums, float* squared) const {
        const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
        #pragma unroll
        for (int m = 0; m < TILES; m++)
            #pragma unroll
            for (int n = 0; n < 2 * TILES; n++)
                #pragma unroll
                for (int i = 0; i < 4; i++) sums[(m * 16 + row + i / 2 * 8) * PITCH + n * 8 + column + i % 2] = scores[m][n][i];
        #pragma unroll
        for (int n = 0; n < 2 * TILES; n++) {
            const float of_query = sum_of_four(query[n / 2][n % 2]), of_key = sum_of_four(key[n]);
            if (lane % 4 == 0) squared[n * 8 + row] = of_query, squared[CHANNELS + n * 8 + row] = of_key;
        }
    }
};

// Softmax of the warp's rows of scores, to [row][PITCH] in shared memory.
DEVICE void softmax_rows(u16* weights, const float* sums, const float* squared, float factor, const Params& p) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float of_column[2];
    #pragma unroll
    for (int c = 0; c < 2; c++) {
        const int column = min(lane + 32 * c, CHANNELS - 1);
        of_column[c] = factor * reciprocal_norm(squared + CHANNELS + column, p.least_key);
    }
    #pragma unroll
    for (int r = 0; r < CHANNELS / WARPS; r++) {
        const int row = r * WARPS + warp;
        const float of_row = reciprocal_norm(squared + row, p.least_query);
        float v[2], most = __int_as_float(0xff800000);
        #pragma unroll
        for (int c = 0; c < 2; c++) {
            const int column = min(lane + 32 * c, CHANNELS - 1);
            float total = 0.0f;
            #pragma unroll
            for (int w = 0; w < WARPS; w++) total += sums[w * SUMS + row * PITCH + column];
            v[c] = lane + 32 * c < p.channels ? total * of_row * of_column[c] : __int_as_float(0xff800000);
            most = fmaxf(most, v[c]);
        }
        #pragma unroll
        for (int half = 16; half; half /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, half));
        v[0] = exp2_fast((v[0] - most) * LOG2_E), v[1] = exp2_fast((v[1] - most) * LOG2_E);
        float total = v[0] + v[1];
        #pragma unroll
        for (int half = 16; half; half /= 2) total += __shfl_xor_sync(0xffffffffu, total, half);
        #pragma unroll
        for (int c = 0; c < 2; c++)
            if (lane + 32 * c < CHANNELS) weights[row * PITCH + lane + 32 * c] = pack1(__fdividef(v[c], total));
    }
}

// The results of the warp's sixteen tokens from ``first`` on.
DEVICE void weighted_values(u32 values, u32 weights, u16* output, int first, const Params& p) {
    const int lane = threadIdx.x % 32;
    const u32 down = lane % 16 * PITCH * 2 + lane / 16 * 16, across = (lane % 8 + lane / 16 * 8) * PITCH * 2 + lane / 8 % 2 * 16;
    float out[2 * TILES][4];
    #pragma unroll
    for (int n = 0; n < 2 * TILES; n++)
        #pragma unroll
        for (int i = 0; i < 4; i++) out[n][i] = 0.0f;
    #pragma unroll
    for (int k = 0; k < TILES; k++) {
        u32 a[4];
        ldmatrix_x4(values + down + k * 32, a[0], a[1], a[2], a[3]);
        #pragma unroll
        for (int n = 0; n < TILES; n++) {
            u32 b[4];
            ldmatrix_x4(weights + across + n * 16 * PITCH * 2 + k * 32, b[0], b[1], b[2], b[3]);
            multiply(out[2 * n], a, b[0], b[1]);
            multiply(out[2 * n + 1], a, b[2], b[3]);
        }
    }
    #pragma unroll
    for (int n = 0; n < 2 * TILES; n++) {
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const int token = first + lane / 4 + 8 * i, channel = n * 8 + lane % 4 * 2;
            if (token < p.tokens && channel < p.channels)
                *reinterpret_cast<u32*>(output + (long long)token * p.of_output.position + channel) = pack2(out[n][2 * i], out[n][2 * i + 1]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_channels(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 shared[];  // values, weights, squares, and the rings, whose place the sums take
    const int warp = threadIdx.x / 32, head = blockIdx.y, batch = blockIdx.z;
    const u32 own_values = warp * TOKENS_BYTES, weights = VALUES_BYTES, squared = weights + WEIGHTS_BYTES;
    const u32 rings = squared + WARPS * SQUARES * 4, own_ring = rings + warp * SLOTS * SLOT_BYTES;
    const u16* queries = p.queries + batch * p.of_queries.batch + head * p.of_queries.head;
    const u16* keys = p.keys + batch * p.of_keys.batch + head * p.of_keys.head;
    const int first = (blockIdx.x * WARPS + warp) * 16, steps = (p.tokens + 15) / 16;
    const float factor = p.factors[head];
    grid_launch_dependents();
    grid_dependency_wait();

    auto load_step = [&](int step, int slot) {
        if (step >= steps) return;
        load_tokens(shared, own_ring + slot * SLOT_BYTES, queries, p.of_queries.position, step * 16, p);
        load_tokens(shared, own_ring + slot * SLOT_BYTES + TOKENS_BYTES, keys, p.of_keys.position, step * 16, p);
    };
    #pragma unroll
    for (int i = 0; i < SLOTS; i++) {
        load_step(warp + i * WARPS, i);
        if (i == SLOTS - 1)                        // needed last
            load_tokens(shared, own_values, p.values + batch * p.of_values.batch + head * p.of_values.head, p.of_values.position, first, p);
        copies_commit();
    }

    Sums sums;
    sums.clear();
    int slot = 0;
    for (int step = warp; step < steps; step += WARPS) {
        copies_wait_but<SLOTS - 1>();
        __syncwarp();
        const u32 found = smem_address(shared + own_ring + slot * SLOT_BYTES);
        sums.add(found, found + TOKENS_BYTES);
        __syncwarp();                              // all lanes have read the slot
        load_step(step + SLOTS * WARPS, slot);
        copies_commit();
        slot = slot + 1 == SLOTS ? 0 : slot + 1;
    }
    copies_wait_but<0>();
    __syncthreads();                               // nothing is in the rings any more
    float* all_sums = reinterpret_cast<float*>(shared + rings);
    float* all_squares = reinterpret_cast<float*>(shared + squared);
    sums.store(all_sums + warp * SUMS, all_squares + warp * SQUARES);
    __syncthreads();
    softmax_rows(reinterpret_cast<u16*>(shared + weights), all_sums, all_squares, factor, p);
    __syncthreads();
    if (first < p.tokens)
        weighted_values(smem_address(shared + own_values), smem_address(shared + weights),
                        p.output + batch * p.of_output.batch + head * p.of_output.head, first, p);
}
