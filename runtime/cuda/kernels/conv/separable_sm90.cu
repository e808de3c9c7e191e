// Depthwise convolution, then 1x1 convolution, in one kernel for Hopper: the intermediate result never leaves a multiprocessor.
//
//   out[pixel, channel] = epilogue(sum_k weights[channel, k] * round(between(sum over taps of filter[k, tap] * in[pixel + tap, k])))
//
// Tensor cores compute both convolutions. K, the intermediate channels, is walked in chunks of BK. TMA loads the chunk's input patch
// (zeros in the padding), its filters and its weights into a ring of STAGES. A warp takes STRIPS strips of 16 output pixels
// (STRIP_W x STRIP_H). The depthwise convolution uses mma.sync: it multiplies 16 pixels x 8 channels of one or two taps, which
// ldmatrix reads anywhere in the patch, with the 8 x 8 diagonal matrices of the taps. The zeros cost less than the conversions, loads
// and issue slots of scalar arithmetic. Its accumulators have the register layout of wgmma's operand A. They go through the first
// epilogue, are rounded to 16 bits and multiplied at once: pixels are wgmma's M, output channels its N. While wgmma works, the next
// channels are convolved.
//
// (Zero times infinity is NaN: an element that has overflowed makes NaN of the neighboring channels of its pixel.)
//
// With SPLIT > 1 the blocks of a cluster split K and exchange partial sums, as in conv_sm90.cu: a small batch offers little other
// parallelism. Otherwise blocks are persistent.
//
// generated.cuh defines WARPGROUPS, STRIPS, STRIP_W, GRID_X (strips beside each other in a tile), NT x NW (wgmma instructions per
// tile, and output channels of each), BK, BATCH (channels that are convolved together, divided by 16),
// STAGES, SPLIT, MIN_BLOCKS, the filter (KERNEL_H, KERNEL_W, STRIDE_*, DILATION_*), RELU_BEFORE (a ReLU of the input precedes the
// filter), HAS_RESIDUAL, between() (of two neighboring channels, to a pair of 16-bit elements), epilogue() and wgmma_pixels().
#include "taps.cuh"
#include "generated.cuh"
#include "strips.cuh"

constexpr int WARPS = WARPGROUPS * 4, CONSUMERS = WARPS * 32, THREADS = CONSUMERS + 32;
constexpr int TAPS = KERNEL_H * KERNEL_W;
constexpr int TILE_W = GRID_X * STRIP_W, TILE_H = WARPS / GRID_X * STRIPS * STRIP_H;
constexpr int PATCH_W = (TILE_W - 1) * STRIDE_W + (KERNEL_W - 1) * DILATION_W + 1;
constexpr int PATCH_H = (TILE_H - 1) * STRIDE_H + (KERNEL_H - 1) * DILATION_H + 1;
constexpr int BN = NT * NW, BLOCKS = BN / 8, SPAN = BK * 2;
constexpr int FILTER = (TAPS + 7) / 8 * 8, WORDS = (TAPS + 1) / 2;         // elements of a channel's filter; its 32-bit words in use
constexpr u32 PATCH_BYTES = (PATCH_H * PATCH_W * SPAN + 1023) / 1024 * 1024, WEIGHT_BYTES = (BN * SPAN + 1023) / 1024 * 1024;
constexpr u32 FILTER_BYTES = BK * FILTER * 2, SHIFT_BYTES = BK * 4;
constexpr u32 STAGE_BYTES = (PATCH_BYTES + WEIGHT_BYTES + FILTER_BYTES + SHIFT_BYTES + 1023) / 1024 * 1024;
constexpr u32 STAGE_LOAD = PATCH_H * PATCH_W * SPAN + BN * SPAN + FILTER_BYTES + SHIFT_BYTES;
constexpr u32 HEAD_BYTES = 1024;
// The taps of a filter row are loaded in pairs. An odd last tap is loaded alone, for two groups of eight channels.
constexpr int PAIRS = KERNEL_W / 2, LOADS = PAIRS + KERNEL_W % 2;
constexpr int STEPS = BK / 16, GROUPS = 2 * BATCH;
// Independent accumulators of a result: a product waits for the previous one of its chain, and a warp with one strip has few chains.
constexpr int CHAINS = STRIPS == 1 ? LOADS : 1;
// Staged results, one strip's rows at a time: a pitch of an odd number of 16-byte units has no bank conflicts.
constexpr u32 PITCH = (BLOCKS | 1) * 16, ROW_BUFFERS = HAS_RESIDUAL ? STRIPS : 1;
constexpr int SLOTS = (BLOCKS + SPLIT - 1) / SPLIT;                        // blocks of eight channels that a rank finishes

struct Params {
    TensorMap pixels;                              // (channel, x, y, n)
    TensorMap weights;                             // (input channel, output channel)
    const u16* filters;                            // [k_steps * BK][FILTER]
    const float* shifts;                           // [k_steps * BK]: the depthwise bias
    const float* bias;                             // [channels]
    u16* output;
    const u16* residual;
    int out_h, out_w, pad_h, pad_w;
    int channels, pitch, residual_pitch;           // multiples of 8
    int k_steps, channel_tiles, tiles_x, image_tiles, tiles;
};


struct Order {                                     // the patch rows that meet a tap
    int row[ROWS], count;
};
constexpr __device__ Order order_of() {
    Order order = {};
    for (int r = 0; r < ROWS; r++)
        if (used(r)) order.row[order.count++] = r;
    return order;
}
__device__ constexpr Order ORDER = order_of();

struct Row {                                       // fragments of one patch row, for a batch of channels
    u32 pair[PAIRS > 0 ? PAIRS : 1][GROUPS][4], single[BATCH][4];
};

// Offset of 16-byte column 0 of a row, under TMA's swizzle.
DEVICE u32 row_at(int index) {
    return index * SPAN + (SPAN == 128 ? (index & 7) << 4 : SPAN == 64 ? (index >> 1 & 3) << 4 : (index >> 2 & 1) << 4);
}

struct Place {
    int channel, n, y, x;                          // first channel, image, first output pixel
};

DEVICE Place place(const Params& p, int tile) {
    const int index = tile / p.channel_tiles, in_image = index % p.image_tiles;
    return {tile % p.channel_tiles * BN, index / p.image_tiles, in_image / p.tiles_x * TILE_H, in_image % p.tiles_x * TILE_W};
}

DEVICE void load_constants(const Params& p, u32 stage, u32 barrier, int k, int channel) {
    #pragma unroll
    for (int i = 0; i < NT; i++) tma_load_2d(stage + PATCH_BYTES + i * NW * SPAN, &p.weights, barrier, k * BK, channel + i * NW);
    bulk_load(stage + PATCH_BYTES + WEIGHT_BYTES, p.filters + k * BK * FILTER, FILTER_BYTES, barrier);
    bulk_load(stage + PATCH_BYTES + WEIGHT_BYTES + FILTER_BYTES, p.shifts + k * BK, SHIFT_BYTES, barrier);
}

DEVICE void load_patch(const Params& p, u32 stage, u32 barrier, int k, const Place& to) {
    tma_load_4d(stage, &p.pixels, barrier, k * BK, to.x * STRIDE_W - p.pad_w, to.y * STRIDE_H - p.pad_h, to.n);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) separable_sm90(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 shared[];
    const u32 base = smem_address(shared);
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;   // warp-uniform, and the compiler knows it
    const int rank = SPLIT > 1 ? int(cluster_rank()) : 0;
    const int k_begin = SPLIT > 1 ? p.k_steps * rank / SPLIT : 0;
    const int k_count = (SPLIT > 1 ? p.k_steps * (rank + 1) / SPLIT : p.k_steps) - k_begin;
    const int first_tile = blockIdx.x / SPLIT, tile_step = SPLIT > 1 ? p.tiles : gridDim.x;
    const u32 full = base, empty = full + 8 * STAGES, reduced = empty + 8 * STAGES;
    const u32 ring = base + HEAD_BYTES, after = ring + STAGES * STAGE_BYTES;

    if (warp == WARPS && lane == 0) {
        tma_prefetch(&p.weights);
        tma_prefetch(&p.pixels);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, WARPS);
        }
        barrier_init(reduced, 1);
        barrier_init_fence();
        async_proxy_fence();
        if (SPLIT > 1)                             // bytes of partial sums that this rank will receive
            barrier_expect(reduced, WARPGROUPS * STRIPS * ((BLOCKS + SPLIT - 1 - rank) / SPLIT) * SPLIT * 2048);
    }
    __syncthreads();
    if (SPLIT > 1) cluster_arrive_relaxed();
    grid_launch_dependents();

    if (warp == WARPS) {
        if (elect_one()) {
            Place to = place(p, first_tile);
            // Constants first: no kernel writes them.
            const int primed = k_count < STAGES ? k_count : STAGES;
            for (int k = 0; k < primed; k++) {
                barrier_expect(full + 8 * k, STAGE_LOAD);
                load_constants(p, ring + k * STAGE_BYTES, full + 8 * k, k_begin + k, to.channel);
            }
            mark(0);
            grid_dependency_wait();
            mark(1);
            #pragma unroll 1
            for (int k = 0; k < primed; k++) load_patch(p, ring + k * STAGE_BYTES, full + 8 * k, k_begin + k, to);
            mark(2);
            int stage = primed == STAGES ? 0 : primed, parity = primed == STAGES ? 0 : 1, fresh = STAGES - primed, k = primed;
            for (int tile = first_tile; tile < p.tiles; tile += tile_step) {
                if (tile != first_tile) to = place(p, tile), k = 0;
                #pragma unroll 1
                for (; k < k_count; k++) {
                    const u32 target = ring + stage * STAGE_BYTES, barrier = full + 8 * stage;
                    if (fresh > 0)
                        fresh--;                   // a stage that was never filled
                    else
                        barrier_wait(empty + 8 * stage, parity);
                    barrier_expect(barrier, STAGE_LOAD);
                    load_patch(p, target, barrier, k_begin + k, to);
                    load_constants(p, target, barrier, k_begin + k, to.channel);
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
            }
        }
        if (SPLIT > 1) {
            __syncwarp();
            cluster_wait();
        }
        return;
    }

    const int strip_x = warp % GRID_X * STRIP_W, strip_y = warp / GRID_X * STRIPS * STRIP_H;
    const int pixel = lane % 16, upper = lane / 16;
    // This lane's row addresses for ldmatrix: lanes 0-15 address the pixels of a pair's first tap, lanes 16-31 those of its second tap.
    // Of a single tap, they address channels 0-7 and channels 8-15.
    const int own = (strip_y + pixel / STRIP_W) * STRIDE_H * PATCH_W + (strip_x + pixel % STRIP_W) * STRIDE_W;
    u32 at[ROWS][LOADS];
    #pragma unroll
    for (int r = 0; r < ROWS; r++) {
        #pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const int tap = i < PAIRS ? 2 * i + upper : KERNEL_W - 1;
            at[r][i] = row_at(own + r * PATCH_W + tap * DILATION_W) ^ (i < PAIRS ? 0 : upper << 4);
        }
    }
    // Diagonal matrices: this lane holds rows 2 * (lane % 4) and the next of column lane / 4; at most one of these elements is not zero.
    const bool diagonal = lane / 8 == lane % 4, odd = lane / 4 % 2;
    const u32 even_tap = !diagonal ? 0x4444 : odd ? 0x1044 : 0x4410, odd_tap = !diagonal ? 0x4444 : odd ? 0x3244 : 0x4432;

    float acc[STRIPS][NT][NW / 2];
    int stage = 0, parity = 0;
    grid_dependency_wait();
    for (int tile = first_tile; tile < p.tiles; tile += tile_step) {
        const Place to = place(p, tile);
        const int out_x = to.x + strip_x, out_y = to.y + strip_y;
        // The output pixel of place i of a strip; negative outside the image.
        auto pixel_at = [&](int strip, int i) -> long long {
            const int x = out_x + i % STRIP_W, y = out_y + strip * STRIP_H + i / STRIP_W;
            return x < p.out_w && y < p.out_h ? ((long long)to.n * p.out_h + y) * p.out_w + x : -1;
        };
        const u32 rows = after + warp * ROW_BUFFERS * 16 * PITCH;
        if (HAS_RESIDUAL && SPLIT == 1) {
            #pragma unroll 1
            for (int i = lane; i < STRIPS * 16 * BLOCKS; i += 32) {
                const int row = i / BLOCKS, block = i % BLOCKS;
                const long long from = pixel_at(row / 16, row % 16);
                if (from >= 0 && to.channel + block * 8 < p.channels)
                    copy_16_async(rows + row * PITCH + block * 16, p.residual + from * p.residual_pitch + to.channel + block * 8);
            }
        }
        int previous = -1;
        for (int k = 0; k < k_count; k++) {
            barrier_wait(full + 8 * stage, parity);
            if (k == 0 && threadIdx.x == 0) mark(3);
            const u32 patch = ring + stage * STAGE_BYTES;
            const u8* constants = shared + HEAD_BYTES + stage * STAGE_BYTES + PATCH_BYTES + WEIGHT_BYTES;
            const u64 weights = wgmma_descriptor<SPAN>(patch + PATCH_BYTES);
            #pragma unroll
            for (int first = 0; first < STEPS; first += BATCH) {
                u32 filter[GROUPS][(WORDS + 3) / 4 * 4];
                float sum[CHAINS][STRIPS][GROUPS][4];
                #pragma unroll
                for (int g = 0; g < GROUPS; g++) {
                    const int channels = (first * 2 + g) * 8;
                    const u8* from = constants + (channels + lane / 4) * (FILTER * 2);
                    #pragma unroll
                    for (int i = 0; i < WORDS; i += 4) {
                        if (WORDS - i == 1) {
                            filter[g][i] = *reinterpret_cast<const u32*>(from + i * 4);
                            continue;
                        }
                        const uint4 v = *reinterpret_cast<const uint4*>(from + i * 4);
                        filter[g][i] = v.x, filter[g][i + 1] = v.y, filter[g][i + 2] = v.z, filter[g][i + 3] = v.w;
                    }
                    // The bias of this thread's two channels, from 2 * (lane % 4) on.
                    const float2 shift = *reinterpret_cast<const float2*>(constants + FILTER_BYTES + (channels + lane % 4 * 2) * 4);
                    #pragma unroll
                    for (int i = 0; i < CHAINS * STRIPS; i++) {
                        float (&s)[4] = sum[i / STRIPS][i % STRIPS][g];
                        s[0] = s[2] = i < STRIPS ? shift.x : 0.0f;
                        s[1] = s[3] = i < STRIPS ? shift.y : 0.0f;
                    }
                }
                auto weight = [&](int g, int tap) { return __byte_perm(filter[g][tap / 2], 0u, tap % 2 ? odd_tap : even_tap); };
                auto load = [&](u32 (&v)[4], u32 address) {
                    ldmatrix_x4(address, v[0], v[1], v[2], v[3]);
                    #pragma unroll
                    for (int j = 0; RELU_BEFORE && j < 4; j++) v[j] = relu2(v[j]);
                };
                auto load_row = [&](Row& in, int r) {
                    #pragma unroll
                    for (int i = 0; i < PAIRS * GROUPS; i++)
                        load(in.pair[i / GROUPS][i % GROUPS], (patch + at[r][i / GROUPS]) ^ ((first * 2 + i % GROUPS) << 4));
                    #pragma unroll
                    for (int b = 0; b < (LOADS > PAIRS ? BATCH : 0); b++) load(in.single[b], (patch + at[r][LOADS - 1]) ^ ((first + b) << 5));
                };
                Row rows_of[2];                    // one is loaded while the other is multiplied
                load_row(rows_of[0], 0);
                #pragma unroll
                for (int n = 0; n < ORDER.count; n++) {
                    const int r = ORDER.row[n];
                    const Row& in = rows_of[n % 2];
                    if (n + 1 < ORDER.count) load_row(rows_of[(n + 1) % 2], ORDER.row[n + 1]);
                    #pragma unroll
                    for (int i = 0; i < LOADS; i++) {
                        #pragma unroll
                        for (int m = 0; m < STRIPS; m++) {
                            if (!meets(r, m)) continue;
                            const int tap = (r - m * STRIP_H * STRIDE_H) / DILATION_H * KERNEL_W + 2 * i;
                            #pragma unroll
                            for (int g = 0; g < GROUPS; g++) {
                                float (&s)[4] = sum[i % CHAINS][m][g];
                                if (i < PAIRS)
                                    tap_pair(s, in.pair[i][g], weight(g, tap), weight(g, tap + 1));
                                else
                                    one_tap(s, in.single[g / 2][g % 2 * 2], in.single[g / 2][g % 2 * 2 + 1], weight(g, tap));
                            }
                        }
                    }
                }
                wgmma_wait<0>();                   // the previous products are complete: their operand registers may be overwritten
                if (first == 0 && previous >= 0 && lane == 0) barrier_arrive(empty + 8 * previous);
                u32 operand[BATCH][STRIPS][4];
                #pragma unroll
                for (int i = 0; i < BATCH * STRIPS * 4; i++) {
                    const int b = i / 4 / STRIPS, m = i / 4 % STRIPS, part = i % 4;
                    float x[2];
                    #pragma unroll
                    for (int c = 0; c < 2; c++) {
                        x[c] = sum[0][m][b * 2 + part / 2][part % 2 * 2 + c];
                        #pragma unroll
                        for (int chain = 1; chain < CHAINS; chain++) x[c] += sum[chain][m][b * 2 + part / 2][part % 2 * 2 + c];
                    }
                    operand[b][m][part] = between(x[0], x[1]);
                }
                wgmma_fence();
                #pragma unroll
                for (int b = 0; b < BATCH; b++) {
                    #pragma unroll
                    for (int i = 0; i < STRIPS * NT; i++)
                        wgmma_pixels(acc[i / NT][i % NT], operand[b][i / NT], weights + ((i % NT * NW * SPAN) >> 4) + 2 * (first + b), (k | (first + b)) != 0);
                }
                wgmma_commit();
            }
            previous = stage;
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        wgmma_wait<0>();
        if (lane == 0) barrier_arrive(empty + 8 * previous);
        if (threadIdx.x == 0) mark(4);

        // A thread holds two channels, from 2 * (lane % 4) on, of pixels lane / 4 and lane / 4 + 8, in every block of eight channels.
        const int channel = to.channel + lane % 4 * 2;
        auto bias_at = [&](int block) {
            return channel + block * 8 < p.channels ? __ldg(reinterpret_cast<const float2*>(p.bias + channel + block * 8)) : make_float2(0.0f, 0.0f);
        };
#if SPLIT > 1
        const u32 inbox = after + warp / 4 * (STRIPS * SLOTS * SPLIT * 2048) + (warp % 4 * 32 + lane) * 16;
        long long offset[STRIPS][2];
        u32 residual[STRIPS][SLOTS][2];
        #pragma unroll
        for (int m = 0; m < STRIPS; m++) {
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                offset[m][h] = pixel_at(m, lane / 4 + h * 8);
                #pragma unroll
                for (int i = 0; i < SLOTS; i++) {
                    const int c = channel + (rank + i * SPLIT) * 8;
                    residual[m][i][h] = 0;
                    if (HAS_RESIDUAL && offset[m][h] >= 0 && rank + i * SPLIT < BLOCKS && c < p.channels)
                        residual[m][i][h] = *reinterpret_cast<const u32*>(p.residual + offset[m][h] * p.residual_pitch + c);
                }
            }
        }
        __syncwarp();
        cluster_wait();                            // the peers run and their barriers are initialized: their shared memory may be written
        #pragma unroll
        for (int m = 0; m < STRIPS; m++) {
            #pragma unroll
            for (int j = 0; j < BLOCKS; j++) {
                const u32 slot = inbox + ((m * SLOTS + j / SPLIT) * SPLIT + rank) * 2048;
                cluster_send(slot, reduced, j % SPLIT, &acc[m][j * 8 / NW][j * 8 % NW / 2]);
            }
        }
        barrier_wait_cluster(reduced, 0);
        if (threadIdx.x == 0) mark(5);
        #pragma unroll
        for (int m = 0; m < STRIPS; m++) {
            #pragma unroll
            for (int i = 0; i < SLOTS; i++) {
                const int block = rank + i * SPLIT, c = channel + block * 8;
                if (block >= BLOCKS || c >= p.channels) continue;
                const float2 bias = bias_at(block);
                float4 sum;
                shared_load(inbox + (m * SLOTS + i) * SPLIT * 2048, sum);
                #pragma unroll
                for (int r = 1; r < SPLIT; r++) {
                    float4 part;
                    shared_load(inbox + ((m * SLOTS + i) * SPLIT + r) * 2048, part);
                    sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
                }
                const u32 (&r)[2] = residual[m][i];
                const u32 low = pack2(epilogue(sum.x, bias.x, low_float(r[0])), epilogue(sum.y, bias.y, high_float(r[0])));
                const u32 high = pack2(epilogue(sum.z, bias.x, low_float(r[1])), epilogue(sum.w, bias.y, high_float(r[1])));
                if (offset[m][0] >= 0) *reinterpret_cast<u32*>(p.output + offset[m][0] * p.pitch + c) = low;
                if (offset[m][1] >= 0) *reinterpret_cast<u32*>(p.output + offset[m][1] * p.pitch + c) = high;
            }
        }
#else
        if (HAS_RESIDUAL) {
            copies_wait();
            __syncwarp();
        }
        #pragma unroll
        for (int m = 0; m < STRIPS; m++) {
            const u32 strip = rows + (HAS_RESIDUAL ? m * 16 * PITCH : 0);
            const float* v = &acc[m][0][0];
            #pragma unroll
            for (int j = 0; j < BLOCKS; j += 2) {
                const bool two = j + 1 < BLOCKS;
                // Lane l addresses row l % 16 of block j, or of the next block.
                const u32 address = strip + pixel * PITCH + (j + (two ? upper : 0)) * 16;
                u32 r[4] = {0, 0, 0, 0};
                if (HAS_RESIDUAL) ldmatrix_x4(address, r[0], r[1], r[2], r[3]);
                u32 y[4];
                #pragma unroll
                for (int b = 0; b < 2; b++) {
                    if (b && !two) continue;
                    const float2 bias = bias_at(j + b);
                    #pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const float* x = v + (j + b) * 4 + h * 2;
                        const u32 old = r[b * 2 + h];
                        y[b * 2 + h] = pack2(epilogue(x[0], bias.x, low_float(old)), epilogue(x[1], bias.y, high_float(old)));
                    }
                }
                if (two) stmatrix_x4(address, y[0], y[1], y[2], y[3]);
                else stmatrix_x2(address, y[0], y[1]);
            }
            __syncwarp();
            #pragma unroll 4
            for (int i = lane; i < 16 * BLOCKS; i += 32) {
                const int row = i / BLOCKS, block = i % BLOCKS;
                const long long target = pixel_at(m, row);
                if (target >= 0 && to.channel + block * 8 < p.channels)
                    *reinterpret_cast<uint4*>(p.output + target * p.pitch + to.channel + block * 8) = shared_load16(strip + row * PITCH + block * 16);
            }
            __syncwarp();
        }
#endif
    }
    if (threadIdx.x == 0) mark(6);
}
