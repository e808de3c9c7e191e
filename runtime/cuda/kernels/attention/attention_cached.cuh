// Shared by kernels that attend to a cache with mma.sync fragments: rotary embeddings, scores, and the running result of a warp.
//
// generated.cuh defines GROUP (queries that share a key head), HEAD (features, a multiple of 16), TURNED (rotated features, 0: none),
// INTERLEAVED and multiply(). The kernel defines THREADS, and WARP_PARTS, the parts of 64 features of the values that a warp has.
#pragma once

constexpr int TILES = (GROUP + 7) / 8;             // of eight queries
constexpr int WHOLE = HEAD / 32, REST = HEAD % 32 / 16;                        // pairs of steps of 16 features, and a last single step
constexpr int PARTS = (HEAD + 63) / 64;            // of 64 features of the values
constexpr int ROW = HEAD + 32;                     // elements between rows in shared memory
static_assert(GROUP >= 1 && TILES <= 2 && HEAD % 16 == 0 && TURNED % 4 == 0 && TURNED <= HEAD, "what fragments and words hold");

DEVICE float infinity() { return __int_as_float(0x7f800000); }
DEVICE u32 word_at(const u16* at) { return *reinterpret_cast<const u32*>(at); }
DEVICE void put_word(u16* at, u32 word) { *reinterpret_cast<u32*>(at) = word; }

// Rotates two pairs of features of a row. ``unit`` counts groups of four features; ``read`` gives the words of two pairs.
template <class Read> DEVICE void turn_unit(u16* to, const Read& read, const u16* cosines, const u16* sines, int unit) {
    const int left = TURNED == 0 || INTERLEAVED || unit >= TURNED / 4 ? 4 * unit : 2 * unit;
    const int right = TURNED == 0 || INTERLEAVED || unit >= TURNED / 4 ? left + 2 : left + TURNED / 2;
    u32 a, b;
    read(a, b, left, right);
    if (TURNED && unit < TURNED / 4) {
        const u32 c = word_at(cosines + 2 * unit), s = word_at(sines + 2 * unit);
        // INTERLEAVED: a word is a pair; otherwise a pair has an element of both words.
        const float x0 = low_float(a), y0 = INTERLEAVED ? high_float(a) : low_float(b);
        const float x1 = INTERLEAVED ? low_float(b) : high_float(a), y1 = high_float(b);
        const float u0 = low_float(c) * x0 - low_float(s) * y0, v0 = low_float(s) * x0 + low_float(c) * y0;
        const float u1 = high_float(c) * x1 - high_float(s) * y1, v1 = high_float(s) * x1 + high_float(c) * y1;
        a = INTERLEAVED ? pack2(u0, v0) : pack2(u0, u1);
        b = INTERLEAVED ? pack2(u1, v1) : pack2(v0, v1);
    }
    put_word(to + left, a), put_word(to + right, b);
}

// A lane's part of rows of keys or queries: eight features from 8 (lane % 4) on of each block of 32, four features from 4 (lane % 4) on of a
// last block of 16.
struct Fragment {
    u32 word[WHOLE * 4 + REST * 2];

    __device__ __forceinline__ void load(const u16* row, int quarter) {
        #pragma unroll
        for (int c = 0; c < WHOLE; c++) {
            const uint4 v = *reinterpret_cast<const uint4*>(row + 32 * c + 8 * quarter);
            word[4 * c] = v.x, word[4 * c + 1] = v.y, word[4 * c + 2] = v.z, word[4 * c + 3] = v.w;
        }
        if (REST) {
            const uint2 v = *reinterpret_cast<const uint2*>(row + 32 * WHOLE + 4 * quarter);
            word[WHOLE * 4] = v.x, word[WHOLE * 4 + 1] = v.y;
        }
    }
    __device__ __forceinline__ void clear() {
        #pragma unroll
        for (int i = 0; i < WHOLE * 4 + REST * 2; i++) word[i] = 0;
    }
};

// s[j][i]: query lane / 4 + 8 (i / 2), key 8 j + 2 (lane % 4) + i % 2.
DEVICE void score(float (&s)[2][4], const Fragment (&q)[TILES], const Fragment (&k)[2]) {
    #pragma unroll
    for (int j = 0; j < 2; j++) {
        #pragma unroll
        for (int i = 0; i < 4; i++) s[j][i] = 0.0f;
        #pragma unroll
        for (int step = 0; step < WHOLE * 2 + REST; step++) {
            const u32 a[4] = {q[0].word[2 * step], TILES > 1 ? q[TILES - 1].word[2 * step] : 0u, q[0].word[2 * step + 1],
                              TILES > 1 ? q[TILES - 1].word[2 * step + 1] : 0u};
            multiply(s[j], a, k[j].word[2 * step], k[j].word[2 * step + 1]);
        }
    }
}

// Words of two keys: their low halves, or their high halves, as a pair.
DEVICE u32 low_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
DEVICE u32 high_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }
DEVICE u32 word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

constexpr int FOUND = (GROUP * (HEAD + 2) + 3) / 4 * 4;                        // floats of the result of a warp, or of a block
constexpr int BATCH = 4;                           // results that are read at a time

// The running result of a warp. sum[m][c][w][i]: accumulator of feature 8 (lane / 4) + 2 w + i / 2 of the warp's part c, for query
// 8 m + 2 (lane % 4) + i % 2. largest[m], and weight[m] (this lane's part of the sum of weights): for query 8 m + lane / 4.
struct Found {
    float sum[TILES][WARP_PARTS][4][4], largest[TILES], weight[TILES];

    __device__ __forceinline__ void clear() {
        #pragma unroll
        for (int m = 0; m < TILES; m++) {
            largest[m] = -infinity(), weight[m] = 0.0f;
            #pragma unroll
            for (int i = 0; i < WARP_PARTS * 16; i++) sum[m][i / 16][i / 4 % 4][i % 4] = 0.0f;
        }
    }

    // Moves a value of query 8 m + lane / 4 to the lanes with accumulators of query 2 (lane % 4) + i.
    static __device__ __forceinline__ float of_column(float number, int lane, int i) {
        return __uint_as_float(__shfl_sync(0xffffffffu, __float_as_uint(number), lane % 4 * 8 + i * 4));
    }

    // Turns scores (minus infinity for keys that are not visible) into weights, packed as the operand of the second product.
    __device__ __forceinline__ void weigh(u32 (&packed)[TILES][2], float (&s)[2][4], float factor, int lane) {
        #pragma unroll
        for (int m = 0; m < TILES; m++) {
            float most = fmaxf(fmaxf(s[0][2 * m], s[0][2 * m + 1]), fmaxf(s[1][2 * m], s[1][2 * m + 1]));
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
            most = fmaxf(fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2)), largest[m]);
            const float shift = most == -infinity() ? 0.0f : most * factor;
            const float rescale = exp2_fast(largest[m] * factor - shift);
            largest[m] = most;
            float total = 0.0f;
            #pragma unroll
            for (int j = 0; j < 2; j++) {
                const float a = exp2_fast(fmaf(s[j][2 * m], factor, -shift)), b = exp2_fast(fmaf(s[j][2 * m + 1], factor, -shift));
                packed[m][j] = pack2(a, b);
                total += a + b;
            }
            weight[m] = fmaf(weight[m], rescale, total);
            const float even = of_column(rescale, lane, 0), odd = of_column(rescale, lane, 1);
            #pragma unroll
            for (int i = 0; i < WARP_PARTS * 16; i++) sum[m][i / 16][i / 4 % 4][i % 4] *= i % 2 ? odd : even;
        }
    }

    __device__ __forceinline__ void add(const u32 (&packed)[TILES][2], const uint4 (&v)[WARP_PARTS][4]) {
        #pragma unroll
        for (int c = 0; c < WARP_PARTS; c++) {
            #pragma unroll
            for (int w = 0; w < 4; w++) {
                const u32 x = word_of(v[c][0], w), y = word_of(v[c][1], w), z = word_of(v[c][2], w), t = word_of(v[c][3], w);
                const u32 a[4] = {low_halves(x, y), high_halves(x, y), low_halves(z, t), high_halves(z, t)};
                #pragma unroll
                for (int m = 0; m < TILES; m++) multiply(sum[m][c][w], a, packed[m][0], packed[m][1]);
            }
        }
    }

    // Writes to shared memory: [GROUP][HEAD] accumulators, then the largest scores and the sums of weights, [GROUP] each.
    __device__ __forceinline__ void put(float* to, int lane, int first_part) const {
        #pragma unroll
        for (int m = 0; m < TILES; m++) {
            #pragma unroll
            for (int i = 0; i < WARP_PARTS * 16; i++) {
                const int query = 8 * m + lane % 4 * 2 + i % 2, feature = (first_part + i / 16) * 64 + lane / 4 * 8 + i / 4 % 4 * 2 + i / 2 % 2;
                if (query < GROUP && (HEAD % 64 == 0 || feature < HEAD)) to[query * HEAD + feature] = sum[m][i / 16][i / 4 % 4][i % 4];
            }
            float whole = weight[m];
            whole += __shfl_xor_sync(0xffffffffu, whole, 1);
            whole += __shfl_xor_sync(0xffffffffu, whole, 2);
            const int query = 8 * m + lane / 4;
            if (first_part == 0 && lane % 4 == 0 && query < GROUP) to[GROUP * HEAD + query] = largest[m], to[GROUP * (HEAD + 1) + query] = whole;
        }
    }
};

// Adds ``count`` contiguous results, four neighboring features at a time, rescaled to a common largest score. ``put`` takes the query, the
// first feature, the sums, the sum of weights and the largest score. GLOBAL: other blocks wrote the results.
template <bool GLOBAL, class Put> DEVICE void add_up(const float* parts, int count, float factor, const Put& put) {
    auto number = [](const float* at) { return GLOBAL ? __ldcg(at) : *at; };
    for (int e = threadIdx.x; e < GROUP * HEAD / 4; e += THREADS) {
        const int query = 4 * e / HEAD;
        float most = -infinity(), weight = 0.0f;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int i = 0; i < count; i += BATCH) {
            #pragma unroll
            for (int j = 0; j < BATCH; j++)
                if (i + j < count) most = fmaxf(most, number(parts + (i + j) * FOUND + GROUP * HEAD + query));
        }
        const float shift = most == -infinity() ? 0.0f : most * factor;
        for (int i = 0; i < count; i += BATCH) {
            float rescale[BATCH], weights[BATCH];
            float4 v[BATCH];
            #pragma unroll
            for (int j = 0; j < BATCH; j++) {
                const float* part = parts + min(i + j, count - 1) * FOUND;
                const float4* four = reinterpret_cast<const float4*>(part) + e;
                rescale[j] = i + j < count ? exp2_fast(fmaf(number(part + GROUP * HEAD + query), factor, -shift)) : 0.0f;
                v[j] = GLOBAL ? __ldcg(four) : *four, weights[j] = number(part + GROUP * (HEAD + 1) + query);
            }
            #pragma unroll
            for (int j = 0; j < BATCH; j++) {
                sum.x = fmaf(v[j].x, rescale[j], sum.x), sum.y = fmaf(v[j].y, rescale[j], sum.y);
                sum.z = fmaf(v[j].z, rescale[j], sum.z), sum.w = fmaf(v[j].w, rescale[j], sum.w);
                weight = fmaf(weights[j], rescale[j], weight);
            }
        }
        put(query, 4 * e % HEAD, sum, weight, most);
    }
}
