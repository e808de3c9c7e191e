// Attention between channels (cross-covariance attention: El-Nouby et al., "XCiT", 2021; DaViT's channel attention): for each head of
// C channels over many tokens, out = softmax(factor * (q / |q|) (k / |k|)^T) v, where q, k and v are [channel][token], C x C scores are sums
// over all tokens, and |.| is the norm of a channel over its tokens. In memory the channels of a token are contiguous.
//
// A block computes all scores of a head and the results of WARPS x 16 tokens. Other blocks of the head compute the same scores, which costs
// less than a launch. Each warp sums q^T k over every WARPS-th group of sixteen tokens by mma.sync, and the squares of the loaded values.
// Norms become factors of rows and columns of the scores. Then the warps add their sums in a fixed order, compute the softmax of a row each,
// and multiply it with the values of their own tokens.
//
// generated.cuh: see attention_channels.cuh.
#include "ptx.cuh"
#include "mma.cuh"
#include "generated.cuh"
#include "attention_channels.cuh"

constexpr int VALUES_BYTES = WARPS * TOKENS_BYTES;
static_assert(BANDS == 1, "each warp sums up all scores");

struct Params {
    const u16 *queries, *keys, *values;
    u16* output;
    const float* factors;                          // per head, for its scores
    int tokens, channels;
    float least_query, least_key;                  // lower bounds of the norms in divisions; LINEAR: epsilon, and unused
    View of_queries, of_keys, of_values, of_output;
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attention_channels(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 shared[];  // values, weights, squares, and the rings, whose space the sums reuse
    const int warp = threadIdx.x / 32, head = blockIdx.y, batch = blockIdx.z;
    const u32 own_values = warp * TOKENS_BYTES, weights = VALUES_BYTES, squared = weights + WEIGHTS_BYTES;
    const u32 rings = squared + WARPS * SQUARES * 4, own_ring = rings + warp * SLOTS * SLOT_BYTES;
    const u16* queries = p.queries + batch * p.of_queries.batch + head * p.of_queries.head;
    const u16* keys = p.keys + batch * p.of_keys.batch + head * p.of_keys.head;
    const int first = (blockIdx.x * WARPS + warp) * 16, steps = (p.tokens + 15) / 16;
    const float factor = p.factors[head];
    grid_launch_dependents();
    grid_dependency_wait();

    Sums sums;
    sum_tokens(sums, shared, own_ring, queries, keys, p.of_queries.position, p.of_keys.position, 0, warp, steps, p.tokens, p.channels, [&] {
        const u16* values = p.values + batch * p.of_values.batch + head * p.of_values.head;   // needed last
        load_tokens(shared, own_values, values, p.of_values.position, first, p.tokens, p.channels);
    });
    float* all_sums = reinterpret_cast<float*>(shared + rings);
    float* all_squares = reinterpret_cast<float*>(shared + squared);
    sums.store(all_sums + warp * SUMS, all_squares + warp * SQUARES);
    __syncthreads();
    u16* all_weights = reinterpret_cast<u16*>(shared + weights);
    make_weights<WARPS>(all_weights, all_sums, all_squares, factor, p.channels, p.least_query, p.least_key);
    __syncthreads();
    if (first < p.tokens)
        weighted_values(smem_address(shared + own_values), all_weights, p.output + batch * p.of_output.batch + head * p.of_output.head,
                        p.of_output.position, first, p.tokens, p.channels, p.least_query);
}
