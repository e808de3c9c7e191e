// One recurrent layer (RNN, GRU, LSTM) after the products of its inputs, as one persistent launch over all time steps, for states too
// large for a cluster: the blocks of the whole grid exchange them through global memory.
//
// A block owns ROW_TILES * 16 rows of the recurrent matrix of one direction: sixteen rows are the gates of 16 / GATES units (GATES: 1
// or 4; row gate * 4 + unit). Each of its eight warps multiplies these rows by an eighth of the state. Its share of the matrix stays in
// its registers as mma.sync fragments for the whole launch. K is walked in chunks of 32: lane t of four takes elements 8 t .. 8 t + 7.
// Partial sums are added through shared memory, and a thread computes a unit.
//
// The exchange: two values of the state and a tag form eight bytes, which are written and read in one access. A reader that sees the
// expected step's tag also has its values, and needs no flag and no fence. A warp waits only for its own eighth. Two slots suffice: a
// block writes step t + 1 after it has read all of step t, whose writers had read all of step t - 1. Tags continue from launch to launch
// (``epoch``, for each direction), so that nothing has to be cleared.
//
// All blocks must be resident at once: the launch is cooperative.
//
// generated.cuh defines CELL (0 LSTM, 1 GRU, 2 RNN), RELU (an RNN's activation; else tanh), HIDDEN (a multiple of 256), ROW_TILES,
// DIRECTIONS, REVERSE (of the first direction), COLUMN_TILES (batch / 8, rounded up), COLUMNS (of
// the first tile), HAS_BIAS and HAS_INITIAL.
#include "ptx.cuh"
#include "generated.cuh"

constexpr int WARPS = 8, THREADS = WARPS * 32;
constexpr int GATES = CELL == 2 ? 1 : 4, STORED_GATES = CELL == 0 ? 4 : CELL == 1 ? 3 : 1;
constexpr int TILE_UNITS = 16 / GATES, UNITS = ROW_TILES * TILE_UNITS, ROWS = ROW_TILES * 16;
constexpr int SHARE = HIDDEN / WARPS, CHUNKS = SHARE / 32;
constexpr int PITCH = SHARE * 2 + (SHARE % 64 ? 0 : 64);       // bytes of a column: odd multiples of 64, no bank conflicts
constexpr int SUM_PITCH = ROWS + 4;                            // floats of a column of partial sums
constexpr int ITEMS = (UNITS * 8 + THREADS - 1) / THREADS;     // results per thread in a tile of eight columns
constexpr int BLOCKS = HIDDEN / UNITS;                         // per direction
static_assert(HIDDEN % 256 == 0 && HIDDEN % UNITS == 0, "warps take whole chunks, blocks whole rows");
static_assert(CHUNKS * ROW_TILES <= 16, "the matrix lies in registers");

struct Params {
    const u16* gates;                              // [steps][batch][direction][gate][unit]: products of the inputs
    const u16* weights;                            // [direction][gate][unit][HIDDEN]
    const u16* bias;                               // [direction][2][gate][unit]: input bias, recurrent bias
    const u16* initial_h;                          // [direction][batch][unit]
    const u16* initial_c;
    u16* output;                                   // [steps][batch][direction][unit]
    u16* final_h;                                  // [direction][batch][unit]
    u16* final_c;
    uint2* exchange;                               // [slot][direction][batch][HIDDEN / 2]: two units and a tag
    u32* epoch;                                    // [direction]: the last tag of earlier launches
    int steps, batch;
};

DEVICE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if defined(DTYPE_BF16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
DEVICE float tangent(float x) {                    // accurate to 1e-7, for any x
    const float e = __expf(-2.0f * fabsf(x));
    return copysignf(__fdividef(1.0f - e, 1.0f + e), x);
}
DEVICE uint4 read_pairs(const uint2* from) {       // bypasses L1; each pair of eight bytes is read in one piece
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
    return v;
}
DEVICE void write_pair(uint2* to, u32 units, u32 tag) {
    asm volatile("st.volatile.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(units), "r"(tag) : "memory");
}

struct Place {                                     // of this thread
    int direction, part, warp, lane, row, quad;
    bool reverse;
};
struct Shared {
    __align__(16) u8 state[WARPS][8 * PITCH];      // each warp's eighth of eight columns
    float sums[2][WARPS][8 * SUM_PITCH];           // [column][row]; two buffers: a slow warp may still read the previous one
};

// Row ``row`` (of 16) of a tile is a gate of a unit of this block; null for the fourth gate of a GRU.
DEVICE const u16* row_of(const Params& p, const Place& at, int tile, int row) {
    const int gate = row / TILE_UNITS, unit = at.part * UNITS + tile * TILE_UNITS + row % TILE_UNITS;
    if (gate >= STORED_GATES) return nullptr;
    return p.weights + ((long long)(at.direction * STORED_GATES + gate) * HIDDEN + unit) * HIDDEN;
}
DEVICE void load_weights(uint4 (&w)[ROW_TILES][2 * CHUNKS], const Params& p, const Place& at) {
    #pragma unroll
    for (int i = 0; i < ROW_TILES; i++) {
        const u16* low = row_of(p, at, i, at.row);
        const u16* high = row_of(p, at, i, at.row + 8);
        #pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const int k = at.warp * SHARE + c * 32 + at.quad * 8;
            uint4 a = make_uint4(0u, 0u, 0u, 0u), b = a;
            if (low) a = *reinterpret_cast<const uint4*>(low + k);
            if (high) b = *reinterpret_cast<const uint4*>(high + k);
            w[i][2 * c] = make_uint4(a.x, b.x, a.y, b.y);
            w[i][2 * c + 1] = make_uint4(a.z, b.z, a.w, b.w);
        }
    }
}

// Reads this warp's eighth of ``live`` columns of a slot, once all of it has the tag. The reads are in flight together: one takes longer
// than the rest of a step.
DEVICE void receive(u8* state, const uint2* slot, int live, u32 tag, const Place& at) {
    constexpr int QUADS = SHARE / 4;                               // four units are 16 bytes of the exchange
    constexpr int EACH = (COLUMNS * QUADS + 31) / 32, TOGETHER = EACH < 8 ? EACH : 8;
    const uint2* const from = slot + at.warp * (SHARE / 2);
    for (int i = at.lane; i < live * QUADS; i += 32 * TOGETHER) {
        uint4 v[TOGETHER];
        bool there = false;
        for (int tries = 0; !there; tries++) {
            #pragma unroll
            for (int j = 0; j < TOGETHER; j++) {
                const int item = min(i + j * 32, live * QUADS - 1);
                v[j] = read_pairs(from + (item / QUADS) * (HIDDEN / 2) + item % QUADS * 2);
            }
            there = true;
            #pragma unroll
            for (int j = 0; j < TOGETHER; j++) there = there && v[j].y == tag && v[j].w == tag;
#ifdef BARRIER_TRAP
            if (tries > 4000000) __trap();
#endif
        }
        #pragma unroll
        for (int j = 0; j < TOGETHER; j++) {
            const int item = min(i + j * 32, live * QUADS - 1);
            *reinterpret_cast<uint2*>(state + item / QUADS * PITCH + item % QUADS * 8) = make_uint2(v[j].x, v[j].z);
        }
    }
}
// The same for the initial states.
DEVICE void begin(u8* state, const u16* initial, int live, const Place& at) {
    for (int i = at.lane; i < live * (SHARE / 4); i += 32) {
        const int column = i / (SHARE / 4), four = i % (SHARE / 4);
        *reinterpret_cast<uint2*>(state + column * PITCH + four * 8) =
            *reinterpret_cast<const uint2*>(initial + (long long)column * HIDDEN + at.warp * SHARE + four * 4);
    }
}

// Multiplies the rows by the warp's eighth of the columns: partial sums [column][row].
DEVICE void multiply(float* sums, const uint4 (&w)[ROW_TILES][2 * CHUNKS], const u8* state, int live, const Place& at) {
    float acc[ROW_TILES][2][4];
    #pragma unroll
    for (int i = 0; i < ROW_TILES * 8; i++) (&acc[0][0][0])[i] = 0.0f;
    const bool inside = at.row < live;
    #pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        uint4 b = make_uint4(0u, 0u, 0u, 0u);
        if (inside) b = *reinterpret_cast<const uint4*>(state + at.row * PITCH + c * 64 + at.quad * 16);
        #pragma unroll
        for (int i = 0; i < ROW_TILES; i++) {
            const uint4 one = w[i][2 * c], two = w[i][2 * c + 1];
            mma(acc[i][0], one.x, one.y, one.z, one.w, b.x, b.y);
            mma(acc[i][1], two.x, two.y, two.z, two.w, b.z, b.w);
        }
    }
    #pragma unroll
    for (int j = 0; j < 2; j++) {
        const int column = at.quad * 2 + j;
        if (column >= live) continue;
        #pragma unroll
        for (int i = 0; i < ROW_TILES; i++) {
            sums[column * SUM_PITCH + i * 16 + at.row] = acc[i][0][j] + acc[i][1][j];
            sums[column * SUM_PITCH + i * 16 + at.row + 8] = acc[i][0][j + 2] + acc[i][1][j + 2];
        }
    }
}

// A unit of a column: its index in the block, and the column of the tile.
struct Item {
    int unit, column;
};
DEVICE Item item_of(int number) { return {int(number % UNITS), int(number / UNITS)}; }

DEVICE void gates_of(float (&g)[GATES], const float (&sums)[WARPS][8 * SUM_PITCH], const Item& item, bool multiplied) {
    #pragma unroll
    for (int i = 0; i < GATES; i++) {
        g[i] = 0.0f;
        const int row = item.unit / TILE_UNITS * 16 + i * TILE_UNITS + item.unit % TILE_UNITS;
        if (!multiplied) continue;
        #pragma unroll
        for (int w = 0; w < WARPS; w++) g[i] += sums[w][item.column * SUM_PITCH + row];
    }
}
// ``in``: the products of the inputs; ``g``: the products of the state; ``bias``: the recurrent bias. ``c``: an LSTM's cell.
DEVICE float cell_step(const float (&in)[GATES], const float (&g)[GATES], const float (&bias)[GATES], float h, float& c) {
    if constexpr (CELL == 0) {
        c = sigmoid(in[2] + g[2] + bias[2]) * c + sigmoid(in[0] + g[0] + bias[0]) * tangent(in[3] + g[3] + bias[3]);
        return sigmoid(in[1] + g[1] + bias[1]) * tangent(c);
    } else if constexpr (CELL == 1) {
        const float z = sigmoid(in[0] + g[0] + bias[0]), r = sigmoid(in[1] + g[1] + bias[1]);
        const float candidate = tangent(in[2] + r * (g[2] + bias[2]));
        return candidate + z * (h - candidate);
    } else {
        const float x = in[0] + g[0] + bias[0];
        return RELU ? fmaxf(x, 0.0f) : tangent(x);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) rnn_grid(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    Place at;
    at.direction = blockIdx.x / BLOCKS;
    at.part = blockIdx.x % BLOCKS;
    at.warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    at.lane = threadIdx.x % 32;
    at.row = at.lane / 4;
    at.quad = at.lane % 4;
    at.reverse = REVERSE || at.direction == 1;
    uint4 w[ROW_TILES][2 * CHUNKS];
    load_weights(w, p, at);
    grid_dependency_wait();
    const u32 epoch = *reinterpret_cast<volatile u32*>(p.epoch + at.direction);
    const int own = at.part * UNITS;               // the block's first unit
    float bias[ITEMS][GATES], h[COLUMN_TILES][ITEMS], c[COLUMN_TILES][ITEMS];
    #pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const Item item = item_of(threadIdx.x + i * THREADS);
        #pragma unroll
        for (int g = 0; g < GATES; g++) {
            bias[i][g] = 0.0f;
            if (HAS_BIAS && g < STORED_GATES)
                bias[i][g] = unpack1(p.bias[((at.direction * 2 + 1) * STORED_GATES + g) * HIDDEN + own + item.unit]);
        }
        #pragma unroll
        for (int t = 0; t < COLUMN_TILES; t++) {
            const int n = t * 8 + item.column;
            const long long from = (long long)(at.direction * p.batch + n) * HIDDEN + own + item.unit;
            h[t][i] = c[t][i] = 0.0f;
            if (HAS_INITIAL && item.column < 8 && n < p.batch) {
                h[t][i] = unpack1(p.initial_h[from]);
                if (CELL == 0) c[t][i] = unpack1(p.initial_c[from]);
            }
        }
    }
    const long long slot_size = (long long)DIRECTIONS * p.batch * (HIDDEN / 2);
    uint2* const exchange = p.exchange + (long long)at.direction * p.batch * (HIDDEN / 2);
    int turn = 0;
    for (int step = 0; step < p.steps; step++) {
        const int position = at.reverse ? p.steps - 1 - step : step;
        const bool multiplied = HAS_INITIAL || step > 0;
        #pragma unroll
        for (int t = 0; t < COLUMN_TILES; t++, turn ^= 1) {
            const int first = t * 8, live = min(8, p.batch - first);
            float in[ITEMS][GATES];                // in flight while the state arrives
            #pragma unroll
            for (int i = 0; i < ITEMS; i++) {
                const Item item = item_of(threadIdx.x + i * THREADS);
                const u16* from = p.gates + (((long long)position * p.batch + first + item.column) * DIRECTIONS + at.direction)
                                  * (STORED_GATES * HIDDEN) + own + item.unit;
                #pragma unroll
                for (int g = 0; g < GATES; g++) {
                    in[i][g] = 0.0f;
                    if (item.column < live && g < STORED_GATES) in[i][g] = unpack1(__ldg(from + g * HIDDEN));
                }
            }
            if (multiplied) {
                u8* const state = shared.state[at.warp];
                __syncwarp();                      // the previous columns are multiplied
                if (step > 0)
                    receive(state, exchange + ((step - 1) & 1) * slot_size + first * (HIDDEN / 2), live, epoch + step, at);
                else
                    begin(state, p.initial_h + (long long)(at.direction * p.batch + first) * HIDDEN, live, at);
                __syncwarp();
                multiply(shared.sums[turn][at.warp], w, state, live, at);
            }
            __syncthreads();
            #pragma unroll
            for (int i = 0; i < ITEMS; i++) {
                const Item item = item_of(threadIdx.x + i * THREADS);
                if (item.column < live) {
                    float g[GATES];
                    gates_of(g, shared.sums[turn], item, multiplied);
                    h[t][i] = cell_step(in[i], g, bias[i], h[t][i], c[t][i]);
                }
                const float next = __shfl_down_sync(0xffffffffu, h[t][i], 1);       // the number of units is even: the same column
                if (item.column >= live || item.unit % 2) continue;
                const u32 both = pack2(h[t][i], next);
                const int n = first + item.column, unit = own + item.unit;
                if (step + 1 < p.steps)
                    write_pair(exchange + (step & 1) * slot_size + ((long long)n * HIDDEN + unit) / 2, both, epoch + step + 1);
                const long long row = ((long long)position * p.batch + n) * DIRECTIONS + at.direction;
                *reinterpret_cast<u32*>(p.output + row * HIDDEN + unit) = both;
            }
        }
    }
    #pragma unroll
    for (int t = 0; t < COLUMN_TILES; t++) {
        #pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const Item item = item_of(threadIdx.x + i * THREADS);
            const int n = t * 8 + item.column;
            if (item.column >= 8 || n >= p.batch) continue;
            const long long to = (long long)(at.direction * p.batch + n) * HIDDEN + own + item.unit;
            p.final_h[to] = pack1(h[t][i]);
            if (CELL == 0) p.final_c[to] = pack1(c[t][i]);
        }
    }
    // All blocks of the direction have read the epoch: this block has read values that they sent later.
    if (at.part == 0 && threadIdx.x == 0) p.epoch[at.direction] = epoch + p.steps;
}
