// A tile of a matrix product on tensor cores (mma.sync, fp32 accumulators): 16-bit operands, or fp32 operands rounded to tf32, of any strides.
// The tile's rows are lines of the left operand, its columns lines of the right one. Included by generated text, which defines BM and BN (64 or
// 128), STAGES, ITEM (bytes of an element), multiply(), and for each operand
//   ALONG: shared memory holds 64 bytes of K of each line; otherwise the neighboring lines at each position of K;
//   PIECE: bytes per asynchronous copy (16, 8 or 4, along that direction); 0: threads copy element by element, through registers.
#pragma once
#include "ldmatrix.cuh"
#include "mma.cuh"

#if ITEM == 4
typedef float Number;
#elif defined(DTYPE_BF16)
typedef bf16 Number;
#else
typedef f16 Number;
#endif

constexpr int THREADS = 128, LINE_BYTES = 64, BK = LINE_BYTES / ITEM, PER_CHUNK = 16 / ITEM;
constexpr int WARP_M = BM / 2, WARP_N = BN / 2, TILES_M = WARP_M / 16, TILES_N = WARP_N / 8, TM = 2 * TILES_M, TN = 2 * TILES_N;
constexpr int PAD = ITEM == 4 ? 32 : 16;           // bytes of padding between positions of K: a fragment load touches all banks

// Strides of a matrix's rows and columns.
struct Matrix {
    const Number* first;
    i64 row, column;
};

// Four 16-byte pieces per line; the eight lines that ldmatrix reads at a time touch all banks.
DEVICE int piece_at(int line, int piece) { return line * LINE_BYTES + ((piece ^ (line >> 1 & 3)) << 4); }

template <int LINES, bool ALONG, int PIECE> struct Operand {
    static constexpr int PITCH = LINES * ITEM + PAD;                       // of a position of K
    static constexpr int BYTES = ALONG ? LINES * LINE_BYTES : BK * PITCH;  // per stage
    static constexpr int EACH = PIECE ? PIECE / ITEM : 1;                  // elements at a time
    static constexpr int TURNS = LINES * BK / EACH / THREADS, HELD = PIECE ? 1 : TURNS;
    const Number* first;
    i64 line, place;                               // strides of lines and of positions of K
    int lines, k;                                  // available lines and positions of K, from the first one on
    const int* taken;                              // the numbers of the lines; null: they follow each other
    Number held[HELD];                             // elements in flight through registers

    // Of the thread's i-th piece: its line, its position of K within the stage, and its offset in the stage.
    DEVICE int line_of(int i) const { return ALONG ? (threadIdx.x + i * THREADS) / (BK / EACH) : (threadIdx.x + i * THREADS) % (LINES / EACH) * EACH; }
    DEVICE int place_of(int i) const { return ALONG ? (threadIdx.x + i * THREADS) % (BK / EACH) * EACH : (threadIdx.x + i * THREADS) / (LINES / EACH); }
    DEVICE int offset_of(int i) const {
        const int l = line_of(i), z = place_of(i);
        return ALONG ? piece_at(l, z / PER_CHUNK) + z % PER_CHUNK * ITEM : z * PITCH + l * ITEM;
    }

    // Starts the loads for K from ``at`` on: pieces into the stage at ``target``, elements into registers.
    DEVICE void load(u8* target, int at) {
        #pragma unroll
        for (int i = 0; i < TURNS; i++) {
            const int l = line_of(i), z = at + place_of(i), left = ALONG ? k - z : lines - l;  // elements from here on
            const bool inside = left > 0 && (ALONG ? l < lines : z < k);
            if constexpr (PIECE > 0) copy_or_zeros<PIECE>(smem_address(target + offset_of(i)), inside ? first + (taken ? taken[l] : l) * line + z * place : first, inside ? min(left * ITEM, PIECE) : 0);
            else held[i] = inside ? first[(taken ? taken[l] : l) * line + z * place] : Number{};
        }
    }
    // Stores the elements in registers into their stage.
    DEVICE void put(u8* target) const {
        if (PIECE) return;
        #pragma unroll
        for (int i = 0; i < HELD; i++) *reinterpret_cast<Number*>(target + offset_of(i)) = held[i];
    }

    // 32 bits of a fragment: for tf32, line l at position z.
    DEVICE u32 word(const u8* stage, int z, int l) const { return *reinterpret_cast<const u32*>(stage + z * PITCH + l * ITEM); }

    // Fragments of 16 lines each, for product ``step`` of the stage.
    template <int COUNT> DEVICE void rows(const u8* stage, int line, int step, u32 (&a)[COUNT][4]) const {
        const int lane = threadIdx.x % 32;
        #pragma unroll
        for (int m = 0; m < COUNT; m++) {
            const int l = line + m * 16;
            if (ALONG) {
                ldmatrix_x4(smem_address(stage + piece_at(l + lane % 16, step * 2 + lane / 16)), a[m][0], a[m][1], a[m][2], a[m][3]);
            } else if (ITEM == 2) {
                const int z = step * 16 + lane / 16 * 8 + lane % 8;
                ldmatrix_x4_trans(smem_address(stage + z * PITCH + (l + lane / 8 % 2 * 8) * ITEM), a[m][0], a[m][1], a[m][2], a[m][3]);
            } else {
                #pragma unroll
                for (int i = 0; i < 4; i++) a[m][i] = word(stage, step * 8 + lane % 4 + i / 2 * 4, l + lane / 4 + i % 2 * 8);
            }
            if (ITEM == 4) {
                #pragma unroll
                for (int i = 0; i < 4; i++) a[m][i] = rounded_to_tf32(a[m][i]);
            }
        }
    }

    // Fragments of 8 lines each, in pairs.
    template <int COUNT> DEVICE void columns(const u8* stage, int line, int step, u32 (&b)[COUNT][2]) const {
        const int lane = threadIdx.x % 32;
        #pragma unroll
        for (int n = 0; n < COUNT; n += 2) {
            const int l = line + n * 8;
            if (ALONG) {                           // matrices: lines 0-7 at both halves of the 32 bytes, then lines 8-15
                ldmatrix_x4(smem_address(stage + piece_at(l + lane % 8 + lane / 16 * 8, step * 2 + lane / 8 % 2)), b[n][0], b[n][1], b[n + 1][0], b[n + 1][1]);
            } else if (ITEM == 2) {
                const int z = step * 16 + lane % 16;
                ldmatrix_x4_trans(smem_address(stage + z * PITCH + (l + lane / 16 * 8) * ITEM), b[n][0], b[n][1], b[n + 1][0], b[n + 1][1]);
            } else {
                #pragma unroll
                for (int i = 0; i < 4; i++) b[n + i / 2][i % 2] = word(stage, step * 8 + lane % 4 + i % 2 * 4, l + lane / 4 + i / 2 * 8);
            }
            if (ITEM == 4) {
                #pragma unroll
                for (int i = 0; i < 4; i++) b[n + i / 2][i % 2] = rounded_to_tf32(b[n + i / 2][i % 2]);
            }
        }
    }
};

// A thread's results: row_of(i) is relative to its first row, column_of(j) to its first column.
DEVICE int own_row() { return threadIdx.x / 32 % 2 * WARP_M + threadIdx.x % 32 / 4; }
DEVICE int own_column() { return threadIdx.x / 64 * WARP_N + threadIdx.x % 4 * 2; }
constexpr int __device__ row_of(int i) { return i / 2 * 16 + i % 2 * 8; }
constexpr int __device__ column_of(int j) { return j / 2 * 8 + j % 2; }

// acc = left[top.., :] @ right[:, first..], with m rows, n columns and k products. ``taken``: the numbers of the left rows from ``top`` on.
DEVICE void product_tile(float (&acc)[TM][TN], float* memory, const Matrix& left, const Matrix& right, int top, int first, int m, int n, int k,
                         const int* taken = nullptr) {
    Operand<BM, LEFT_ALONG, LEFT_PIECE> one = {left.first + (taken ? 0 : top) * left.row, left.row, left.column, m - top, k, taken};
    Operand<BN, RIGHT_ALONG, RIGHT_PIECE> two = {right.first + first * right.column, right.column, right.row, n - first, k, nullptr};
    u8* shared = reinterpret_cast<u8*>(memory);
    constexpr int STAGE = one.BYTES + two.BYTES;
    const int warp_m = threadIdx.x / 32 % 2 * WARP_M, warp_n = threadIdx.x / 64 * WARP_N, steps = (k + BK - 1) / BK;
    auto load = [&](u8* target, int step) {
        one.load(target, step * BK);
        two.load(target + one.BYTES, step * BK);
    };
    auto put = [&](u8* target) {
        one.put(target);
        two.put(target + one.BYTES);
    };
    float sum[TILES_M][TILES_N][4];
    #pragma unroll
    for (int i = 0; i < TILES_M * TILES_N * 4; i++) sum[i / 4 / TILES_N][i / 4 % TILES_N][i % 4] = 0.0f;
    #pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < steps) {
            load(shared + s * STAGE, s);
            put(shared + s * STAGE);
        }
        copies_commit();
    }
    int stage = 0;
    #pragma unroll 1
    for (int step = 0; step < steps; step++) {
        copies_wait_but<STAGES - 2>();
        __syncthreads();                           // this step has landed for all threads; all have read the stage of the last step
        const bool more = step + STAGES - 1 < steps;
        u8* next = shared + (stage ? stage - 1 : STAGES - 1) * STAGE;
        if (more) load(next, step + STAGES - 1);
        copies_commit();
        const u8* held = shared + stage * STAGE;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        #pragma unroll
        for (int z = 0; z < 2; z++) {
            u32 a[TILES_M][4], b[TILES_N][2];
            one.rows(held, warp_m, z, a);
            two.columns(held + one.BYTES, warp_n, z, b);
            #pragma unroll
            for (int i = 0; i < TILES_M; i++)
                #pragma unroll
                for (int j = 0; j < TILES_N; j++) multiply(sum[i][j], a[i], b[j][0], b[j][1]);
        }
        if (more) put(next);                       // elements that were loaded during the products
    }
    #pragma unroll
    for (int i = 0; i < TM; i++)
        #pragma unroll
        for (int j = 0; j < TN; j++) acc[i][j] = sum[i / 2][j / 2][i % 2 * 2 + j % 2];
}
