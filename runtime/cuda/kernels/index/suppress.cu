// Greedy suppression of overlapping boxes in one cooperative launch: each box, in the given order, is kept unless it overlaps a kept box of
// its group by more than a share of their union. Boxes are fp32; each operation is rounded alone, as in NumPy.
//
// TILE boxes are chosen at a time. All blocks compare the pairs of a tile (one bit per pair), the first block chooses among them with these
// bits, and all blocks remove the later boxes that overlap a chosen one. While the first block chooses, the others compare the next tile. So
// memory does not grow with the number of pairs.
#include "general.cuh"

constexpr int TILE = 1024, WORDS = TILE / 32, THREADS = 1024;
constexpr int SHARES = 4;                          // threads that compare a later box with the chosen ones

struct Params {
    const float4* corners;                         // [n]: low y, low x, high y, high x; by group, and in a group the best box first
    const i32* group;                              // [n], rising
    u32* kept;                                     // [n / 32]: a bit per box; ones at first, zeros beyond n
    u32* overlaps;                                 // [2][TILE][WORDS]: bits of the pairs of two tiles
    u32* rounds;                                   // [2]: the grid barrier
    i32 n;
    float threshold;
};

DEVICE float area(float4 box) { return __fmul_rn(__fsub_rn(box.z, box.x), __fsub_rn(box.w, box.y)); }

// Whether two boxes overlap by more than the threshold of their union.
DEVICE bool overlap(float4 a, float4 b, float threshold) {
    const float height = __fsub_rn(fminf(a.z, b.z), fmaxf(a.x, b.x)), width = __fsub_rn(fminf(a.w, b.w), fmaxf(a.y, b.y));
    if (!(height > 0.0f) || !(width > 0.0f)) return false;
    const float common = __fmul_rn(height, width), one = area(a), two = area(b);
    const float both = __fsub_rn(__fadd_rn(one, two), common);
    return common > 0.0f && one > 0.0f && two > 0.0f && both > 0.0f && __fdiv_rn(common, both) > threshold;
}

// The bits of a tile's pairs: word `w` of box `i` has the boxes after it that it overlaps. Blocks from `first` on take part.
DEVICE void compare(const Params& p, int tile, int first) {
    u32* bits = p.overlaps + (tile & 1) * TILE * WORDS;
    const int begin = tile * TILE, blocks = gridDim.x - first;
    for (int item = (blockIdx.x - first) * THREADS + threadIdx.x; item < TILE * WORDS; item += blocks * THREADS) {
        const int w = item / TILE, i = begin + item % TILE, other = begin + w * 32;
        u32 found = 0;
        if (i < p.n && other + 31 > i) {
            const float4 box = p.corners[i];
            const int group = p.group[i];
            for (int k = max(0, i + 1 - other); k < 32 && other + k < p.n; k++)
                if (p.group[other + k] == group && overlap(box, p.corners[other + k], p.threshold)) found |= 1u << k;
        }
        bits[item % TILE * WORDS + w] = found;
    }
}

// Chooses among the boxes of a tile, 32 at a time: one warp goes from kept box to kept box, then all threads remove what these overlap.
DEVICE void choose(const Params& p, int tile) {
    __shared__ u32 left[WORDS], own[32], chosen;
    const u32* bits = p.overlaps + (tile & 1) * TILE * WORDS;
    const int row = threadIdx.x / 32, word = threadIdx.x % 32, words = min(WORDS, (p.n - tile * TILE + 31) / 32);
    if (threadIdx.x < words) left[threadIdx.x] = p.kept[tile * WORDS + threadIdx.x];
    u32 next = bits[row * WORDS + word];
    for (int g = 0; g < words; g++) {
        const u32 mine = next;
        if (g + 1 < words) next = bits[((g + 1) * 32 + row) * WORDS + word];
        if (word == g) own[row] = mine;
        __syncthreads();
        if (row == 0) {
            const u32 row_bits = own[word];
            u32 open = left[g], keep = 0;
            while (open) {
                const int i = __ffs(open) - 1;
                keep |= 1u << i;
                open &= ~(1u << i) & ~__shfl_sync(0xffffffffu, row_bits, i);
            }
            if (word == 0) chosen = keep, left[g] = keep;
        }
        __syncthreads();
        if ((chosen >> row & 1) && word > g && word < words && mine) atomicAnd(&left[word], ~mine);
        __syncthreads();
    }
    if (threadIdx.x < words) p.kept[tile * WORDS + threadIdx.x] = left[threadIdx.x];
}

// Removes the boxes after a tile that overlap a kept box of the tile.
DEVICE void sweep(const Params& p, int tile) {
    __shared__ float4 corners[TILE];
    __shared__ i32 groups[TILE];
    __shared__ int places[WORDS + 1];
    const int begin = tile * TILE, word = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        places[0] = 0;
        for (int w = 0; w < WORDS; w++) places[w + 1] = places[w] + __popc(p.kept[tile * WORDS + w]);
    }
    __syncthreads();
    const u32 kept = p.kept[tile * WORDS + word];
    if (kept >> lane & 1) {
        const int place = places[word] + __popc(kept & ((1u << lane) - 1));
        corners[place] = p.corners[begin + threadIdx.x], groups[place] = p.group[begin + threadIdx.x];
    }
    __syncthreads();
    const int count = places[WORDS], last = count ? groups[count - 1] : -1, share = threadIdx.x % SHARES;
    for (int j = begin + TILE + (blockIdx.x * THREADS + threadIdx.x) / SHARES; j < p.n; j += gridDim.x * THREADS / SHARES) {
        const int group = p.group[j];
        if (group > last) break;                   // groups rise: no later box has a kept one in this tile
        if (!(p.kept[j / 32] >> (j % 32) & 1)) continue;
        const float4 box = p.corners[j];
        for (int k = share; k < count; k += SHARES)
            if (groups[k] == group && overlap(corners[k], box, p.threshold)) {
                atomicAnd(&p.kept[j / 32], ~(1u << j % 32));
                break;
            }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) suppress(const __grid_constant__ Params p) {
    launch_dependents();
    wait_for_predecessor();
    const int tiles = (p.n + TILE - 1) / TILE;
    compare(p, 0, 0);
    for (int t = 0; t < tiles; t++) {
        meet(p.rounds);
        const bool alone = gridDim.x == 1;
        if (blockIdx.x == 0) choose(p, t);
        if (t + 1 == tiles) return;
        if (alone || blockIdx.x > 0) compare(p, t + 1, alone ? 0 : 1);
        meet(p.rounds);
        sweep(p, t);
    }
}
