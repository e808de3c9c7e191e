// A few rows times packed weights (batch 1 to 16) on Hopper: every multiprocessor reads its share of the weights as one stream that does
// not end before the kernel does, and begins before the kernel ahead has ended. 16-bit activations, fp32 sums.
//
//   out[m, column] = epilogue(sum_k x[m, k] * (number[column, k] - zero) * scale)
//
// A block takes the tiles of 16 columns from its first to its last one, which lie in memory without a gap, or of each of them one of SPLIT
// parts of K. Warps take pieces of PIECE chunks in turn, each through a ring of SLOTS slots of its own in shared memory: bulk copies fill
// them, and the lane that started a copy starts the next one when the warp has read the slot. All slots are under way before
// griddepcontrol.wait, since weights depend on no other kernel. So memory has work while the kernel ahead ends and rows arrive.
// The next kernel's blocks may begin when the last copies are under way: their copies then keep memory busy while this kernel ends.
// Before that, they would only take bandwidth from this one.
// The rows lie in shared memory, too. One more warp adds the warps' sums of a tile in a fixed order, and stores them.
// Where blocks share K, each stores its sums, and the one that comes last adds those of its tiles in the order of K.
//
// generated.cuh defines ROWS, WARPS, PIECE, TOGETHER (1 or 2 chunks of a piece are multiplied side by side), SLOTS, SPLIT, RESIDENT (blocks
// of a multiprocessor: with the next kernel's), HAS_RESIDUAL, epilogue(), and what packed.cuh says.
#include "ptx.cuh"
#include "mma.cuh"
#include "generated.cuh"
#include "stream.cuh"
#include "packed.cuh"
#include "packed_few.cuh"
#include "packed_sums.cuh"

struct Params {
    const u16* x;                                  // [ROWS][x_pitch], rows aligned to 16 bytes
    PackedWeights weights;
    const float* bias;
    const u16* residual;                           // as output
    u16* output;                                   // [ROWS][out_pitch]
    float4* partial;                               // [tiles][SPLIT][ROWS][16]
    u32* arrived;                                  // of each group of blocks with the same tiles; zero between launches
    int columns, k, x_pitch, out_pitch;
};

constexpr int CONSUMERS = WARPS * 32, THREADS = CONSUMERS + 32;
constexpr int SCALE_SET = 16 * GROUPS * SCALE_BYTES, ZERO_SET = 16 * GROUPS * ZERO_BYTES;  // bytes
constexpr int SCALES_AT = PIECE * CHUNK_BYTES, ZEROS_AT = SCALES_AT + PIECE * SCALE_SET, SLOT_BYTES = ZEROS_AT + PIECE * ZERO_SET;
constexpr int TILE_SLOTS = 4, TILE_SUMS = WARPS * ROWS * 16;       // of tiles whose sums are under way
constexpr int BARRIER_BYTES = (WARPS * SLOTS + 2 * TILE_SLOTS) * 8;
constexpr int RING_AT = (BARRIER_BYTES + 127) / 128 * 128, SUMS_AT = RING_AT + WARPS * SLOTS * SLOT_BYTES;
constexpr int ROWS_AT = SUMS_AT + TILE_SLOTS * TILE_SUMS * 4;
static_assert(SLOT_BYTES % 16 == 0, "bulk copies go to multiples of 16 bytes");

// What a block does: its tiles, and of each of them chunks of K, in pieces.
struct Share {
    int begin, end, first, last, pieces;
};
DEVICE Share share_of(const Params& p) {
    const u32 tiles = (p.columns + 15) / 16, chunks = p.weights.chunks;
    Share s;
    s.begin = tiles * blockIdx.x / gridDim.x, s.end = tiles * (blockIdx.x + 1) / gridDim.x;
    s.first = chunks * blockIdx.y / SPLIT, s.last = chunks * (blockIdx.y + 1) / SPLIT;
    s.pieces = (s.last - s.first + PIECE - 1) / PIECE;
    return s;
}

// Where a warp is in the block's stream of pieces: piece ``at`` of a tile.
struct Place {
    int tile, at;
    __device__ __forceinline__ void settle(const Share& share) {
        while (at >= share.pieces) at -= share.pieces, tile++;
    }
    __device__ __forceinline__ void next(const Share& share) { at += WARPS, settle(share); }
};

// Starts the copies of a piece: its weights, and the sets of scales and zero points that it has.
DEVICE void start_piece(const PackedWeights& w, const Share& share, const Place& place, u32 slot, u32 full) {
    const int first = share.first + place.at * PIECE, count = min(PIECE, share.last - first), set = first >> w.set_shift;
    const int sets = ((first + count - 1) >> w.set_shift) - set + 1;
    const long long from = (long long)place.tile * w.sets + set;
    barrier_expect(full, count * CHUNK_BYTES + sets * (SCALE_SET + ZERO_SET));
    bulk_load(slot, w.tiles + ((long long)place.tile * w.chunks + first) * CHUNK_BYTES, count * CHUNK_BYTES, full);
    bulk_load(slot + SCALES_AT, w.scales + from * SCALE_SET, sets * SCALE_SET, full);
    if (ZERO_SET) bulk_load(slot + ZEROS_AT, w.zeros + from * ZERO_SET, sets * ZERO_SET, full);
}

// Chunk ``i`` of a piece that begins with chunk ``first`` of its tile.
DEVICE Chunk chunk_of(const u8* slot, int first, int i, int shift, int lane) {
    Chunk c;
    const int set = (((first + i) >> shift) - (first >> shift)) * 16 + lane / 4;
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        c.weights[h] = *reinterpret_cast<const uint4*>(slot + i * CHUNK_BYTES + h * 512 + lane * 16);
        c.scales[h] = words_at<GROUPS * SCALE_BYTES>(slot + SCALES_AT + (set + h * 8) * (GROUPS * SCALE_BYTES));
#if ZEROS
        c.zeros[h] = words_at<GROUPS * ZERO_BYTES>(slot + ZEROS_AT + (set + h * 8) * (GROUPS * ZERO_BYTES));
#endif
    }
    return c;
}

// The warps' sums of each tile, added: stored, or where blocks share K, put with those of the others.
DEVICE void finish_tiles(const Params& p, const Share& share, const float* sums, u32 done, u32 free, int lane) {
    constexpr int EACH = (ROWS + 1) / 2;           // rows of a lane
    int first = 0;                                 // warp of a tile's first piece
    for (int tile = share.begin; tile < share.end; tile++) {
        const int slot = (tile - share.begin) % TILE_SLOTS, column = tile * 16 + lane % 16;
        const float bias = SPLIT == 1 && column < p.columns ? p.bias[column] : 0.0f;
        float residual[EACH];
        #pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int m = i * 2 + lane / 16;
            residual[i] = SPLIT == 1 && HAS_RESIDUAL && m < ROWS && column < p.columns ? unpack1(p.residual[(long long)m * p.out_pitch + column]) : 0.0f;
        }
        barrier_wait(done + 8 * slot, (tile - share.begin) / TILE_SLOTS & 1);
        float sum[EACH];
        #pragma unroll
        for (int i = 0; i < EACH; i++) sum[i] = 0.0f;
        for (int q = 0; q < min(share.pieces, WARPS); q++) {
            const int w = first + q < WARPS ? first + q : first + q - WARPS;
            #pragma unroll
            for (int i = 0; i < EACH; i++)
                if (i * 2 + lane / 16 < ROWS) sum[i] += sums[slot * TILE_SUMS + (w * ROWS + i * 2 + lane / 16) * 16 + lane % 16];
        }
        first = (first + share.pieces) % WARPS;
        #pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int m = i * 2 + lane / 16;
            if (m >= ROWS) break;
            if (SPLIT > 1)
                reinterpret_cast<float*>(p.partial)[(((long long)tile * SPLIT + blockIdx.y) * ROWS + m) * 16 + lane % 16] = sum[i];
            else if (column < p.columns)
                p.output[(long long)m * p.out_pitch + column] = pack1(epilogue(sum[i], bias, residual[i]));
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(free + 8 * slot);
    }
}

// The sums of all parts of K, in their order, by the block that came last.
DEVICE void add_parts(const Params& p, const Share& share) {
    for (int i = threadIdx.x; i < (share.end - share.begin) * ROWS * 4; i += THREADS) {
        const int tile = share.begin + i / (ROWS * 4), m = i / 4 % ROWS, column = tile * 16 + i % 4 * 4;
        const float4 bias = bias_of_four(p.bias, column, p.columns);
        float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        #pragma unroll
        for (int part = 0; part < SPLIT; part++) {
            const float4 v = __ldcg(p.partial + (((long long)tile * SPLIT + part) * ROWS + m) * 4 + i % 4);
            total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
        }
        if (column < p.columns) store_four(p, m, column, total, bias);
    }
}

// The sums of the block's tiles, by the warps that multiply.
DEVICE void multiply_tiles(const Params& p, const Share& share, u8* ring, float* own, const LaneRows& rows, u32 full, u32 done, u32 free,
                           Place ahead, int warp, int lane, bool leads) {
    Place place = {share.begin, warp};
    place.settle(share);
    int slot = 0;
    u32 parity = 0;
    for (int tile = share.begin; tile < share.end; tile++) {
        Sums<1> total;
        #pragma unroll
        for (int i = 0; i < ROW_TILES * 4; i++) total[0][i / 4][i % 4] = 0.0f;
        const bool works = place.tile == tile;
        while (place.tile == tile) {
            barrier_wait(full + 8 * slot, parity);
            const u8* const from = ring + slot * SLOT_BYTES;
            const int first = share.first + place.at * PIECE, count = min(PIECE, share.last - first);
            #pragma unroll 1
            for (int at = 0; at < count; at += TOGETHER) {
                Chunk chunk[TOGETHER][1];
                #pragma unroll
                for (int i = 0; i < TOGETHER; i++) chunk[i][0] = chunk_of(from, first, min(at + i, count - 1), p.weights.set_shift, lane);
                if (at + TOGETHER >= count) {
                    __syncwarp();                  // the slot is read: its next piece may come
                    if (ahead.tile < share.end) {
                        if (leads) start_piece(p.weights, share, ahead, smem_address(ring) + slot * SLOT_BYTES, full + 8 * slot);
                        ahead.next(share);
                        if (ahead.tile >= share.end) grid_launch_dependents();
                    }
                }
                const int chunk_here = first - share.first + at;
                add_chunk<1>(total, chunk[0], rows, chunk_here);
                if (TOGETHER == 2 && at + 1 < count) add_chunk<1>(total, chunk[TOGETHER - 1], rows, chunk_here + 1);
            }
            if (++slot == SLOTS) slot = 0, parity ^= 1;
            place.next(share);
        }
        const int at = (tile - share.begin) % TILE_SLOTS, turn = (tile - share.begin) / TILE_SLOTS;
        if (turn) barrier_wait(free + 8 * at, (turn - 1) & 1);
        if (works) {
            #pragma unroll
            for (int i = 0; i < ROW_TILES * 4; i++) {
                const int m = i / 4 * 8 + lane % 4 * 2 + i % 2;
                if (m < ROWS) own[at * TILE_SUMS + m * 16 + lane / 4 + i / 2 % 2 * 8] = total[0][i / 4][i % 4];
            }
        }
        __syncwarp();
        if (leads) barrier_arrive(done + 8 * at);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) packed_stream(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 shared[];
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const Share share = share_of(p);
    const u32 base = smem_address(shared), full = base + warp * SLOTS * 8, done = base + WARPS * SLOTS * 8, free = done + TILE_SLOTS * 8;
    const RowsHere here(shared + ROWS_AT, share.last - share.first);
    u8* const ring = shared + RING_AT + warp * (SLOTS * SLOT_BYTES);
    float* const sums = reinterpret_cast<float*>(shared + SUMS_AT);
    const bool leads = elect_one();
    Place ahead = {share.begin, warp};
    if (warp < WARPS) {
        ahead.settle(share);
        if (leads) {
            for (int i = 0; i < SLOTS; i++) barrier_init(full + 8 * i, 1);
            barrier_init_fence();
            async_proxy_fence();
        }
        for (int i = 0; i < SLOTS && ahead.tile < share.end; i++) {
            if (leads) start_piece(p.weights, share, ahead, smem_address(ring) + i * SLOT_BYTES, full + 8 * i);
            ahead.next(share);
        }
        if (ahead.tile >= share.end) grid_launch_dependents();
    } else if (leads) {
        for (int i = 0; i < TILE_SLOTS; i++) {
            barrier_init(done + 8 * i, WARPS);
            barrier_init(free + 8 * i, 1);
        }
        barrier_init_fence();
    }
    grid_dependency_wait();
    put_rows<THREADS>(here, p.x, p.x_pitch, share.first * CHUNK_K, p.k);
    __syncthreads();
    if (warp == WARPS) {
        finish_tiles(p, share, sums, done, free, lane);
    } else {
        multiply_tiles(p, share, ring, sums + warp * (ROWS * 16), LaneRows(here, lane), full, done, free, ahead, warp, lane, leads);
    }
    if (SPLIT == 1) return;
    __threadfence();
    __syncthreads();
    u32* const told = reinterpret_cast<u32*>(shared + SUMS_AT);
    if (threadIdx.x == 0) {
        *told = count_arrival(p.arrived + blockIdx.x) == SPLIT - 1;
        if (*told) p.arrived[blockIdx.x] = 0;
    }
    __syncthreads();
    if (!*told) return;
    __threadfence();
    add_parts(p, share);
}
