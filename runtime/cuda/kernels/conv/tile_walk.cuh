// A block that walks over tiles of an image's pixels, channels-last in 16 bits: TMA loads the patches under the tiles' windows, for a slab
// of channels, and stores the results. The caller computes.
//
// generated.cuh defines CHUNKS (of eight channels, in a patch), OUT_CHUNKS (in a slab of results), DENSE (1: all slabs read the same
// channels), TILE_W, TILE_H, TILE_N (pixels and images of a tile), PATCH_W, PATCH_H (pixels of a patch; zeros in the padding), STRIDE_H,
// STRIDE_W, STAGES (patches in flight), WARPS, SQUEEZE (0 none, 1 sums of tiles, 2 means), PARTS (warps with the same channels),
// HAS_RESIDUAL and KERNEL_D (frames under the filter, 0: there are no volumes). In volumes, the images of a tile are neighboring frames of
// the result.
#pragma once
#include "ptx.cuh"

constexpr int THREADS = WARPS * 32;
constexpr u32 SPAN = CHUNKS * 16, OUT_SPAN = OUT_CHUNKS * 16, HEAD_BYTES = 1024;
// An odd number of chunks has no bank conflicts; TMA swizzles numbers that are powers of two.
constexpr __device__ bool swizzles(int chunks) { return chunks == 2 || chunks == 4 || chunks == 8; }
static_assert((swizzles(CHUNKS) || CHUNKS % 4) && (swizzles(OUT_CHUNKS) || OUT_CHUNKS % 4), "chunks of pixels would lie in the same banks");
constexpr int PATCH_N = KERNEL_D ? TILE_N + KERNEL_D - 1 : TILE_N;     // images or frames of a patch
constexpr u32 PATCH_LOAD = PATCH_N * PATCH_H * PATCH_W * SPAN, PATCH_BYTES = (PATCH_LOAD + 1023) / 1024 * 1024;
constexpr u32 RESULT_BYTES = (TILE_N * TILE_H * TILE_W * OUT_SPAN + 1023) / 1024 * 1024;

struct Params {
    TensorMap input, output;                       // (channel, x, y, n), of volumes (channel, x, y, z, n)
    const u16* weights;
    const float* bias;                             // [channels]
    float* sums;                                   // SQUEEZE 1: [n][tiles][channels], of volumes [n][frames][tiles][channels]
    u16* means;                                    // SQUEEZE 2: [n][channels]
    int batch, channels, out_h, out_w, pad_h, pad_w;                // channels of the result
    int slabs, tiles_x, tiles, count;              // slabs of channels; tiles of a row of an image, of images, of the batch
    float factor;                                  // 1 / pixels of a mean
#if KERNEL_D
    int pad_d, out_d, tiles_z;                     // frames of a volume of the result, and tiles along them
#endif
#if HAS_RESIDUAL
    const u16* residual;                           // [n][out_h][out_w][residual_pitch]
    int residual_pitch;
#endif
};

struct Place {
    int n, y, x, tile;                             // first image and first output pixel; index of the tile within its images
};

// The address under TMA's swizzle, for an address in a tile of rows of N chunks. Tiles begin at multiples of 1024 bytes.
template <int N> DEVICE u32 swizzled(u32 at) { return swizzles(N) ? at ^ (at >> 3 & (N - 1) << 4) : at; }

DEVICE Place place_of(const Params& p, int tile) {
    const int in_image = tile % p.tiles;
    return {tile / p.tiles * TILE_N, in_image / p.tiles_x * TILE_H, in_image % p.tiles_x * TILE_W, in_image};
}
#if KERNEL_D
// The volume of a tile, and the first frame of its result. (A tile has no frames of two volumes: n counts whole tiles.)
DEVICE int volume_of(const Params& p, const Place& at) { return at.n / TILE_N / p.tiles_z; }
DEVICE int frame_of(const Params& p, const Place& at) { return at.n / TILE_N % p.tiles_z * TILE_N; }
#endif

DEVICE void load_patch(const Params& p, u32 base, int slab, const Place& to, int stage) {
    barrier_expect(base + 8 * stage, PATCH_LOAD);
    const u32 patch = base + HEAD_BYTES + stage * PATCH_BYTES, full = base + 8 * stage;
    const int channel = DENSE ? 0 : slab * CHUNKS * 8;
#if KERNEL_D
    tma_load_5d(patch, &p.input, full, channel, to.x - p.pad_w, to.y - p.pad_h, frame_of(p, to) - p.pad_d, volume_of(p, to));
#else
    tma_load_4d(patch, &p.input, full, channel, to.x * STRIDE_W - p.pad_w, to.y * STRIDE_H - p.pad_h, to.n);
#endif
}

DEVICE void store_results(const Params& p, u32 results, int slab, const Place& to) {
#if KERNEL_D
    tma_store_5d(&p.output, results, slab * OUT_CHUNKS * 8, to.x, to.y, frame_of(p, to), volume_of(p, to));
#else
    tma_store_4d(&p.output, results, slab * OUT_CHUNKS * 8, to.x, to.y, to.n);
#endif
}

// compute(patch, place): computes a tile's results in registers, from its patch in shared memory; put(results) writes them to shared
// memory. All threads call both. For a squeeze, compute() leaves the warp's channel sums in its row of ``partial``.
template <class Compute, class Put> DEVICE void walk_tiles(const Params& p, u8* shared, const Compute& compute, const Put& put) {
    const u32 base = smem_address(shared), results = base + HEAD_BYTES + STAGES * PATCH_BYTES;
    const int slab = blockIdx.x % p.slabs, first = blockIdx.x / p.slabs, step = gridDim.x / p.slabs;
    const bool leader = threadIdx.x == 0;
    if (leader) {
        for (int i = 0; i < STAGES; i++) barrier_init(base + 8 * i, 1);
        barrier_init_fence();
        async_proxy_fence();
    }
    Place to = place_of(p, first);                 // before the wait: it takes divisions
    __syncthreads();
    grid_launch_dependents();
    grid_dependency_wait();
    if (leader) {
        for (int i = 0; i < STAGES; i++)
            if (first + i * step < p.count) load_patch(p, base, slab, i ? place_of(p, first + i * step) : to, i);
    }
    int stage = 0, parity = 0;
    for (int tile = first; tile < p.count; tile += step) {
        if (tile != first) to = place_of(p, tile);
        barrier_wait(base + 8 * stage, parity);
        compute(base + HEAD_BYTES + stage * PATCH_BYTES, to);
        if (leader) tma_store_wait_read<0>();
        __syncthreads();                           // the patch has been read, and the previous tile's results
        if (leader && tile + STAGES * step < p.count) load_patch(p, base, slab, place_of(p, tile + STAGES * step), stage);
        u32 to_results = results;
        asm volatile("" : "+r"(to_results));       // else addresses in the buffer are kept from tile to tile, and spill
        put(to_results);
#if SQUEEZE
        const float* partial = reinterpret_cast<const float*>(shared + HEAD_BYTES + STAGES * PATCH_BYTES + RESULT_BYTES);
        for (int i = threadIdx.x; i < TILE_N * OUT_CHUNKS * 8; i += THREADS) {
            const int image = i / (OUT_CHUNKS * 8), channel = slab * OUT_CHUNKS * 8 + i % (OUT_CHUNKS * 8);
            float total = 0.0f;
            #pragma unroll
            for (int k = 0; k < PARTS; k++) total += partial[k * TILE_N * OUT_CHUNKS * 8 + i];
#if KERNEL_D
            const int frame = frame_of(p, to) + image, at = volume_of(p, to) * p.out_d + frame;
            const bool here = frame < p.out_d;
#else
            const int at = to.n + image;
            const bool here = at < p.batch;
#endif
            if (channel >= p.channels || !here) continue;
            if (SQUEEZE == 1)
                p.sums[((long long)at * p.tiles + to.tile) * p.channels + channel] = total;
            else
                p.means[(long long)at * p.channels + channel] = pack1(total * p.factor);
        }
#endif
        async_proxy_fence();
        __syncthreads();
        if (leader) {
            store_results(p, results, slab, to);
            tma_store_commit();
        }
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    if (leader) tma_store_wait_read<0>();
}
