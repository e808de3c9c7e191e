// Max pooling of NHWC images of any element type. The including source defines larger(u32, u32), the element-wise maximum of two words, and
// KERNEL_H, KERNEL_W.
struct PoolParams {
    const uint4* input;
    uint4* output;
    int batch, height, width, vectors;             // of 16 bytes of channels
    int out_h, out_w, stride_h, stride_w, pad_h, pad_w;
};

// One thread: 16 bytes of channels of one output pixel. Padding never wins the maximum: a tap outside reads the nearest tap inside,
// so that all loads are unconditional and in flight together.
extern "C" __global__ void __launch_bounds__(128) max_pool(const __grid_constant__ PoolParams p) {
    grid_launch_dependents();
    const int total = p.batch * p.out_h * p.out_w * p.vectors;
    const int index = blockIdx.x * 128 + threadIdx.x;
    const int vector = index % p.vectors, pixel = index / p.vectors;
    const int w0 = pixel % p.out_w * p.stride_w - p.pad_w, h0 = pixel / p.out_w % p.out_h * p.stride_h - p.pad_h;
    const int n = pixel / p.out_w / p.out_h;
    const uint4* image = p.input + (long long)n * p.height * p.width * p.vectors + vector;
    grid_dependency_wait();
    if (index >= total) return;
    uint4 taps[KERNEL_H * KERNEL_W];
    #pragma unroll
    for (int r = 0; r < KERNEL_H; r++) {
        #pragma unroll
        for (int s = 0; s < KERNEL_W; s++) {
            const int h = min(max(h0 + r, 0), p.height - 1), w = min(max(w0 + s, 0), p.width - 1);
            taps[r * KERNEL_W + s] = image[(h * p.width + w) * p.vectors];
        }
    }
    uint4 best = taps[0];
    #pragma unroll
    for (int i = 1; i < KERNEL_H * KERNEL_W; i++)
        best = make_uint4(larger(best.x, taps[i].x), larger(best.y, taps[i].y), larger(best.z, taps[i].z), larger(best.w, taps[i].w));
    p.output[index] = best;
}
