// Convolutions and products of fp32 on Hopper's tensor cores: three products of fp16 for each product, nearly as exact as fp32.
//
// An fp32 value, times a power of two, is the sum of two numbers of fp16: its first part, and the rest. So a product of two values is a sum of
// four products. The product of the two rests is omitted: it is below 2^-22 of the whole (Ootomo and Yokota 2022).
//
// Powers of two keep all parts within the range of fp16. The build scales the weights of each channel and divides them; ``factors`` undoes the
// scale. Warps divide the pixels as they load them. Each K step of a pixel has a scale of its own, which brings the largest of its values to
// 2^14 or more. The rest of a value keeps all its bits if the value is at least 2^-16 of that. Others lose bits below 2^-39 of the largest.
// UNEVEN: that may not be enough, since the weights of a channel are zero for some inputs. If a value is below 2^-18 of the largest, the products
// of what the parts lack are added, too. EQUALIZED: the weights of some input channels are much smaller than others. The build scales them up,
// and ``input_scales`` scales their pixels down.
//
// Tensor cores truncate in their additions. So the products of a K step are summed by themselves, those with a rest first. One fp32 FMA adds
// each sum, times the inverse of its pixel's scale, to the total. An infinity becomes NaN: its rest is NaN.
//
// Pixels are wgmma's M, 64 for a warpgroup, from registers; output channels are its N. Both warpgroups of a block read the same weights, or the
// same pixels. A thread divides the pixels of the next K step while tensor cores multiply those of this one. Its eight values are neighbors in
// memory, so the build permutes the weights along K (``kernel_order`` of parts_kernel.py). One warp loads stages by TMA, as in
// conv_sm90.cu; blocks are persistent. With SPLIT > 1, the blocks of a cluster split K of one tile. Each finishes some of the channels: the
// others send it their sums.
//
// BANDED: as for conv_sm90.cu, but a band need not be whole tiles. The last tile of a band also multiplies channels of the next one, and does
// not store them. Each band has scales of its own. SCATTER: channels are blocks of pixels (conv_scatter.cuh).
//
// PROLOGUE: threads apply stages to the pixels of a product of rows before they divide them.
//
// generated.cuh defines PIXEL_GROUPS, CHANNEL_GROUPS (warpgroups of a block over pixels and channels), GROUP_CHANNELS (channels of a warpgroup), BK,
// STAGES, SPLIT, UNEVEN, EQUALIZED, BANDED, PROLOGUE, GATED, MODE0, MODE1 (as for
// conv_sm90.cu), HAS_RESIDUAL, wgmma_pixels(), epilogue() and prologue().
#include "conv_common.cuh"
#include "fp16_parts.cuh"

constexpr int WGM = CHANNEL_GROUPS, WGN = PIXEL_GROUPS, MT = 1, BN = 64;       // names of conv_loads.cuh: TMA loads 64 pixels at a time
constexpr int SHARE_CHANNELS = 1, SHARE_PIXELS = 1, BATCHED = 0, ACROSS = 0;
constexpr int GROUPS = PIXEL_GROUPS * CHANNEL_GROUPS, TILE_GROUPS = GROUPS, CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + 128;
constexpr int TILE_CHANNELS = CHANNEL_GROUPS * GROUP_CHANNELS, TILE_PIXELS = PIXEL_GROUPS * 64;
constexpr int PIXEL_PART = 64, WEIGHT_PART = TILE_CHANNELS;
constexpr int SPAN = BK * 4, WEIGHT_SPAN = BK * 2, STEPS = BK / 16;            // bytes of a pixel and of a part of a channel in a K step; wgmmas
constexpr u32 PIXEL_BYTES = 64 * SPAN, PART_BYTES = TILE_CHANNELS * WEIGHT_SPAN, WEIGHT_BYTES = 2 * PART_BYTES;
constexpr u32 WEIGHTS_AT = PIXEL_GROUPS * PIXEL_BYTES;
constexpr u32 SCALES_AT = WEIGHTS_AT + WEIGHT_BYTES, LOADED_BYTES = SCALES_AT + (EQUALIZED ? BK * 4 : 0), BARRIER_BYTES = 1024, OUT_BYTES = 0;
constexpr u32 STAGE_BYTES = (LOADED_BYTES + 1023) / 1024 * 1024;
constexpr float WEIGHTS_SCALE = 0x1p15f;           // what the weights are at most: totals would overflow before results do
constexpr int EVEN = 18;                           // a value below 2^-18 of the largest one of its K step needs further products
constexpr int EIGHTS = GROUP_CHANNELS / 8, SLOTS = (EIGHTS + SPLIT - 1) / SPLIT;      // blocks of eight channels; those that a rank finishes
constexpr u32 BLOCK_BYTES = 128 * 16, INBOX_BYTES = SPLIT > 1 ? SLOTS * SPLIT * BLOCK_BYTES : 0;   // sums of eight channels; of a warpgroup
static_assert(SHARED_BYTES >= BARRIER_BYTES + STAGES * STAGE_BYTES + GROUPS * INBOX_BYTES, "the launch reserves what the block uses");

// Lanes that release a stage. One is enough, after the accesses of the others, but racecheck tracks only a thread's own arrivals.
#ifdef RACECHECK
constexpr int RELEASERS = 32;
#else
constexpr int RELEASERS = 1;
#endif

#include "conv_loads.cuh"

#if PROLOGUE
struct Before {                                    // what the prologue reads
    const float2* constants;                       // scale and shift of each channel
    const float* gate[2];                          // the factors of the images of a thread's two pixels
    int gate_channels;

    __device__ __forceinline__ Before(const Params& p, int pixel) : constants(p.before), gate_channels(p.gate_channels) {
        #pragma unroll
        for (int i = 0; GATED && i < 2; i++)
            gate[i] = reinterpret_cast<const float*>(p.gate) + (long long)min((pixel + 8 * i) / p.image_pixels, p.images - 1) * p.gate_pitch;
    }

    // Changes four channels of both pixels.
    __device__ __forceinline__ void change(float4& first, float4& second, int channel) const {
        const float4 a = __ldg(reinterpret_cast<const float4*>(constants + channel)), b = __ldg(reinterpret_cast<const float4*>(constants + channel) + 1);
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            float4 g = make_float4(0.0f, 0.0f, 0.0f, 0.0f), &x = i ? second : first;
            if (GATED && channel < gate_channels) g = *reinterpret_cast<const float4*>(gate[i] + channel);
            x.x = prologue(x.x, make_float2(a.x, a.y), g.x), x.y = prologue(x.y, make_float2(a.z, a.w), g.y);
            x.z = prologue(x.z, make_float2(b.x, b.y), g.z), x.w = prologue(x.w, make_float2(b.z, b.w), g.w);
        }
    }
};
#else
struct Before {
    __device__ __forceinline__ Before(const Params&, int) {}
    __device__ __forceinline__ void change(float4&, float4&, int) const {}
};
#endif

// Four values of each of two pixels, eight rows apart, for each wgmma of a K step.
struct Values {
    float4 v[2][STEPS];

    // at: this lane's first pixel in shared memory; row: its number; scales: of the K step's input channels, which begin with ``channel``.
    __device__ __forceinline__ void load(u32 at, int row, u32 scales, int lane, const Before& before, int channel) {
        const int swizzle = SPAN == 128 ? row % 8 : row / 2 % 4;
        #pragma unroll
        for (int s = 0; s < STEPS; s++) {
            const int chunk = lane % 4 * STEPS + s;
            #pragma unroll
            for (int i = 0; i < 2; i++) shared_load(at + i * 8 * SPAN + (chunk ^ swizzle) * 16, v[i][s]);
            before.change(v[0][s], v[1][s], channel + chunk * 4);
            if (!EQUALIZED) continue;
            float4 c;
            shared_load(scales + chunk * 16, c);
            #pragma unroll
            for (int i = 0; i < 2; i++) v[i][s].x *= c.x, v[i][s].y *= c.y, v[i][s].z *= c.z, v[i][s].w *= c.w;
        }
    }
};

// These values as operand A, divided.
struct Pixels {
    u32 first[STEPS][4], rest[STEPS][4];
    float inverse[2];                              // of the scales: 2^(e - 14), where the largest value of the pixel is in [2^e, 2^(e + 1));
                                                   // negative if one of this thread's values lost bits that its products may need
    bool uneven;                                   // a value of any pixel did

    __device__ __forceinline__ void divide(const Values& x) {
        float most[2] = {};
        u32 least[2] = {~0u, ~0u};                 // twice the bits of the smallest value, without its sign, minus one: zeros do not count
        #pragma unroll
        for (int i = 0; i < 2; i++)
            #pragma unroll
            for (int s = 0; s < STEPS; s++) {
                const float4 v = x.v[i][s];
                most[i] = fmaxf(most[i], fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
                least[i] = min(least[i], min(min(doubled(v.x), doubled(v.y)), min(doubled(v.z), doubled(v.w))));
            }
        #pragma unroll
        for (int lanes = 1; lanes < 4; lanes *= 2)
            #pragma unroll
            for (int i = 0; i < 2; i++) most[i] = fmaxf(most[i], __shfl_xor_sync(0xffffffffu, most[i], lanes));
        uneven = false;
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 exponent = exponent_of(most[i]);
            const float scale = scale_of(exponent);
            const bool loses = UNEVEN && least[i] < (exponent - min(exponent, u32(EVEN))) << 24;
            uneven |= loses;
            inverse[i] = loses ? -inverse_scale_of(exponent) : inverse_scale_of(exponent);
            #pragma unroll
            for (int s = 0; s < STEPS; s++) {
                divide_pair(x.v[i][s].x, x.v[i][s].y, scale, first[s][i], rest[s][i]);
                divide_pair(x.v[i][s].z, x.v[i][s].w, scale, first[s][i + 2], rest[s][i + 2]);
            }
        }
    }

    // Whether one of the values of a pixel, of which four lanes have parts, lost bits that its products may need.
    __device__ __forceinline__ bool lost(int i) const {
        const float pair = fminf(inverse[i], __shfl_xor_sync(0xffffffffu, inverse[i], 1));
        return fminf(pair, __shfl_xor_sync(0xffffffffu, pair, 2)) < 0.0f;
    }

    // What the parts of the values lack, times their scale.
    __device__ __forceinline__ void take_remains(Values& x) const {
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const float scale = __uint_as_float((254u << 23) - __float_as_uint(fabsf(inverse[i])));
            #pragma unroll
            for (int s = 0; s < STEPS; s++) {
                float4& v = x.v[i][s];
                v.x = fmaf(v.x, scale, -low_half(first[s][i])) - low_half(rest[s][i]);
                v.y = fmaf(v.y, scale, -high_half(first[s][i])) - high_half(rest[s][i]);
                v.z = fmaf(v.z, scale, -low_half(first[s][i + 2])) - low_half(rest[s][i + 2]);
                v.w = fmaf(v.w, scale, -high_half(first[s][i + 2])) - high_half(rest[s][i + 2]);
            }
        }
    }

    static __device__ __forceinline__ u32 doubled(float x) { return (__float_as_uint(x) << 1) - 1; }
};

// The products of a K step, from zero. weights: the first parts of this warpgroup's channels.
DEVICE void multiply(float (&sums)[GROUP_CHANNELS / 2], const Pixels& a, u32 weights) {
    const u64 b = wgmma_descriptor<WEIGHT_SPAN>(weights), rest = b + PART_BYTES / 16;
    #pragma unroll
    for (int s = 0; s < STEPS; s++) {
        wgmma_pixels(sums, a.rest[s], b + 2 * s, s != 0);
        wgmma_pixels(sums, a.first[s], rest + 2 * s, 1);
    }
    #pragma unroll
    for (int s = 0; s < STEPS; s++) wgmma_pixels(sums, a.first[s], b + 2 * s, 1);
}

// Two channels of each of two pixels, eight rows apart: a thread's part of a block of eight channels.
struct Block {
    int channel, pixel, end;                       // beyond the last ones: not stored, and loads read the last ones
    float2 factor, residual[2];
    Channel constants[2];

    __device__ __forceinline__ void load(const Params& p, int channel_, int end_, int pixel_) {
        channel = channel_, end = end_, pixel = pixel_;
        const int near = min(channel, p.channels - 2);
        factor = __ldg(reinterpret_cast<const float2*>(p.factors + near));
        factor.x *= WEIGHTS_SCALE, factor.y *= WEIGHTS_SCALE;
        constants[0] = channel_at(p, near), constants[1] = channel_at(p, near + 1);
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const long long at = min(pixel + 8 * i, p.pixel_count - 1);
            residual[i] = make_float2(0.0f, 0.0f);
            if (HAS_RESIDUAL) residual[i] = *reinterpret_cast<const float2*>(p.residual_pointer + (at * p.residual_pitch + near) * OUT_ITEM);
        }
    }

    // v: the sums of the first pixel, then of the second one.
    __device__ __forceinline__ void store(const Params& p, const float (&v)[4]) const {
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const float x = v[2 * i] * factor.x, y = v[2 * i + 1] * factor.y;
            const bool live = channel < end && pixel + 8 * i < p.pixel_count;
#if SCATTER
            u8* const target = live ? scattered(p.scatter, p.output_pointer, OUT_ITEM, channel, pixel + 8 * i, p.out_h, p.out_w) : nullptr;
            if (target == nullptr) continue;
#else
            u8* const target = p.output_pointer + ((long long)(pixel + 8 * i) * p.output_pitch + channel) * OUT_ITEM;
#endif
#if PAIRED
            const float result = of_pair(x, constants[0], y, constants[1]);
            if (live) *reinterpret_cast<float*>(target) = result;
#else
            float2 result;
            finish_two(p.requantize, x, y, constants[0], constants[1], residual[i].x, residual[i].y, result.x, result.y);
            if (live) *reinterpret_cast<float2*>(target) = result;
#endif
        }
    }
};

// Finishes and stores ``count`` blocks of eight channels, at most MOST, ``apart`` channels from each other. channel, pixel: of this thread in
// the first one. end: of the channels to store. sum_of(i, v): the sums of block i.
template <int MOST, class SumOf>
DEVICE void store_blocks(const Params& p, int count, int channel, int end, int apart, int pixel, const SumOf& sum_of) {
    constexpr int AT_ONCE = 4;                    // a thread would wait for the loads of each block
    #pragma unroll
    for (int first = 0; first < MOST; first += AT_ONCE) {
        Block blocks[AT_ONCE];
        #pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (first + i < MOST) blocks[i].load(p, first + i < count ? channel + (first + i) * apart : end, end, pixel);
        #pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (first + i >= MOST) continue;
            float v[4];
            sum_of(first + i, v);
            blocks[i].store(p, v);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) conv_parts_sm90(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 shared[];
    const u32 base = smem_address(shared);
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;  // warp-uniform, and the compiler knows it
    const int rank = SPLIT > 1 ? int(cluster_rank()) : 0;
    const int first_tile = blockIdx.x / SPLIT, tile_step = gridDim.x / SPLIT;
    const int k_begin = SPLIT > 1 ? p.k_steps * rank / SPLIT : 0, k_count = (SPLIT > 1 ? p.k_steps * (rank + 1) / SPLIT : p.k_steps) - k_begin;
    const u32 full = base, empty = full + 8 * STAGES, reduced = empty + 8 * STAGES, ring = base + BARRIER_BYTES, inbox = ring + STAGES * STAGE_BYTES;

    Place to;
    if (warp == CONSUMERS / 32) {
        if (lane == 0) {
            tma_prefetch(&p.weights);
            tma_prefetch(&p.pixels0);
            if (MODE1 >= 0) tma_prefetch(&p.pixels1);
        }
        to = place(p, first_tile, 0, k_begin);
    }
    if (warp == CONSUMERS / 32 + 1 && lane == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, GROUPS * 4 * RELEASERS);
        }
        barrier_init(reduced, 1);
        barrier_init_fence();
        async_proxy_fence();
        if (SPLIT > 1 && rank < EIGHTS)            // bytes of sums that this rank will receive
            barrier_expect(reduced, GROUPS * ((EIGHTS + SPLIT - 1 - rank) / SPLIT) * SPLIT * BLOCK_BYTES);
    }
    __syncthreads();
    if (SPLIT > 1) cluster_arrive_relaxed();
    grid_launch_dependents();

    if (warp >= CONSUMERS / 32) {
        if (GROUPS == 2) give_registers<40>();
        if (warp == CONSUMERS / 32 && elect_one()) {
            const int primed = k_count < STAGES ? k_count : STAGES;
            auto load_constants = [&](int stage, int k) {
                barrier_expect(full + 8 * stage, LOADED_BYTES);
                load_weights(p, ring + stage * STAGE_BYTES + WEIGHTS_AT, full + 8 * stage, 0, k_begin + k, to.channel, to.batch);
#if EQUALIZED
                const int band = BANDED ? to.channel / p.band_channels : 0;
                bulk_load(ring + stage * STAGE_BYTES + SCALES_AT, p.input_scales + (band * p.k_steps + k_begin + k) * BK, BK * 4, full + 8 * stage);
#endif
            };
            for (int k = 0; k < primed; k++) load_constants(k, k);
            grid_dependency_wait();
            #pragma unroll 1
            for (int k = 0; k < primed; k++) load_stage(p, to, 0, ring + k * STAGE_BYTES, full + 8 * k);
            int stage = primed == STAGES ? 0 : primed, parity = primed == STAGES ? 0 : 1, fresh = STAGES - primed, k = primed;
            for (int tile = first_tile; tile < p.tiles; tile += tile_step, k = 0) {
                if (tile != first_tile) to = place(p, tile, 0, k_begin);
                #pragma unroll 1
                for (; k < k_count; k++) {
                    if (fresh > 0) fresh--;        // a stage that was never filled
                    else barrier_wait(empty + 8 * stage, parity);
                    load_constants(stage, k);
                    load_stage(p, to, 0, ring + stage * STAGE_BYTES, full + 8 * stage);
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
            }
        } else if (warp == CONSUMERS / 32 + 1) {
            fetch_ahead(p.ahead, lane);
        }
        return;
    }
    if (GROUPS == 2) take_registers<232>();
    const int group = warp / 4, quarter = warp % 4;
    const int group_pixel = group % PIXEL_GROUPS * 64, group_channel = group / PIXEL_GROUPS * GROUP_CHANNELS;
    const int row = group_pixel + quarter * 16 + lane / 4, column = group_channel + lane % 4 * 2;
    const u32 own_pixels = ring + row * SPAN, own_weights = ring + WEIGHTS_AT + group_channel * WEIGHT_SPAN;
    int stage = 0, parity = 0;
    grid_dependency_wait();
    for (int tile = first_tile; tile < p.tiles; tile += tile_step) {
        float whole[GROUP_CHANNELS / 2] = {}, sums[GROUP_CHANNELS / 2];
        Pixels pixels[2];
        int channel = 0, pixel = 0, loaded = k_begin;      // the K step to load next
        if (PROLOGUE) tile_at(p, tile, 0, channel, pixel);
        const Before before(p, pixel + row);
        auto values = [&](int of, int k) {
            Values x;
            x.load(own_pixels + of * STAGE_BYTES, row, ring + of * STAGE_BYTES + SCALES_AT, lane, before, k * BK);
            return x;
        };
        auto divide = [&](Pixels& to, const Values& x) {
            to.divide(x);
            if (UNEVEN) to.uneven = any_thread(1 + group, 128, to.uneven);
        };
        auto load = [&](Pixels& to) {              // of the current stage
            barrier_wait(full + 8 * stage, parity);
            divide(to, values(stage, loaded++));
        };
        auto begin = [&](const Pixels& own, int of) {
            wgmma_fence();
            multiply(sums, own, own_weights + of * STAGE_BYTES);
            wgmma_commit();
        };
        auto add = [&](float first, float second) {        // times the inverse scales of the two pixels
            #pragma unroll
            for (int i = 0; i < GROUP_CHANNELS / 2; i++) whole[i] = fmaf(sums[i], i / 2 % 2 ? second : first, whole[i]);
        };
        auto step = [&](Pixels& own, Pixels& next, bool last) {
            const int ended = stage, k = loaded - 1;
            begin(own, ended);
            if (++stage == STAGES) stage = 0, parity ^= 1;
            if (!last) load(next);
            wgmma_wait<0>();
            float first = fabsf(own.inverse[0]) / WEIGHTS_SCALE, second = fabsf(own.inverse[1]) / WEIGHTS_SCALE;
            if (UNEVEN && own.uneven) {            // products of what the parts lack
                Values x = values(ended, k);
                do {
                    add(first, second);
                    // A pixel that lost nothing takes no more: other pixels do not change its results.
                    if (!own.lost(0)) first = 0.0f;
                    if (!own.lost(1)) second = 0.0f;
                    own.take_remains(x);
                    divide(own, x);
                    first *= fabsf(own.inverse[0]), second *= fabsf(own.inverse[1]);
                    begin(own, ended);
                    wgmma_wait<0>();
                } while (own.uneven);
            }
            if (lane < RELEASERS) barrier_arrive(empty + 8 * ended);
            add(first, second);
        };
        load(pixels[0]);
        #pragma unroll 1
        for (int k = 0; k < k_count; k += 2) {
            step(pixels[0], pixels[1], k + 1 == k_count);
            if (k + 1 < k_count) step(pixels[1], pixels[0], k + 2 == k_count);
        }
        tile_at(p, tile, 0, channel, pixel);
        const int end = BANDED ? (channel / p.band_channels + 1) * p.band_channels : p.channels;
        channel += column, pixel += row;
        if (SPLIT == 1) {
            store_blocks<EIGHTS>(p, EIGHTS, channel, end, 8, pixel, [&](int block, float (&v)[4]) {
                #pragma unroll
                for (int i = 0; i < 4; i++) v[i] = whole[4 * block + i];
            });
            continue;
        }
        // A rank finishes the blocks rank, rank + SPLIT, ... and adds the sums of all ranks in their order.
        const u32 own_box = inbox + group * INBOX_BYTES + threadIdx.x % 128 * 16;
        cluster_wait();                            // the peers run and their barriers are initialized: their shared memory may be written
        #pragma unroll
        for (int j = 0; j < EIGHTS; j++) cluster_send(own_box + (j / SPLIT * SPLIT + rank) * BLOCK_BYTES, reduced, j % SPLIT, &whole[j * 4]);
        if (rank >= EIGHTS) return;
        barrier_wait_cluster(reduced, 0);
        store_blocks<SLOTS>(p, (EIGHTS - rank + SPLIT - 1) / SPLIT, channel + 8 * rank, end, 8 * SPLIT, pixel, [&](int block, float (&v)[4]) {
            float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            #pragma unroll
            for (int from = 0; from < SPLIT; from++) {
                float4 more;
                shared_load(own_box + (block * SPLIT + from) * BLOCK_BYTES, more);
                total.x += more.x, total.y += more.y, total.z += more.z, total.w += more.w;
            }
            v[0] = total.x, v[1] = total.y, v[2] = total.z, v[3] = total.w;
        });
    }
}
