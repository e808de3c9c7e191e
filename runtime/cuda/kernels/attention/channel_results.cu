// The results of attention between channels from partial scores (channel_sums.cu). Each block adds the parts of a head and computes the
// softmax. It multiplies this with the values of WARPS x 16 tokens, then of the tokens gridDim.x x WARPS x 16 further, and so on.
//
// generated.cuh: see attention_channels.cuh.
#include "ptx.cuh"
#include "mma.cuh"
#include "generated.cuh"
#include "attention_channels.cuh"

constexpr int AHEAD = 8, SIDE = 2;                 // parts, and groups of four numbers of each, that a thread has in flight

struct Params {
    const float* sums;
    const u16* values;
    u16* output;
    const float* factors;                          // per head, for its scores
    int tokens, channels, parts;
    float least_query, least_key;                  // lower bounds of the norms in divisions; LINEAR: epsilon, and unused
    View of_values, of_output;
};

// Adds the parts of a head: squares to [2][CHANNELS], scores to [channel][PITCH] in shared memory.
DEVICE void add_parts(float* sums, float* squared, const float* parts, int count) {
    for (int first = threadIdx.x * 4; first < PART; first += SIDE * THREADS * 4) {
        float4 total[SIDE] = {};
        for (int n = 0; n < count; n += AHEAD) {
            float4 v[SIDE][AHEAD];
            #pragma unroll
            for (int s = 0; s < SIDE; s++) {
                const int i = first + s * THREADS * 4;
                #pragma unroll
                for (int j = 0; j < AHEAD; j++)
                    v[s][j] = n + j < count && i < PART ? *reinterpret_cast<const float4*>(parts + (long long)(n + j) * PART + i)
                                                        : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            }
            #pragma unroll
            for (int s = 0; s < SIDE; s++) {
                #pragma unroll
                for (int j = 0; j < AHEAD; j++) total[s].x += v[s][j].x, total[s].y += v[s][j].y, total[s].z += v[s][j].z, total[s].w += v[s][j].w;
            }
        }
        #pragma unroll
        for (int s = 0; s < SIDE; s++) {
            const int i = first + s * THREADS * 4, row = i / CHANNELS - 2;
            if (i < PART) *reinterpret_cast<float4*>(row < 0 ? squared + i : sums + row * PITCH + i % CHANNELS) = total[s];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) channel_results(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 shared[];  // per warp two slots of sixteen values; weights, squares, scores
    const int warp = threadIdx.x / 32, head = blockIdx.y, batch = blockIdx.z;
    const u32 own_values = warp * 2 * TOKENS_BYTES, weights = WARPS * 2 * TOKENS_BYTES, squared = weights + WEIGHTS_BYTES;
    const u16* values = p.values + batch * p.of_values.batch + head * p.of_values.head;
    u16* output = p.output + batch * p.of_output.batch + head * p.of_output.head;
    const float factor = p.factors[head];
    const int stride = gridDim.x * WARPS * 16;
    int first = (blockIdx.x * WARPS + warp) * 16;
    grid_launch_dependents();
    grid_dependency_wait();

    #pragma unroll
    for (int i = 0; i < 2; i++) {
        load_tokens(shared, own_values + i * TOKENS_BYTES, values, p.of_values.position, first + i * stride, p.tokens, p.channels);
        copies_commit();
    }
    float* all_squares = reinterpret_cast<float*>(shared + squared);
    float* all_sums = all_squares + SQUARES;
    add_parts(all_sums, all_squares, p.sums + (long long)(batch * gridDim.y + head) * p.parts * PART, p.parts);
    __syncthreads();
    u16* all_weights = reinterpret_cast<u16*>(shared + weights);
    make_weights<1>(all_weights, all_sums, all_squares, factor, p.channels, p.least_query, p.least_key);
    __syncthreads();
    for (int slot = 0; first < p.tokens; first += stride, slot ^= 1) {
        copies_wait_but<1>();
        __syncwarp();
        const u32 own = own_values + slot * TOKENS_BYTES;
        weighted_values(smem_address(shared + own), all_weights, output, p.of_output.position, first, p.tokens, p.channels, p.least_query);
        __syncwarp();                              // all lanes have read the slot
        load_tokens(shared, own, values, p.of_values.position, first + 2 * stride, p.tokens, p.channels);
        copies_commit();
    }
    copies_wait_but<0>();
}
