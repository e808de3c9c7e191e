// The second launch of a depthwise convolution's squeeze: adds the sums of its tiles.
//
// -DNARROW: means are 8-bit integers, -DWIDE: fp32, else 16-bit floats.
#include "ptx.cuh"
#include "narrow.cuh"

struct FinishParams {
    const float* sums;                             // [n][tiles][channels]
    u8* means;                                     // [n][channels]
    int tiles, channels;
    Narrow mean;                                   // only its factor is used where means are floats
};

// Adds the tiles' sums in a fixed order: fp32 -> means. Block: 32 channels x 16 runs of tiles.
extern "C" __global__ void __launch_bounds__(512) squeeze_finish(const FinishParams p) {
    __shared__ float partial[16][32];
    grid_launch_dependents();
    grid_dependency_wait();
    const int lane = threadIdx.x % 32, run = threadIdx.x / 32, channel = blockIdx.x * 32 + lane, n = blockIdx.y;
    const float* sums = p.sums + (long long)n * p.tiles * p.channels + channel;
    float total = 0.0f;
    if (channel < p.channels) {
        #pragma unroll 8
        for (int i = run; i < p.tiles; i += 16) total += sums[(long long)i * p.channels];
    }
    partial[run][lane] = total;
    __syncthreads();
    if (run != 0 || channel >= p.channels) return;
    #pragma unroll
    for (int i = 1; i < 16; i++) total += partial[i][lane];
    const long long at = (long long)n * p.channels + channel;
#ifdef NARROW
    p.means[at] = u8(narrow_four<false>(p.mean, total, 0.0f, 0.0f, 0.0f));
#elif defined(WIDE)
    reinterpret_cast<float*>(p.means)[at] = total * p.mean.factor;
#else
    reinterpret_cast<u16*>(p.means)[at] = pack1(total * p.mean.factor);
#endif
}
