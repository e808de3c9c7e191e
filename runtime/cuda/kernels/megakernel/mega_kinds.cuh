// The kinds of a megakernel's jobs, and which code does each.
#pragma once

#define KIND(n, rows, columns, depth, norm, paired, residual)                                                                \
    struct Kind##n {                                                                                                         \
        static constexpr int ROWS = rows, COLUMNS = columns, K = depth;                                                      \
        static constexpr bool NORM = norm, PAIRED = paired, HAS_RESIDUAL = residual;                                         \
        static __device__ __forceinline__ float epilogue(float x, float c, float r) { return epilogue_##n(x, c, r); }        \
        static __device__ __forceinline__ float epilogue_beside(float x, float c, float r) { return BESIDE##n(x, c, r); }    \
    };
#if KINDS > 0
#if PAIRED_0
#define BESIDE0 epilogue_beside_0
#else
#define BESIDE0 epilogue_0
#endif
KIND(0, ROWS_0, COLUMNS_0, DEPTH_0, NORM_0, PAIRED_0, RESIDUAL_0)
#endif
#if KINDS > 1
#if PAIRED_1
#define BESIDE1 epilogue_beside_1
#else
#define BESIDE1 epilogue_1
#endif
KIND(1, ROWS_1, COLUMNS_1, DEPTH_1, NORM_1, PAIRED_1, RESIDUAL_1)
#endif
#if KINDS > 2
#if PAIRED_2
#define BESIDE2 epilogue_beside_2
#else
#define BESIDE2 epilogue_2
#endif
KIND(2, ROWS_2, COLUMNS_2, DEPTH_2, NORM_2, PAIRED_2, RESIDUAL_2)
#endif
#if KINDS > 3
#if PAIRED_3
#define BESIDE3 epilogue_beside_3
#else
#define BESIDE3 epilogue_3
#endif
KIND(3, ROWS_3, COLUMNS_3, DEPTH_3, NORM_3, PAIRED_3, RESIDUAL_3)
#endif
#if KINDS > 4
#if PAIRED_4
#define BESIDE4 epilogue_beside_4
#else
#define BESIDE4 epilogue_4
#endif
KIND(4, ROWS_4, COLUMNS_4, DEPTH_4, NORM_4, PAIRED_4, RESIDUAL_4)
#endif
#if KINDS > 5
#if PAIRED_5
#define BESIDE5 epilogue_beside_5
#else
#define BESIDE5 epilogue_5
#endif
KIND(5, ROWS_5, COLUMNS_5, DEPTH_5, NORM_5, PAIRED_5, RESIDUAL_5)
#endif

constexpr int ATTENTION_KIND = 6;
DEVICE void produce(int kind, const u8* job, Producer& me, int number) {
#if KINDS > 0
    if (kind == 0) Product<Kind0>::produce(*reinterpret_cast<const ProductJob*>(job), me, number);
#endif
#if KINDS > 1
    if (kind == 1) Product<Kind1>::produce(*reinterpret_cast<const ProductJob*>(job), me, number);
#endif
#if KINDS > 2
    if (kind == 2) Product<Kind2>::produce(*reinterpret_cast<const ProductJob*>(job), me, number);
#endif
#if KINDS > 3
    if (kind == 3) Product<Kind3>::produce(*reinterpret_cast<const ProductJob*>(job), me, number);
#endif
#if KINDS > 4
    if (kind == 4) Product<Kind4>::produce(*reinterpret_cast<const ProductJob*>(job), me, number);
#endif
#if KINDS > 5
    if (kind == 5) Product<Kind5>::produce(*reinterpret_cast<const ProductJob*>(job), me, number);
#endif
#if ATTENTION
    if (kind == ATTENTION_KIND) Attention::produce(*reinterpret_cast<const AttentionJob*>(job), me, number);
#endif
}
DEVICE void consume(int kind, const u8* job, Ring& ring, u8* shared, int warp, int lane, const Now& now, int number) {
#if KINDS > 0
    if (kind == 0) Product<Kind0>::consume(*reinterpret_cast<const ProductJob*>(job), ring, shared, warp, lane, now, number);
#endif
#if KINDS > 1
    if (kind == 1) Product<Kind1>::consume(*reinterpret_cast<const ProductJob*>(job), ring, shared, warp, lane, now, number);
#endif
#if KINDS > 2
    if (kind == 2) Product<Kind2>::consume(*reinterpret_cast<const ProductJob*>(job), ring, shared, warp, lane, now, number);
#endif
#if KINDS > 3
    if (kind == 3) Product<Kind3>::consume(*reinterpret_cast<const ProductJob*>(job), ring, shared, warp, lane, now, number);
#endif
#if KINDS > 4
    if (kind == 4) Product<Kind4>::consume(*reinterpret_cast<const ProductJob*>(job), ring, shared, warp, lane, now, number);
#endif
#if KINDS > 5
    if (kind == 5) Product<Kind5>::consume(*reinterpret_cast<const ProductJob*>(job), ring, shared, warp, lane, now, number);
#endif
#if ATTENTION
    if (kind == ATTENTION_KIND) Attention::consume(*reinterpret_cast<const AttentionJob*>(job), ring, shared, warp, lane, now, number);
#endif
}
