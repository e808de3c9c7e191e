// Convolution of narrow groups, or of few channels, for Hopper, on mma.sync. A product never crosses groups, so it multiplies no zeros of
// other groups, and it does not pad the channels of results to wgmma's 64.
//
// A band is a group of BAND chunks of eight channels, in and out. Without groups (DENSE), the only band has BAND chunks of input and any
// number of results. A warp takes BLOCKS chunks of a band's results for STRIPS strips of 16 pixels (STRIP_W x STRIP_H), one below the
// other. It walks the patch's rows once: a fragment that ldmatrix loads under a tap serves all strips that meet the row. Filters stay in
// registers. A K step is two units; a unit is eight channels under one tap of a filter row.
//
// generated.cuh: see tile_walk.cuh; also BAND, BLOCKS, STRIP_W, STRIPS, GRID_X, GRID_Y (warps beside and below each other), the filter
// (KERNEL_H, KERNEL_W, DILATION_H, DILATION_W), MIN_BLOCKS, epilogue() and multiply().
#include "ptx.cuh"
#include "generated.cuh"
#include "strips.cuh"
#include "tile_walk.cuh"

constexpr int UNITS = KERNEL_W * BAND, PAIRS = (UNITS + 1) / 2;
constexpr int SHARES = OUT_CHUNKS / BLOCKS;        // warps that share a slab's results
static_assert(CHUNKS % BAND == 0 && (DENSE ? CHUNKS == BAND : CHUNKS == OUT_CHUNKS && BAND % BLOCKS == 0), "bands of this kernel");
static_assert(OUT_CHUNKS % BLOCKS == 0 && WARPS == SHARES * GRID_X * GRID_Y && TILE_N == 1, "a tile of this kernel");


extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) grouped_sm90(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 shared[];
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int share = warp % SHARES, part = warp / SHARES, slab = blockIdx.x % p.slabs;
    const int strip_x = part % GRID_X * STRIP_W, strip_y = part / GRID_X * STRIPS * STRIP_H;
    const int from = DENSE ? 0 : share * BLOCKS / BAND * BAND;      // the band's first chunk within the patch

    // No kernel writes filters and bias: [channel][KERNEL_H][2 * PAIRS][8].
    u32 filter[KERNEL_H][PAIRS][BLOCKS][2];
    float bias[BLOCKS][2];
    #pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        const int chunk = slab * OUT_CHUNKS * 8 + (share * BLOCKS + b) * 8, channel = chunk + lane / 4;
        const u16* own = p.weights + (long long)channel * (KERNEL_H * PAIRS * 16) + lane % 4 * 2;
        #pragma unroll
        for (int r = 0; r < KERNEL_H; r++) {
            #pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                #pragma unroll
                for (int half = 0; half < 2; half++) {
                    const u32* at = reinterpret_cast<const u32*>(own + ((r * PAIRS + i) * 2 + half) * 8);
                    filter[r][i][b][half] = channel < p.channels ? __ldg(at) : 0u;
                }
            }
        }
        #pragma unroll
        for (int i = 0; i < 2; i++) bias[b][i] = chunk < p.channels ? __ldg(p.bias + chunk + lane % 4 * 2 + i) : 0.0f;
    }

    // The 16 bytes that this lane addresses for ldmatrix: lanes 0-15 those of a pair's first unit, lanes 16-31 of its second.
    const int pixel = lane % 16;
    const int own = (strip_y + pixel / STRIP_W) * STRIDE_H * PATCH_W + (strip_x + pixel % STRIP_W) * STRIDE_W;
    u32 unit_at[PAIRS];
    #pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const int unit = min(2 * i + lane / 16, UNITS - 1);        // with an odd number of units, the repeated one meets zeros
        unit_at[i] = (own + unit / BAND * DILATION_W) * SPAN + (from + unit % BAND) * 16;
    }

    u32 result[STRIPS][BLOCKS][2];                 // until the products are complete, the residual
    auto compute = [&](u32 patch, const Place& to) {
#if HAS_RESIDUAL
        #pragma unroll
        for (int m = 0; m < STRIPS; m++) {
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                const int at = lane / 4 + half * 8, y = to.y + strip_y + m * STRIP_H + at / STRIP_W, x = to.x + strip_x + at % STRIP_W;
                const u16* pixel = p.residual + (((long long)to.n * p.out_h + y) * p.out_w + x) * p.residual_pitch;
                #pragma unroll
                for (int b = 0; b < BLOCKS; b++) {
                    const int channel = slab * OUT_CHUNKS * 8 + (share * BLOCKS + b) * 8 + lane % 4 * 2;
                    const bool inside = y < p.out_h && x < p.out_w && channel < p.channels;
                    result[m][b][half] = inside ? *reinterpret_cast<const u32*>(pixel + channel) : 0u;
                }
            }
        }
#endif
        float acc[STRIPS][BLOCKS][4];
        #pragma unroll
        for (int i = 0; i < STRIPS * BLOCKS * 4; i++) (&acc[0][0][0])[i] = 0.0f;
        if (to.y + strip_y < p.out_h && to.x + strip_x < p.out_w) {
            #pragma unroll
            for (int r = 0; r < ROWS; r++) {
                if (!used(r)) continue;
                #pragma unroll
                for (int i = 0; i < PAIRS; i++) {
                    u32 a[4];
                    ldmatrix_x4(swizzled<CHUNKS>(patch + unit_at[i] + r * PATCH_W * SPAN), a[0], a[1], a[2], a[3]);
                    #pragma unroll
                    for (int m = 0; m < STRIPS; m++) {
                        if (!meets(r, m)) continue;
                        const int tap = (r - m * STRIP_H * STRIDE_H) / DILATION_H;
                        #pragma unroll
                        for (int b = 0; b < BLOCKS; b++) multiply(acc[m][b], a, filter[tap][i][b][0], filter[tap][i][b][1]);
                    }
                }
            }
        }
        float sum[BLOCKS][2];
        #pragma unroll
        for (int i = 0; i < BLOCKS * 2; i++) (&sum[0][0])[i] = 0.0f;
        #pragma unroll
        for (int m = 0; m < STRIPS; m++) {
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                const int at = lane / 4 + half * 8;
                const bool inside = to.y + strip_y + m * STRIP_H + at / STRIP_W < p.out_h && to.x + strip_x + at % STRIP_W < p.out_w;
                #pragma unroll
                for (int b = 0; b < BLOCKS; b++) {
                    const u32 added = HAS_RESIDUAL ? result[m][b][half] : 0u;
                    float first = epilogue(acc[m][b][2 * half], bias[b][0], low_float(added));
                    float second = epilogue(acc[m][b][2 * half + 1], bias[b][1], high_float(added));
#if FINAL_SILU
                    silu_pair(first, second);
#endif
                    result[m][b][half] = pack2(first, second);
                    if (SQUEEZE && inside) sum[b][0] += first, sum[b][1] += second;
                }
            }
        }
#if SQUEEZE
        float* partial = reinterpret_cast<float*>(shared + HEAD_BYTES + STAGES * PATCH_BYTES + RESULT_BYTES) + part * OUT_CHUNKS * 8;
        #pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                float total = sum[b][i];
                for (int mask = 4; mask < 32; mask *= 2) total += __shfl_xor_sync(0xffffffffu, total, mask);
                if (lane < 4) partial[(share * BLOCKS + b) * 8 + lane * 2 + i] = total;
            }
        }
#endif
    };
    walk_tiles(p, shared, compute, [&](u32 results) {
        #pragma unroll
        for (int m = 0; m < STRIPS; m++) {
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                const int at = lane / 4 + half * 8, y = strip_y + m * STRIP_H + at / STRIP_W, x = strip_x + at % STRIP_W;
                #pragma unroll
                for (int b = 0; b < BLOCKS; b++)
                    shared_store(swizzled<OUT_CHUNKS>(results + (y * TILE_W + x) * OUT_SPAN + (share * BLOCKS + b) * 16) + lane % 4 * 4, int(result[m][b][half]));
            }
        }
    });
}
