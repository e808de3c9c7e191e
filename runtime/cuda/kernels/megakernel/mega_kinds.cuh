// The kinds of a megakernel's jobs, and the code of each.
#pragma once

#define KIND(n, rows, columns, depth, norm, paired, residual)                                                                \
    struct Kind##n {                                                                                                         \
        static constexpr int ROWS = rows, COLUMNS = columns, K = depth;                                                      \
        static constexpr bool NORM = norm, PAIRED = paired, HAS_RESIDUAL = residual;                                         \
        static __device__ __forceinline__ float epilogue(float x, float c, float r) { return epilogue_##n(x, c, r); }        \
        static __device__ __forceinline__ float epilogue_beside(float x, float c, float r) { return epilogue_beside_##n(x, c, r); } \
    };
#define KIND_0 KIND(0, ROWS_0, COLUMNS_0, DEPTH_0, NORM_0, PAIRED_0, RESIDUAL_0)
#define KIND_1 KIND(1, ROWS_1, COLUMNS_1, DEPTH_1, NORM_1, PAIRED_1, RESIDUAL_1)
#define KIND_2 KIND(2, ROWS_2, COLUMNS_2, DEPTH_2, NORM_2, PAIRED_2, RESIDUAL_2)
#define KIND_3 KIND(3, ROWS_3, COLUMNS_3, DEPTH_3, NORM_3, PAIRED_3, RESIDUAL_3)
#define KIND_4 KIND(4, ROWS_4, COLUMNS_4, DEPTH_4, NORM_4, PAIRED_4, RESIDUAL_4)
#define KIND_5 KIND(5, ROWS_5, COLUMNS_5, DEPTH_5, NORM_5, PAIRED_5, RESIDUAL_5)
#if KINDS == 1
#define EACH_KIND(what) what(0)
KIND_0
#elif KINDS == 2
#define EACH_KIND(what) what(0) what(1)
KIND_0 KIND_1
#elif KINDS == 3
#define EACH_KIND(what) what(0) what(1) what(2)
KIND_0 KIND_1 KIND_2
#elif KINDS == 4
#define EACH_KIND(what) what(0) what(1) what(2) what(3)
KIND_0 KIND_1 KIND_2 KIND_3
#elif KINDS == 5
#define EACH_KIND(what) what(0) what(1) what(2) what(3) what(4)
KIND_0 KIND_1 KIND_2 KIND_3 KIND_4
#else
#define EACH_KIND(what) what(0) what(1) what(2) what(3) what(4) what(5)
KIND_0 KIND_1 KIND_2 KIND_3 KIND_4 KIND_5
#endif

constexpr int ATTENTION_KIND = 6;
DEVICE void produce(int kind, const u8* job, Producer& me, int number) {
#define PRODUCE(n) if (kind == n) Product<Kind##n>::produce(*reinterpret_cast<const ProductJob*>(job), me, number);
    EACH_KIND(PRODUCE)
#if ATTENTION
    if (kind == ATTENTION_KIND) Attention::produce(*reinterpret_cast<const AttentionJob*>(job), me, number);
#endif
}
DEVICE void consume(int kind, const u8* job, Ring& ring, u8* shared, int warp, int lane, const Now& now, int number) {
#define CONSUME(n) if (kind == n) Product<Kind##n>::consume(*reinterpret_cast<const ProductJob*>(job), ring, shared, warp, lane, now, number);
    EACH_KIND(CONSUME)
#if ATTENTION
    if (kind == ATTENTION_KIND) Attention::consume(*reinterpret_cast<const AttentionJob*>(job), ring, shared, warp, lane, now, number);
#endif
}
