// A tile of a matrix product in true fp32: operands of any strides, by copies of 4 bytes, or of 16 (ROWS_TOGETHER, COLUMNS_TOGETHER:
// neighboring rows of the left operand, or columns of the right one, are contiguous and aligned). Included by generated text, which defines
// the macros of fp32_tile.cuh.
#pragma once
#include "fp32_tile.cuh"

// Strides of a matrix's rows and columns.
struct Matrix {
    const float* first;
    int row, column;
};

// acc = left[top.., :] @ right[:, first..], with m rows, n columns and k products. ``taken``: the numbers of the left rows from ``top`` on.
DEVICE void product_tile(float (&acc)[TM][TN], float* shared, const Matrix& left, const Matrix& right, int top, int first, int m, int n, int k,
                         const int* taken = nullptr) {
    const u32 base = u32(__cvta_generic_to_shared(shared));
    const int lane = threadIdx.x % 8, line = threadIdx.x / 8;
    constexpr int LINES = THREADS / 8, COLUMNS = BN / LINES, A_EACH = THREADS / (BM / 4), A_CHUNKS = BK / A_EACH;
    static_assert(A_CHUNKS * A_EACH == BK, "the threads copy whole rows of K");
    int a_at[ROWS_TOGETHER ? 1 : ROWS], b_at[COLUMNS_TOGETHER ? 1 : COLUMNS];
    if (!ROWS_TOGETHER) {
        #pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const int row = top + line + LINES * i;
            a_at[i] = row < m ? (taken ? taken[row - top] : row) * left.row : NOWHERE;
        }
    }
    if (!COLUMNS_TOGETHER) {
        #pragma unroll
        for (int i = 0; i < COLUMNS; i++) {
            const int column = first + line + LINES * i;
            b_at[i] = column < n ? column * right.column : NOWHERE;
        }
    }
    const int piece = threadIdx.x % (BN / 4) * 4, b_row = threadIdx.x / (BN / 4);
    const int a_piece = threadIdx.x % (BM / 4) * 4, a_row = threadIdx.x / (BM / 4);
    const bool a_valid = top + a_piece < m, b_valid = first + piece < n;
    int at = 0;                                    // position in K of the next stage
    auto load = [&](int stage) {
        const u32 a_target = base + (stage * STAGE + lane * A_PITCH + line) * 4, b_target = base + (stage * STAGE + BK * A_PITCH) * 4;
        #pragma unroll
        for (int j = 0; j < BK / 8; j++) {
            const int place = at + j * 8 + lane;
            const bool inside = place < k;
            if (!ROWS_TOGETHER) {
                const float* a = left.first + i64(place) * left.column;
                #pragma unroll
                for (int i = 0; i < ROWS; i++) copy_4(a_target + (j * 8 * A_PITCH + LINES * i) * 4, a, inside ? a_at[i] : NOWHERE);
            }
            if (!COLUMNS_TOGETHER) {
                const float* b = right.first + i64(place) * right.row;
                #pragma unroll
                for (int i = 0; i < COLUMNS; i++)
                    copy_4(b_target + ((j * 8 + lane) * B_PITCH + line + LINES * i) * 4, b, inside ? b_at[i] : NOWHERE);
            }
        }
        if (ROWS_TOGETHER) {
            #pragma unroll
            for (int i = 0; i < A_CHUNKS; i++) {
                const int place = at + a_row + A_EACH * i;
                const bool valid = a_valid && place < k;
                copy_16(base + (stage * STAGE + (a_row + A_EACH * i) * A_PITCH + a_piece) * 4,
                        valid ? left.first + i64(place) * left.column + top + a_piece : left.first, valid);
            }
        }
        if (COLUMNS_TOGETHER) {
            #pragma unroll
            for (int i = 0; i < CHUNKS; i++) {
                const int place = at + b_row + EACH * i;
                const bool valid = b_valid && place < k;
                copy_16(b_target + ((b_row + EACH * i) * B_PITCH + piece) * 4, valid ? right.first + i64(place) * right.row + first + piece : right.first, valid);
            }
        }
        at += BK;
    };
    const int steps = (k + BK - 1) / BK;
    #pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < steps) load(s);
        copies_end();
    }
    multiply_ring(acc, shared, steps, load);
}
