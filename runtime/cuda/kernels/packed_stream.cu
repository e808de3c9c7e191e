// A few rows times packed weights (batch 1 to 8) on Hopper: every multiprocessor reads its share of the weights as one stream that does not
// end before the kernel does, and begins before the kernel ahead has ended. 16-bit activations, fp32 sums.
//
//   out[m, column] = epilogue(sum_k x[m, k] * (number[column, k] - zero) * scale)
//
// A block takes the tiles of 16 columns from its first to its last one, which lie in memory without a gap. Warps take pieces of PIECE chunks
// in turn, each through a ring of SLOTS slots of its own in shared memory: bulk copies fill them, and the lane that started a copy
// starts the next one when the warp has read the slot. All slots are under way before griddepcontrol.wait, since weights depend on no other
// kernel. So memory has work while the kernel ahead ends and rows arrive.
// The rows lie in shared memory, too. The warps' sums of a tile go to one more warp, which adds them in a fixed order and stores.
//
// generated.cuh defines ROWS, WARPS, PIECE, TOGETHER (1 or 2 chunks of a piece are multiplied side by side), SLOTS, RESIDENT (blocks of a multiprocessor: with the next kernel's), HAS_RESIDUAL, epilogue(), and what packed.cuh says.
#include "ptx.cuh"
#include "mma.cuh"
#include "generated.cuh"
#include "stream.cuh"
#include "packed.cuh"
#include "packed_few.cuh"

struct Params {
    const u16* x;                                  // [ROWS][x_pitch], rows aligned to 16 bytes
    PackedWeights weights;
    const float* bias;
    const u16* residual;                           // as output
    u16* output;                                   // [ROWS][out_pitch]
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

// Where a warp is in the block's stream of pieces: piece ``at`` of a tile that has so many.
struct Place {
    int tile, at;
    __device__ __forceinline__ void settle(int pieces) {
        while (at >= pieces) at -= pieces, tile++;
    }
};

// Starts the copies of a piece: its weights, and the sets of scales and zero points that it has.
DEVICE void start_piece(const PackedWeights& w, const Place& place, u32 slot, u32 full) {
    const int first = place.at * PIECE, count = min(PIECE, w.chunks - first), set = first >> w.set_shift;
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

// Rows to shared memory, with zeros beyond K.
DEVICE void copy_rows(u32 target, const Params& p, int pitch) {
    const int vectors = p.weights.chunks * (CHUNK_K / 8);
    #pragma unroll
    for (int m = 0; m < ROWS; m++) {
        for (int v = threadIdx.x; v < vectors; v += THREADS) {
            const int bytes = max(0, min(16, (p.k - v * 8) * 2));
            copy_16_or_zeros(target + m * pitch + v * 16, bytes > 0 ? p.x + (long long)m * p.x_pitch + v * 8 : p.x, bytes);
        }
    }
    copies_commit();
    copies_wait_but<0>();
}

// Adds the warps' sums of each tile, and stores.
DEVICE void finish_tiles(const Params& p, const float* sums, u32 done, u32 free, int begin, int end, int lane) {
    for (int tile = begin; tile < end; tile++) {
        const int slot = (tile - begin) % TILE_SLOTS, column = tile * 16 + lane % 16;
        const float bias = column < p.columns ? p.bias[column] : 0.0f;
        float residual[(ROWS + 1) / 2];
        #pragma unroll
        for (int i = 0; i < (ROWS + 1) / 2; i++) {
            const int m = i * 2 + lane / 16;
            residual[i] = HAS_RESIDUAL && m < ROWS && column < p.columns ? unpack1(p.residual[(long long)m * p.out_pitch + column]) : 0.0f;
        }
        barrier_wait(done + 8 * slot, (tile - begin) / TILE_SLOTS & 1);
        #pragma unroll
        for (int i = 0; i < (ROWS + 1) / 2; i++) {
            const int m = i * 2 + lane / 16;
            if (m >= ROWS) break;
            float sum = 0.0f;
            #pragma unroll
            for (int w = 0; w < WARPS; w++) sum += sums[slot * TILE_SUMS + (w * ROWS + m) * 16 + lane % 16];
            if (column < p.columns) p.output[(long long)m * p.out_pitch + column] = pack1(epilogue(sum, bias, residual[i]));
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(free + 8 * slot);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) packed_stream(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 shared[];
    grid_launch_dependents();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32, tiles = (p.columns + 15) / 16;
    const int begin = u32(tiles) * blockIdx.x / gridDim.x, end = u32(tiles) * (blockIdx.x + 1) / gridDim.x;
    const int pieces = (p.weights.chunks + PIECE - 1) / PIECE, pitch = p.weights.chunks * (CHUNK_K * 2) + 16;
    const u32 full = smem_address(shared) + warp * SLOTS * 8, done = smem_address(shared) + WARPS * SLOTS * 8, free = done + TILE_SLOTS * 8;
    u8* const ring = shared + RING_AT + warp * (SLOTS * SLOT_BYTES);
    float* const sums = reinterpret_cast<float*>(shared + SUMS_AT);
    const bool leads = elect_one();
    Place ahead = {begin, warp};
    if (warp < WARPS) {
        ahead.settle(pieces);
        if (leads) {
            for (int i = 0; i < SLOTS; i++) barrier_init(full + 8 * i, 1);
            barrier_init_fence();
            async_proxy_fence();
        }
        for (int i = 0; i < SLOTS && ahead.tile < end; i++) {
            if (leads) start_piece(p.weights, ahead, smem_address(ring) + i * SLOT_BYTES, full + 8 * i);
            ahead.at += WARPS;
            ahead.settle(pieces);
        }
    } else if (leads) {
        for (int i = 0; i < TILE_SLOTS; i++) {
            barrier_init(done + 8 * i, WARPS);
            barrier_init(free + 8 * i, 1);
        }
        barrier_init_fence();
    }
    grid_dependency_wait();
    copy_rows(smem_address(shared) + ROWS_AT, p, pitch);
    __syncthreads();
    if (warp == WARPS) {
        finish_tiles(p, sums, done, free, begin, end, lane);
        return;
    }

    const u32 rows = smem_address(shared) + ROWS_AT + min(lane % 8, ROWS - 1) * pitch + place_in_row(lane);
    Place place = {begin, warp};
    place.settle(pieces);
    int slot = 0;
    u32 parity = 0;
    for (int tile = begin; tile < end; tile++) {
        float total[1][4] = {{0.0f, 0.0f, 0.0f, 0.0f}};
        while (place.tile == tile) {
            barrier_wait(full + 8 * slot, parity);
            const u8* const from = ring + slot * SLOT_BYTES;
            const int first = place.at * PIECE, count = min(PIECE, p.weights.chunks - first);
            #pragma unroll 1
            for (int at = 0; at < count; at += TOGETHER) {
                Chunk chunk[TOGETHER][1];
                #pragma unroll
                for (int i = 0; i < TOGETHER; i++) chunk[i][0] = chunk_of(from, first, min(at + i, count - 1), p.weights.set_shift, lane);
                if (at + TOGETHER >= count) {
                    __syncwarp();                  // the slot is read: its next piece may come
                    if (ahead.tile < end) {
                        if (leads) start_piece(p.weights, ahead, smem_address(ring) + slot * SLOT_BYTES, full + 8 * slot);
                        ahead.at += WARPS;
                        ahead.settle(pieces);
                    }
                }
                add_chunk<1>(total, chunk[0], rows + (first + at) * (CHUNK_K * 2));
                if (TOGETHER == 2 && at + 1 < count) add_chunk<1>(total, chunk[TOGETHER - 1], rows + (first + at + 1) * (CHUNK_K * 2));
            }
            if (++slot == SLOTS) slot = 0, parity ^= 1;
            place.at += WARPS;
            place.settle(pieces);
        }
        const int at = (tile - begin) % TILE_SLOTS, turn = (tile - begin) / TILE_SLOTS;
        if (turn) barrier_wait(free + 8 * at, (turn - 1) & 1);
        float* const own = sums + at * TILE_SUMS + warp * (ROWS * 16);
        #pragma unroll
        for (int i = 0; i < 4; i++) {              // lane 4 g + t has the sums of columns g and g + 8 of rows 2 t and 2 t + 1
            const int m = lane % 4 * 2 + i % 2;
            if (m < ROWS) own[m * 16 + lane / 4 + i / 2 * 8] = total[0][i];
        }
        __syncwarp();
        if (leads) barrier_arrive(done + 8 * at);
    }
}
