// The second launch of a depthwise convolution's squeeze: adds up the sums of its tiles.
#include "ptx.cuh"

struct FinishParams {
    const float* sums;                             // [n][tiles][channels]
    u16* means;                                    // [n][channels]
    int tiles, channels;
    float mean_scale;
};

// Adds the tiles' sums in order: fp32 -> 16-bit means.
extern "C" __global__ void __launch_bounds__(128) squeeze_finish(const FinishParams p) {
    grid_launch_dependents();
    grid_dependency_wait();
    const int channel = blockIdx.x * 128 + threadIdx.x, n = blockIdx.y;
    if (channel >= p.channels) return;
    const float* sums = p.sums + (long long)n * p.tiles * p.channels + channel;
    float total = 0.0f;
    #pragma unroll 8
    for (int i = 0; i < p.tiles; i++) total += sums[(long long)i * p.channels];
    p.means[(long long)n * p.channels + channel] = pack1(total * p.mean_scale);
}
