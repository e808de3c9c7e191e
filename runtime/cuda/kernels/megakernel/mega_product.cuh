// A job of a megakernel: a few rows times a matrix of 16-bit floats, as gemv.cu computes it.
//
//   out[m, column] = epilogue(sum_k x[m, k] * weights[column, k])
//
// A block takes tiles of 16 columns, and its warps split K. A slot has 512 elements of K of a tile: 16 rows of a kilobyte, at a pitch without
// bank conflicts. A warp takes 32 of these elements: two products of mma.sync with the weights as operand A. The order of K within a product
// is free, so a lane reads 16 bytes. Columns of operand B are the rows. NORM: rows are first divided by their root mean square and multiplied
// by ``scale``. Each row becomes two columns: the value rounded to 16 bits, and the rounding error. PAIRED: the epilogue reads the product with
// a second matrix.
//
// Kind has K, COLUMNS, ROWS, NORM, PAIRED, HAS_RESIDUAL, epilogue() and, PAIRED, epilogue_beside().
#pragma once

constexpr int TILE = 16, STAGE_K = 512, PIECE = STAGE_K * 2, PITCH = PIECE + 64;
static_assert(SLOT_BYTES >= TILE * PITCH, "a slot has a stage");

struct ProductJob {
    const u16 *weights, *beside;                   // [columns][K]
    const float *bias, *beside_bias, *scale;
    Source x, residual;
    Target out;
    float epsilon;
};

// The block's tiles. Each job starts at a different block, since some blocks have one tile more.
struct Share {
    int begin, count;
    __device__ __forceinline__ Share(int tiles, int job) {
        const u32 blocks = gridDim.x, block = (blockIdx.x + u32(job) * 37) % blocks;
        begin = u32(tiles) * block / blocks, count = u32(tiles) * (block + 1) / blocks - begin;
    }
};

template <class Kind> struct Product {
    static constexpr int K = Kind::K, ROWS = Kind::ROWS, MATRICES = 1 + Kind::PAIRED, TILES = (Kind::COLUMNS + TILE - 1) / TILE;
    static constexpr int MOST = (TILES + LEAST_BLOCKS - 1) / LEAST_BLOCKS, STAGES = (K + STAGE_K - 1) / STAGE_K, FILLED = STAGES * STAGE_K;
    static constexpr int PARTS = 1 + Kind::NORM, USED = ROWS * PARTS;      // columns of operand B
    static constexpr int EIGHTS = ROWS * FILLED / 8, EACH = (EIGHTS + THREADS - 1) / THREADS;
    static constexpr int SUMS = MOST * MATRICES * WARPS * ROWS * TILE;     // floats
    static_assert(USED <= 8 && K % 8 == 0 && Kind::COLUMNS % 2 == 0, "rows are columns of operand B; copies are of 16 bytes; packets of two");

    static __device__ __forceinline__ void produce(const ProductJob& job, Producer& me, int number) {
        constexpr int MINE = TILE / PRODUCERS;
        const Share share(TILES, number);
        me.job(share.count * MATRICES * STAGES);
        #pragma unroll 1
        for (int t = 0; t < share.count * MATRICES; t++) {
            const u16* const matrix = t % MATRICES ? job.beside : job.weights;
            const int first = (share.begin + t / MATRICES) * TILE + me.part * MINE;
            #pragma unroll 1
            for (int i = 0; i < STAGES; i++) {
                const u32 bytes = min(PIECE, K * 2 - i * PIECE);
                me.begin(bytes * MINE);
                #pragma unroll
                for (int r = 0; r < MINE; r++)     // beyond the last column: the last column again
                    me.weights((me.part * MINE + r) * PITCH, matrix + (long long)min(first + r, Kind::COLUMNS - 1) * K + i * STAGE_K, bytes);
                me.end();
            }
        }
    }

    static __device__ __forceinline__ void consume(const ProductJob& job, Ring& ring, u8* shared, int warp, int lane, const Now& now, int number) {
        const Share share(TILES, number);
        float* const sums = reinterpret_cast<float*>(shared);              // [tile][matrix][WARPS][ROWS][TILE]
        float* const squares = sums + SUMS;                                // [WARPS][ROWS]
        u16* const rows = reinterpret_cast<u16*>(squares + WARPS * ROWS);  // [part][ROWS][FILLED]
        bring(job, rows, squares, warp, lane, now);
        sync_warps();

        const int g = lane / 4;
        const u32 x = smem_address(rows + (g < USED ? g : 0) * FILLED + warp * 32 + lane % 4 * 8), from = g * PITCH + warp * 64 + lane % 4 * 16;
        const int k = warp * 32 + lane % 4 * 8;
        #pragma unroll 1
        for (int t = 0; t < share.count * MATRICES; t++) {
            float total[4] = {}, other[4] = {};
            #pragma unroll 4
            for (int i = 0; i < STAGES; i++, ring.next()) {
                uint4 b = shared_load16(x + i * PIECE);
                if (g >= USED) b = make_uint4(0u, 0u, 0u, 0u);
                ring.wait_full();
                uint4 low = shared_load16(ring.at() + from), high = shared_load16(ring.at() + from + 8 * PITCH);
                if (K % STAGE_K && k + i * STAGE_K >= K) low = high = make_uint4(0u, 0u, 0u, 0u);    // uninitialized memory
                const u32 first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
                multiply(total, first, b.x, b.y);
                multiply(other, second, b.z, b.w);
                ring.release(lane);
            }
            #pragma unroll
            for (int i = 0; i < 4; i++) total[i] += other[i];
            put(sums + (t * WARPS + warp) * (ROWS * TILE), total, lane);
        }
        sync_warps();
        finish(job, share, sums, now, number);
    }

    // Loads the rows for the products, with zeros beyond K.
    static __device__ __forceinline__ void bring(const ProductJob& job, u16* rows, float* squares, int warp, int lane, const Now& now) {
        uint2 word[2 * EACH];
        float2 scale[Kind::NORM ? EACH : 1][4];    // constants: loaded before the rows arrive
        const uint2* at[2 * EACH];
        bool live[2 * EACH];
        int row[EACH], k[EACH];
        #pragma unroll
        for (int e = 0; e < EACH; e++) {
            const int i = e * THREADS + threadIdx.x;
            row[e] = ROWS == 1 ? 0 : i * 8 / FILLED, k[e] = i * 8 - row[e] * FILLED;
            live[2 * e] = live[2 * e + 1] = i < EIGHTS && k[e] < K;
            word[2 * e] = word[2 * e + 1] = make_uint2(0u, 0u);
            if (Kind::NORM && live[2 * e]) {
                #pragma unroll
                for (int j = 0; j < 4; j++) scale[e][j] = __ldg(reinterpret_cast<const float2*>(job.scale + k[e]) + j);
            }
            at[2 * e] = job.x.packets + ((long long)row[e] * job.x.pitch + k[e]) / 2, at[2 * e + 1] = at[2 * e] + 2;
        }
        if (now.here(job.x)) {
            if (__shfl_sync(0xffffffffu, live[0], 0)) wait_packet(at[0], now.tag(job.x.from), lane);
            receive(word, at, live, now.tag(job.x.from));
        } else {
            #pragma unroll
            for (int e = 0; e < 2 * EACH; e++)
                if (live[e]) word[e] = __ldcg(reinterpret_cast<const uint2*>(job.x.plain + (long long)row[e / 2] * job.x.pitch + k[e / 2]) + e % 2);
        }
        float factor[EACH];
        if (Kind::NORM) norm_factors(factor, word, row, squares, warp, lane, job.epsilon);
        #pragma unroll
        for (int e = 0; e < EACH; e++) {
            if (e * THREADS + threadIdx.x >= EIGHTS) continue;
            u16* const to = rows + row[e] * PARTS * FILLED + k[e];
            uint4 all = make_uint4(word[2 * e].x, word[2 * e].y, word[2 * e + 1].x, word[2 * e + 1].y);
            if (Kind::NORM && live[2 * e]) {
                u32 pair[4] = {all.x, all.y, all.z, all.w}, lacking[4];
                #pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float a = low_float(pair[i]) * factor[e] * scale[e][i].x, b = high_float(pair[i]) * factor[e] * scale[e][i].y;
                    pair[i] = pack2(a, b), lacking[i] = pack2(a - low_float(pair[i]), b - high_float(pair[i]));
                }
                all = make_uint4(pair[0], pair[1], pair[2], pair[3]);
                *reinterpret_cast<uint4*>(to + FILLED) = make_uint4(lacking[0], lacking[1], lacking[2], lacking[3]);
            } else if (Kind::NORM) {
                *reinterpret_cast<uint4*>(to + FILLED) = all;
            }
            *reinterpret_cast<uint4*>(to) = all;
        }
    }
    static __device__ __forceinline__ void norm_factors(float (&factor)[EACH], const uint2 (&word)[2 * EACH], const int (&row)[EACH], float* squares, int warp, int lane, float epsilon) {
        #pragma unroll
        for (int m = 0; m < ROWS; m++) {
            float sum = 0.0f;
            #pragma unroll
            for (int e = 0; e < 2 * EACH; e++) {
                const float f[4] = {low_float(word[e].x), high_float(word[e].x), low_float(word[e].y), high_float(word[e].y)};
                #pragma unroll
                for (int i = 0; i < 4; i++)
                    if (ROWS == 1 || row[e / 2] == m) sum = fmaf(f[i], f[i], sum);
            }
            #pragma unroll
            for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
            if (lane == 0) squares[warp * ROWS + m] = sum;
        }
        sync_warps();
        #pragma unroll
        for (int e = 0; e < EACH; e++) {
            float all = 0.0f;
            #pragma unroll
            for (int w = 0; w < WARPS; w++) all += squares[w * ROWS + min(row[e], ROWS - 1)];
            factor[e] = rsqrtf(all / K + epsilon);
        }
    }
    // Stores the warp's accumulators of a tile: lane 4 g + t has columns g and g + 8 (of the tile) times columns 2 t and 2 t + 1 of operand B.
    static __device__ __forceinline__ void put(float* to, const float (&total)[4], int lane) {
        const int g = lane / 4, t = lane % 4;
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            if (Kind::NORM) {
                if (t < ROWS) to[t * TILE + g + 8 * h] = total[2 * h] + total[2 * h + 1];
            } else {
                #pragma unroll
                for (int i = 0; i < 2; i++)
                    if (2 * t + i < ROWS) to[(2 * t + i) * TILE + g + 8 * h] = total[2 * h + i];
            }
        }
    }
    static __device__ __forceinline__ float summed(const float* sums, int tile, int m, int c) {
        float part[4] = {};
        #pragma unroll
        for (int w = 0; w < WARPS; w++) part[w % 4] += sums[((tile * WARPS + w) * ROWS + m) * TILE + c];
        return (part[0] + part[1]) + (part[2] + part[3]);
    }
    // A thread computes two neighboring results.
    static __device__ __forceinline__ void finish(const ProductJob& job, const Share& share, const float* sums, const Now& now, int number) {
        for (int i = threadIdx.x; i < share.count * (ROWS * TILE / 2); i += THREADS) {
            const int tile = i / (ROWS * TILE / 2), m = i / (TILE / 2) % ROWS, c = i % (TILE / 2) * 2, n = (share.begin + tile) * TILE + c;
            if (n >= Kind::COLUMNS) continue;
            const long long at = (long long)m * job.out.pitch + n;
            u32 residual = 0;
            if (Kind::HAS_RESIDUAL) residual = receive_word(job.residual, (long long)m * job.residual.pitch + n, now);
            float v[2] = {};
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                float other = h ? high_float(residual) : low_float(residual);
                if constexpr (Kind::PAIRED) other = Kind::epilogue_beside(summed(sums, tile * MATRICES + 1, m, c + h), job.beside_bias[n + h], 0.0f);
                v[h] = Kind::epilogue(summed(sums, tile * MATRICES, m, c + h), job.bias[n + h], other);
            }
            const u32 both = pack2(v[0], v[1]);
            write_packet(job.out.packets + at / 2, both, now.tag(number));
            *reinterpret_cast<u32*>(job.out.plain + at) = both;
        }
    }
};
