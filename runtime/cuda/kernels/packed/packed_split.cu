// Some rows times packed weights (up to 16): K is split over warps, and over the blocks of a cluster. 16-bit activations,
// fp32 sums.
//
//   out[m, column] = epilogue(sum_k x[m, k] * (number[column, k] - zero) * scale)
//
// A block takes up to TILES tiles of 16 columns; tiles are spread evenly, so that no multiprocessor waits for another. Its warps take
// chunks of K in turn, and nothing else of one another: each copies the rows of its own chunks and the weights of all tiles into rings of
// its own, DEPTH turns of TOGETHER tiles ahead. Weights that are on their way take no registers. The first are on their way before
// griddepcontrol.wait. Numbers become 16-bit floats in registers, and are operand A of mma.sync. The sums of warps, and of the SPLIT
// blocks of a cluster, are added in a fixed order at the end.
//
// Instructions bound the products, not tensor cores. So where a chunk has one scale, numbers are multiplied as they lie (packed_few.cuh
// says how), and the chunk's sums are scaled, less the zero point times the sums of its rows: one more product, with ones.
//
// PAIRED: the epilogue reads the product with a second matrix of the same form, after stages of its own (gated linear units): a tile of it
// follows each tile of the first matrix.
//
// generated.cuh defines ROW_TILES (of eight rows), TILES (of both matrices), TOGETHER, WARPS, DEPTH, SPLIT, RESIDENT (blocks of a
// multiprocessor), HAS_RESIDUAL, PAIRED, epilogue() and, PAIRED, epilogue_beside(), and what packed.cuh says.
#include "ptx.cuh"
#include "mma.cuh"
#include "generated.cuh"
#include "stream.cuh"
#include "packed.cuh"
#include "packed_sums.cuh"

struct Params {
    const u16* x;                                  // [rows][x_pitch], rows aligned to 16 bytes
    PackedWeights weights;
    const float* bias;
    const u16* residual;                           // as output
    u16* output;                                   // [rows][out_pitch], aligned to 8 bytes
    PackedWeights beside;                          // the second matrix, and its bias
    const float* beside_bias;
    int rows, columns, k, x_pitch, out_pitch, parts;                   // parts: of the columns
};

constexpr int MATRICES = 1 + PAIRED;
constexpr int THREADS = WARPS * 32, COLUMNS = TILES * 16, ROWS = ROW_TILES * 8;
constexpr int FOURS = COLUMNS / 4, RESULTS = FOURS / MATRICES;     // of a row: sums, and results
constexpr int TURNS = (TILES + TOGETHER - 1) / TOGETHER;           // of a chunk
constexpr int ROWS_AHEAD = (DEPTH + TURNS - 1) / TURNS, STAGES = ROWS_AHEAD + 1;           // chunks whose rows are here, or on their way
constexpr int PITCH = CHUNK_K * 2 + 16, STAGE_BYTES = ROWS * PITCH;    // of a row: the eight rows of an ldmatrix lie in other banks
constexpr int SCALE_SET = 16 * GROUPS * SCALE_BYTES, ZERO_SET = 16 * GROUPS * ZERO_BYTES;  // bytes
constexpr int TILE_BYTES = CHUNK_BYTES + SCALE_SET + ZERO_SET, TURN_BYTES = TOGETHER * TILE_BYTES;
constexpr int SUM_PITCH = COLUMNS + 4, SUM_BYTES = ROWS * SUM_PITCH * 4, RING_BYTES = STAGES * STAGE_BYTES + DEPTH * TURN_BYTES;
constexpr int WARP_BYTES = RING_BYTES > SUM_BYTES ? RING_BYTES : SUM_BYTES;
#if defined(DTYPE_BF16)
constexpr bool RAW = GROUPS == 1 && !FLOAT_CODES && BITS < 8;
constexpr float NUMBER = 1.0f, OFFSET = 128.0f;    // what an operand counts, and the constant that is added to each number
#else
constexpr bool RAW = GROUPS == 1 && !FLOAT_CODES;
constexpr float NUMBER = 16777216.0f, OFFSET = 0.0f;
#endif

static_assert(ROW_TILES % 2 == 0, "tiles of rows come in pairs");
static_assert(TILES % MATRICES == 0, "tiles of two matrices come in pairs");

typedef float Sums[TILES][ROW_TILES][4];

// The copies of a lane: its part of the warp's rows, and the numbers that it multiplies itself.
struct Copies {
    const Params& p;
    const Stream& stream;
    const int first_tile, last, lane;              // of the block's tiles of a matrix
    const u32 rows, weights;                       // where the warp's rings begin
    __device__ __forceinline__ Copies(const Params& p, const Stream& stream, int first_tile, int tiles, u32 base, int lane)
        : p(p), stream(stream), first_tile(first_tile), last(first_tile + tiles - 1), lane(lane), rows(base), weights(base + STAGES * STAGE_BYTES) {}

    // Turn ``turn`` of a chunk.
    __device__ __forceinline__ void turn(int turn, int chunk, u32 place) const {
        const int set = chunk >> p.weights.set_shift;
        #pragma unroll
        for (int i = 0; i < TOGETHER; i++) {
            const int n = turn * TOGETHER + i;
            if (n >= TILES) break;
            const PackedWeights& matrix = n % MATRICES ? p.beside : p.weights;
            int tile = min(first_tile + n / MATRICES, last);
            asm volatile("" : "+r"(tile));         // else the compiler keeps the addresses of all tiles in registers
            const u32 to = weights + place + i * TILE_BYTES;
            const u8* const from = matrix.tiles + u64(u32(tile * p.weights.chunks + chunk) * (CHUNK_BYTES / 16) + lane) * 16;
            stream.copy(to + lane * 16, from);
            stream.copy(to + lane * 16 + 512, from + 512);
            const u64 at = u32(tile * p.weights.sets + set);
            #pragma unroll
            for (int part = lane * 16; part < SCALE_SET + ZERO_SET; part += 512)
                copy_16_or_zeros(to + CHUNK_BYTES + part, part < SCALE_SET ? matrix.scales + at * SCALE_SET + part : matrix.zeros + at * ZERO_SET + (part - SCALE_SET), 16);
        }
    }

    // Rows of a chunk, with zeros beyond K. What lies in the place of rows that there are not counts for no other row.
    __device__ __forceinline__ void chunk_rows(int chunk, int stage) const {
        constexpr int VECTORS = CHUNK_K / 8, STEP = 32 / VECTORS;      // rows that the lanes copy at once
        const int k = chunk * CHUNK_K + lane % VECTORS * 8, bytes = max(0, min(16, (p.k - k) * 2));
        int m = lane / VECTORS, left = p.rows - m;
        u32 to = rows + stage * STAGE_BYTES + m * PITCH + lane % VECTORS * 16;
        const u16* from = bytes > 0 ? p.x + (long long)m * p.x_pitch + k : p.x;
        #pragma unroll
        for (int i = 0; i < ROWS / STEP; i++, to += STEP * PITCH, left -= STEP) {
            if (left > 0) copy_16_or_zeros(to, from, bytes);
            if (bytes > 0) from += STEP * p.x_pitch;
        }
    }
};

template <int BYTES> DEVICE Words<BYTES> shared_words(const u8* at) {
    Words<BYTES> v;
    if constexpr (BYTES == 1) {
        v.word[0] = *at;
    } else if constexpr (BYTES == 2) {
        v.word[0] = *reinterpret_cast<const u16*>(at);
    } else {
        #pragma unroll
        for (int i = 0; i < BYTES / 4; i++) v.word[i] = reinterpret_cast<const u32*>(at)[i];
    }
    return v;
}

// What a lane holds of a chunk, from its place in the ring.
DEVICE Chunk shared_chunk(const u8* at, int lane) {
    Chunk c;
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        const int channel = lane / 4 + h * 8;
        c.weights[h] = *reinterpret_cast<const uint4*>(at + h * 512 + lane * 16);
        c.scales[h] = shared_words<GROUPS * SCALE_BYTES>(at + CHUNK_BYTES + channel * (GROUPS * SCALE_BYTES));
#if ZEROS
        c.zeros[h] = shared_words<GROUPS * ZERO_BYTES>(at + CHUNK_BYTES + SCALE_SET + channel * (GROUPS * ZERO_BYTES));
#endif
    }
    return c;
}

// Pair i of a word: numbers as they lie.
DEVICE u32 raw_pair(u32 word, int i) {
#if defined(DTYPE_BF16)
    u32 numbers = 0x00010001u * ((1 << BITS) - 1);
    asm("" : "+r"(numbers));                       // in a register: an instruction has room for one constant
    return (word >> (BITS * i) & numbers) | 0x43004300u;
#elif BITS == 8
    return __byte_perm(word, 0u, i ? 0x4342 : 0x4140);
#else
    return word >> (BITS * i) & 0x00010001u * ((1 << BITS) - 1);
#endif
}
DEVICE void operand_of(u32 (&a)[4], const Chunk& chunk, int step) {
    if constexpr (RAW) {
        const int word = step * 4 / STEPS, at = step % (STEPS / 4) * 2;
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const u32 numbers = word_of(chunk.weights[h], word);
            a[h] = raw_pair(numbers, at), a[h + 2] = raw_pair(numbers, at + 1);
        }
    } else {
        unpack_operand(a, chunk, step);
    }
}

// The sums of a chunk's rows: of rows 2 t and 2 t + 1 of each tile of rows.
typedef float RowSums[ROW_TILES][2];

// Scales a chunk's sums of a tile, and adds them.
DEVICE void add_scaled(float (&sums)[ROW_TILES][4], const float (&own)[ROW_TILES][4], const RowSums& row_sums, const Chunk& chunk) {
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        const Zero zero = zero_at(chunk, h, 0);
        const float scale = scale_at(chunk.scales[h], 0), less = -scale * ((ZEROS == 2 ? zero.rest : float(zero.whole)) + OFFSET);
        #pragma unroll
        for (int m = 0; m < ROW_TILES; m++) {
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                float& sum = sums[m][2 * h + i];
                sum = fmaf(scale * NUMBER, own[m][2 * h + i], fmaf(less, row_sums[m][i], sum));
            }
        }
    }
}

// Adds the products of a chunk of COUNT tiles from ``first`` on. rows: where the lane's 16 bytes of ldmatrix begin. SUM_ROWS: their sums
// are made, too.
template <int COUNT, bool SUM_ROWS> DEVICE void add_chunks(Sums& sums, RowSums& row_sums, int first, const Chunk (&chunk)[COUNT], u32 rows) {
    float own[COUNT][ROW_TILES][4], ones[ROW_TILES][4];                // of this chunk
    const u32 one[4] = {ONE2, ONE2, ONE2, ONE2};
    #pragma unroll
    for (int i = 0; i < COUNT * ROW_TILES * 4; i++) own[i / (ROW_TILES * 4)][i / 4 % ROW_TILES][i % 4] = 0.0f;
    #pragma unroll
    for (int i = 0; i < ROW_TILES * 4; i++) ones[i / 4][i % 4] = 0.0f;
    #pragma unroll
    for (int step = 0; step < STEPS; step++) {
        u32 a[COUNT][4];
        #pragma unroll
        for (int n = 0; n < COUNT; n++) operand_of(a[n], chunk[n], step);
        #pragma unroll
        for (int m = 0; m < ROW_TILES; m += 2) {
            u32 b[4];                              // of two tiles of rows
            ldmatrix_x4(rows + m * 8 * PITCH + step * 32, b[0], b[1], b[2], b[3]);
            #pragma unroll
            for (int n = 0; n < COUNT; n++) {
                multiply(RAW ? own[n][m] : sums[first + n][m], a[n], b[0], b[1]);
                multiply(RAW ? own[n][m + 1] : sums[first + n][m + 1], a[n], b[2], b[3]);
            }
            if (RAW && SUM_ROWS) multiply(ones[m], one, b[0], b[1]), multiply(ones[m + 1], one, b[2], b[3]);
        }
    }
    if (!RAW) return;
    #pragma unroll
    for (int m = 0; SUM_ROWS && m < ROW_TILES; m++) row_sums[m][0] = ones[m][0], row_sums[m][1] = ones[m][1];
    #pragma unroll
    for (int n = 0; n < COUNT; n++) add_scaled(sums[first + n], own[n], row_sums, chunk[n]);
}

// The warp's sums: [ROWS][SUM_PITCH].
DEVICE void put_sums(float* to, const Sums& sums, int lane) {
    #pragma unroll
    for (int n = 0; n < TILES; n++) {
        #pragma unroll
        for (int m = 0; m < ROW_TILES; m++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) to[(m * 8 + lane % 4 * 2 + i % 2) * SUM_PITCH + n * 16 + lane / 4 + i / 2 * 8] = sums[n][m][i];
        }
    }
}

DEVICE void add_to(float4& sum, const float4& v) { sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w; }

// Four sums of a row of the block: those of its warps.
DEVICE float4 warps_sum(const u8* shared, int at) {
    float4 sum = *reinterpret_cast<const float4*>(shared + at);
    #pragma unroll
    for (int w = 1; w < WARPS; w++) add_to(sum, *reinterpret_cast<const float4*>(shared + w * WARP_BYTES + at));
    return sum;
}

// The biases of four results.
struct Biases {
    float4 own, beside;
    __device__ __forceinline__ Biases(const Params& p, int column)
        : own(bias_of_four(p.bias, column, p.columns)), beside(PAIRED ? bias_of_four(p.beside_bias, column, p.columns) : own) {}
};

// Brings biases from a column on into L2: nobody else has read them in this run.
DEVICE void prefetch_biases(const Params& p, int column) {
    if (column >= p.columns) return;
    prefetch_l2(p.bias + column);
    if (PAIRED) prefetch_l2(p.beside_bias + column);
}

// Stores four results of a row, from their sums; PAIRED: and from those of the second matrix.
DEVICE void store_results(const Params& p, int row, int column, const float4& sum, const float4& other, const Biases& bias) {
#if PAIRED
    const float x[4] = {sum.x, sum.y, sum.z, sum.w}, c[4] = {bias.own.x, bias.own.y, bias.own.z, bias.own.w};
    const float z[4] = {other.x, other.y, other.z, other.w}, d[4] = {bias.beside.x, bias.beside.y, bias.beside.z, bias.beside.w};
    u16* const to = p.output + (long long)row * p.out_pitch + column;
    float y[4];
    #pragma unroll
    for (int i = 0; i < 4; i++) y[i] = epilogue(x[i], c[i], epilogue_beside(z[i], d[i], 0.0f));
    if (column + 4 <= p.columns && p.out_pitch % 4 == 0) {
        *reinterpret_cast<uint2*>(to) = make_uint2(pack2(y[0], y[1]), pack2(y[2], y[3]));
        return;
    }
    #pragma unroll
    for (int i = 0; i < 4; i++)
        if (column + i < p.columns) to[i] = pack1(y[i]);
#else
    store_four(p, row, column, sum, bias.own);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) packed_split(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 shared[];
    grid_launch_dependents();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = blockIdx.x % SPLIT, block = blockIdx.x / SPLIT;
    const int begin = p.weights.chunks * part / SPLIT + warp, end = p.weights.chunks * (part + 1) / SPLIT;
    const int own = warp * WARP_BYTES;
    const Stream stream;
    const int all = (p.columns + 15) / 16, first_tile = all * block / p.parts, tiles = all * (block + 1) / p.parts - first_tile;
    const Copies copies(p, stream, first_tile, tiles, smem_address(shared) + own, lane);
    #pragma unroll
    for (int d = 0; d < DEPTH; d++) {
        const int chunk = begin + d / TURNS * WARPS;
        if (chunk < end) copies.turn(d % TURNS, chunk, d * TURN_BYTES);
        copies_commit();
    }
    if (threadIdx.x * 32 < RESULTS * 4) prefetch_biases(p, first_tile * 16 + threadIdx.x * 32);
    grid_dependency_wait();
    #pragma unroll
    for (int i = 0; i < ROWS_AHEAD; i++)
        if (begin + i * WARPS < end) copies.chunk_rows(begin + i * WARPS, i);
    copies_commit();
    copies_wait_but<0>();

    Sums sums;
    RowSums row_sums;
    #pragma unroll
    for (int i = 0; i < TILES * ROW_TILES * 4; i++) sums[i / (ROW_TILES * 4)][i / 4 % ROW_TILES][i % 4] = 0.0f;
    int stage = 0, place = 0;                      // of the chunk's rows; of the turn's weights, in bytes
    #pragma unroll 1
    for (int chunk = begin; chunk < end; chunk += WARPS) {
        const u32 rows = copies.rows + stage * STAGE_BYTES + (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 16;
        #pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {
            copies_wait_but<DEPTH - 1>();
            __syncwarp();                          // this turn has landed for all lanes, and all have read the rows before these
            constexpr int LAST = TILES - (TURNS - 1) * TOGETHER;
            const u8* const from = shared + own + STAGES * STAGE_BYTES + place;
            Chunk held[TOGETHER];
            #pragma unroll
            for (int i = 0; i < TOGETHER; i++)
                if (turn < TURNS - 1 || i < LAST) held[i] = shared_chunk(from + i * TILE_BYTES, lane);
            __syncwarp();                          // its place is free
            const int next = chunk + (turn + DEPTH) / TURNS * WARPS;
            if (next < end) copies.turn((turn + DEPTH) % TURNS, next, place);
            if (turn == 0 && chunk + ROWS_AHEAD * WARPS < end) copies.chunk_rows(chunk + ROWS_AHEAD * WARPS, stage ? stage - 1 : STAGES - 1);
            copies_commit();
            if (turn == 0) {
                add_chunks<TOGETHER, true>(sums, row_sums, 0, held, rows);
            } else if (turn < TURNS - 1 || LAST == TOGETHER) {
                add_chunks<TOGETHER, false>(sums, row_sums, turn * TOGETHER, held, rows);
            } else {
                const Chunk alone[1] = {held[0]};
                add_chunks<1, false>(sums, row_sums, turn * TOGETHER, alone, rows);
            }
            place = place + TURN_BYTES == DEPTH * TURN_BYTES ? 0 : place + TURN_BYTES;
        }
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    copies_wait_but<0>();
    const int first_column = first_tile * 16, own_four = threadIdx.x + part * THREADS;         // of the first result that the thread stores
    const Biases biases(p, first_column + own_four % RESULTS * 4);
    __syncwarp();                                  // the warp's rings are read no more: its sums take their place
    put_sums(reinterpret_cast<float*>(shared + own), sums, lane);
    __syncthreads();
    // The first of four sums of a matrix behind a result; and the results from them.
    auto place_of = [](int i, int matrix) { return i / RESULTS * (SUM_PITCH * 4) + (i % RESULTS / 4 * MATRICES + matrix) * 64 + i % 4 * 16; };
    auto store = [&](int i, const float4 (&sum)[MATRICES]) {
        if (i % RESULTS >= tiles * 4) return;
        const int column = first_column + i % RESULTS * 4;
        store_results(p, i / RESULTS, column, sum[0], sum[PAIRED], i == own_four ? biases : Biases(p, column));
    };
    const int count = p.rows * RESULTS;
#if SPLIT > 1
    for (int i = threadIdx.x; i < count * MATRICES; i += THREADS) {
        const int at = i / FOURS * (SUM_PITCH * 4) + i % FOURS * 16;
        const float4 sum = warps_sum(shared, at);
        *reinterpret_cast<float4*>(shared + at) = sum;                                         // nobody else reads this place
    }
    cluster_arrive();
    cluster_wait();
    for (int i = own_four; i < count; i += THREADS * SPLIT) {
        float4 sum[MATRICES];
        #pragma unroll
        for (int n = 0; n < MATRICES; n++) {
            float4 of[SPLIT];
            #pragma unroll
            for (int r = 0; r < SPLIT; r++) cluster_load(cluster_map(smem_address(shared) + place_of(i, n), r), of[r]);
            #pragma unroll
            for (int r = 1; r < SPLIT; r++) add_to(of[0], of[r]);
            sum[n] = of[0];
        }
        store(i, sum);
    }
    cluster_arrive();                              // the peers have read this block's sums
    cluster_wait();
#else
    for (int i = threadIdx.x; i < count; i += THREADS) {
        float4 sum[MATRICES];
        #pragma unroll
        for (int n = 0; n < MATRICES; n++) sum[n] = warps_sum(shared, place_of(i, n));
        store(i, sum);
    }
#endif
}
