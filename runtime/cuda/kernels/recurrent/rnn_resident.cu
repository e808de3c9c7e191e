// LSTM, GRU and RNN of any size with all of ONNX's options, all steps and directions in one launch. The recurrent matrix stays in
// registers, in fp32.
//
// An item is UNITS hidden units of one direction and COLUMNS entries of the batch. A block owns an item; where not all items run at once,
// blocks take several in sequence. LANES threads share a unit: each holds the weights of all its gates for every LANES-th group of four
// units of the state, and shuffles add their partial sums. Then lane n computes the cell of entry n. The state is in shared memory.
//
// Where one block holds all units (PARTS == 1), the state alternates between two buffers. Otherwise PARTS blocks exchange the state through
// L2. A value and a tag form eight bytes that are written and read in one access, so no flag and no fence is needed. Two slots suffice: a
// block writes step t + 1 after it has read all of step t, whose writers had read all of step t - 1. Tags continue from launch to launch
// (``epoch``, for each item). All blocks must be resident at once: that launch is cooperative.
//
// generated.cuh defines CELL (0 LSTM, 1 GRU, 2 RNN), HIDDEN, DIRECTIONS, REVERSE (of the first direction), UNITS, PARTS, LANES (a power of
// two up to 32), COLUMNS, THREADS, WIDE (fp32), BFLOAT (bf16), WIDE_GATES (products of the inputs in fp32), HAS_BIAS, HAS_PEEPHOLES,
// HAS_LENGTHS, HAS_INITIAL, COUPLED (an LSTM's forget gate is 1 - its input gate), RESET_FIRST (a GRU's reset gate is applied before the
// product), and the activations.
#include "element.cuh"

#if WIDE_GATES
typedef f32 Gate;
#else
typedef Element Gate;
#endif

constexpr int GATES = CELL == 0 ? 4 : CELL == 1 ? 3 : 1;
constexpr int SLICES = (HIDDEN + 4 * LANES - 1) / (4 * LANES);     // groups of four weights per lane
constexpr int PITCH = SLICES * LANES * 4;                          // floats of an entry's state; zeros beyond HIDDEN
constexpr int ROUNDS = (COLUMNS + LANES - 1) / LANES;              // entries per lane
constexpr int STATES = COLUMNS * PITCH;                            // floats per buffer
constexpr int BUFFERS = PARTS == 1 ? 2 : 1;
constexpr int EACH = (COLUMNS * HIDDEN + THREADS - 1) / THREADS;
constexpr int TOGETHER = EACH < 8 ? EACH : 8;                      // reads of the exchange in flight
static_assert(LANES <= 32 && 32 % LANES == 0 && THREADS % 32 == 0 && UNITS * LANES <= THREADS, "a warp holds whole units");
static_assert(UNITS * PARTS >= HIDDEN, "blocks own all units");

struct Params {
    const Gate* gates;                             // [steps][batch][direction][gate][unit]: products of the inputs
    const Element* weights;                        // [direction][gate][unit][HIDDEN]
    const Element* bias;                           // [direction][2][gate][unit]: input bias, recurrent bias
    const Element* peepholes;                      // [direction][3][unit]
    const int* lengths;                            // [batch]
    const Element* initial_h;                      // [direction][batch][unit]
    const Element* initial_c;
    Element* output;                               // [steps][batch][direction][unit]
    Element* final_h;                              // [direction][batch][unit]
    Element* final_c;
    u64* exchange;                                 // [state, gated state][slot][direction][batch][unit]: a value in the low word, a tag in the high word
    u32* epoch;                                    // [item]: the last tag of earlier launches
    int steps, batch;
};

struct Place {                                     // of this thread
    int item, direction, part;
    int first, count;                              // part of the batch
    int unit, lane;
    bool active, reverse;
};
DEVICE Place place_of(const Params& p, int item, int groups) {
    const int local = threadIdx.x / LANES;
    Place at;
    at.item = item;
    at.part = blockIdx.x % PARTS;
    at.direction = item / groups;
    at.first = item % groups * COLUMNS;
    at.count = min_nan(COLUMNS, p.batch - at.first);
    at.unit = at.part * UNITS + local;
    at.lane = threadIdx.x % LANES;
    at.active = local < UNITS && at.unit < HIDDEN;
    at.reverse = REVERSE || at.direction == 1;
    return at;
}

// A thread's share of the matrix, and the bias and peepholes of its unit.
struct Weights {
    float w[GATES][SLICES][4];
    float bias[GATES], peephole[GATES];
};
DEVICE void load(Weights& own, const Params& p, const Place& at) {
    #pragma unroll
    for (int g = 0; g < GATES; g++) {
        const Element* row = p.weights + (i64(at.direction * GATES + g) * HIDDEN + at.unit) * HIDDEN;
        #pragma unroll
        for (int i = 0; i < SLICES; i++) {
            const int k = (i * LANES + at.lane) * 4;
            #pragma unroll
            for (int j = 0; j < 4; j++) own.w[g][i][j] = 0.0f;
            if (HIDDEN % 4 == 0) {
                if (at.active && k < HIDDEN) {
                    const Pack<Element, 4> four(row + k);
                    #pragma unroll
                    for (int j = 0; j < 4; j++) own.w[g][i][j] = widen(four.lane[j]);
                }
            } else {
                #pragma unroll
                for (int j = 0; j < 4; j++)
                    if (at.active && k + j < HIDDEN) own.w[g][i][j] = widen(row[k + j]);
            }
        }
    }
}
DEVICE void load_vectors(Weights& own, const Params& p, const Place& at) {
    #pragma unroll
    for (int g = 0; g < GATES; g++) {
        own.bias[g] = own.peephole[g] = 0.0f;
        if (HAS_BIAS && at.active) own.bias[g] = widen(p.bias[((at.direction * 2 + 1) * GATES + g) * HIDDEN + at.unit]);
        if (HAS_PEEPHOLES && g < 3 && at.active) own.peephole[g] = widen(p.peepholes[(at.direction * 3 + g) * HIDDEN + at.unit]);
    }
}

// The products FIRST to LAST - 1 of the thread's unit with one entry's state. All lanes of a unit get them.
template <int FIRST, int LAST> DEVICE void multiply(float (&sums)[GATES], const Weights& own, const float* state, const Place& at) {
    #pragma unroll
    for (int g = FIRST; g < LAST; g++) sums[g] = 0.0f;
    #pragma unroll
    for (int i = 0; i < SLICES; i++) {
        const Pack<f32, 4> x(state + (i * LANES + at.lane) * 4);
        #pragma unroll
        for (int j = 0; j < 4; j++) {
            #pragma unroll
            for (int g = FIRST; g < LAST; g++) sums[g] += own.w[g][i][j] * x.lane[j];
        }
    }
    #pragma unroll
    for (int m = LANES / 2; m > 0; m /= 2) {
        #pragma unroll
        for (int g = FIRST; g < LAST; g++) sums[g] += __shfl_xor_sync(0xffffffffu, sums[g], m);
    }
}
// The same for entries round * LANES .. round * LANES + LANES - 1: lane n gets the products of the n-th.
template <int FIRST, int LAST>
DEVICE void multiply_round(float (&mine)[GATES], const Weights& own, const float* states, int round, const Place& at) {
    constexpr int MOST = COLUMNS < LANES ? COLUMNS : LANES;
    const int live = min_nan(MOST, at.count - round * LANES);
    #pragma unroll 2
    for (int n = 0; n < live; n++) {
        float sums[GATES];
        multiply<FIRST, LAST>(sums, own, states + (round * LANES + n) * PITCH, at);
        #pragma unroll
        for (int g = FIRST; g < LAST; g++) mine[g] = n == at.lane ? sums[g] : mine[g];
    }
}

// ``in``: the products of the inputs; ``g``: the products of the state. ``update``: a GRU's update gate, if already computed. ``c``: an
// LSTM's cell.
DEVICE float cell_step(const Gate (&in)[GATES], const float (&g)[GATES], const Weights& own, float update, float h, float& c, int d) {
    float x[GATES];
    #pragma unroll
    for (int i = 0; i < GATES; i++) x[i] = widen(in[i]) + (g[i] + own.bias[i]);
    if constexpr (CELL == 0) {
        if (HAS_PEEPHOLES) x[0] += own.peephole[0] * c, x[2] += own.peephole[2] * c;
        const float input = first_activation(x[0], d);
        c = (COUPLED ? 1.0f - input : first_activation(x[2], d)) * c + input * second_activation(x[3], d);
        if (HAS_PEEPHOLES) x[1] += own.peephole[1] * c;
        return first_activation(x[1], d) * third_activation(c, d);
    } else if constexpr (CELL == 1) {
        if (RESET_FIRST) return (1.0f - update) * second_activation(x[2], d) + update * h;
        const float z = first_activation(x[0], d), reset = first_activation(x[1], d);
        return (1.0f - z) * second_activation(widen(in[2]) + reset * (g[2] + own.bias[2]), d) + z * h;
    } else {
        return first_activation(x[0], d);
    }
}

// A thread's entry of the batch in a round.
struct Entry {
    int number, length;                            // index in the batch; steps
    bool mine;
    float h, c, update;
    Gate in[GATES];                                // inputs of the next step, in flight; widened at their use
};
DEVICE int position_of(const Entry& e, int step, bool reverse) {
    return reverse && step < e.length ? e.length - 1 - step : step;
}
DEVICE void fetch(Entry& e, const Params& p, const Place& at, int step) {
    #pragma unroll
    for (int g = 0; g < GATES; g++) e.in[g] = narrow<Gate>(0.0f);
    if (!e.mine || step >= e.length) return;
    const i64 row = (i64(position_of(e, step, at.reverse)) * p.batch + e.number) * DIRECTIONS + at.direction;
    #pragma unroll
    for (int g = 0; g < GATES; g++) e.in[g] = p.gates[(row * GATES + g) * HIDDEN + at.unit];
}
DEVICE void begin(Entry& e, const Params& p, const Place& at, int round) {
    const int column = round * LANES + at.lane;
    e.number = at.first + column;
    e.mine = at.active && column < at.count;
    e.length = p.steps;
    if (HAS_LENGTHS && e.mine) e.length = min_nan(max_nan(p.lengths[e.number], 0), p.steps);
    e.h = e.c = e.update = 0.0f;
    if (HAS_INITIAL && e.mine) {
        const i64 from = (i64(at.direction) * p.batch + e.number) * HIDDEN + at.unit;
        e.h = widen(p.initial_h[from]);
        if (CELL == 0) e.c = widen(p.initial_c[from]);
    }
    fetch(e, p, at, 0);
}

// ---- the exchange ----------------------------------------------------------------------------------------------------------------

// The values of a direction in slot ``step % 2``. ``kind``: 0 states, 1 states times reset gates.
DEVICE u64* slot_of(const Params& p, const Place& at, int kind, int step) {
    return p.exchange + (i64((kind * 2 + (step & 1)) * DIRECTIONS + at.direction) * p.batch) * HIDDEN;
}
DEVICE void give(u64* slot, const Entry& e, int unit, float value, u32 tag) {
    *reinterpret_cast<volatile u64*>(slot + i64(e.number) * HIDDEN + unit) = u64(tag) << 32 | __float_as_uint(value);
}
// Reads all units of the block's entries, once they have the tag.
DEVICE void receive(float* states, const u64* slot, u32 tag, const Place& at) {
    const u64* from = slot + i64(at.first) * HIDDEN;
    const int items = at.count * HIDDEN;
    __syncwarp();                                  // every lane has written what other blocks wait for
    for (int i = threadIdx.x; i < items; i += THREADS * TOGETHER) {
        u64 v[TOGETHER];
        for (bool there = false; !there;) {
            #pragma unroll
            for (int j = 0; j < TOGETHER; j++)
                v[j] = *reinterpret_cast<const volatile u64*>(from + min_nan(i + j * THREADS, items - 1));
            there = true;
            #pragma unroll
            for (int j = 0; j < TOGETHER; j++) there = there && u32(v[j] >> 32) == tag;
        }
        #pragma unroll
        for (int j = 0; j < TOGETHER; j++) {
            const int item = min_nan(i + j * THREADS, items - 1);
            states[item / HIDDEN * PITCH + item % HIDDEN] = __uint_as_float(u32(v[j]));
        }
    }
}

// ---- a step ----------------------------------------------------------------------------------------------------------------------

// A GRU whose reset gate is applied before the product: computes the update gates, and the states times the reset gates.
DEVICE void reset_states(Entry (&entries)[ROUNDS], const Weights& own, const float* now, float* gated, const Params& p, const Place& at,
                         int step, u32 tag) {
    #pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        Entry& e = entries[i];
        float g[GATES] = {};
        multiply_round<0, GATES < 2 ? GATES : 2>(g, own, now, i, at);
        if (!e.mine) continue;
        constexpr int R = GATES < 2 ? 0 : 1;
        e.update = first_activation(widen(e.in[0]) + (g[0] + own.bias[0]), at.direction);
        const float value = first_activation(widen(e.in[R]) + (g[R] + own.bias[R]), at.direction) * e.h;
        if (PARTS == 1)
            gated[(i * LANES + at.lane) * PITCH + at.unit] = value;
        else
            give(slot_of(p, at, 1, step), e, at.unit, value, tag);
    }
    if (PARTS > 1) receive(gated, slot_of(p, at, 1, step), tag, at);
    __syncthreads();
}
DEVICE void finish_entry(Entry& e, const float (&g)[GATES], const Weights& own, const Params& p, const Place& at, int step) {
    const i64 row = (i64(position_of(e, step, at.reverse)) * p.batch + e.number) * DIRECTIONS + at.direction;
    const bool on = !HAS_LENGTHS || step < e.length;
    if (on) e.h = cell_step(e.in, g, own, e.update, e.h, e.c, at.direction);
    p.output[row * HIDDEN + at.unit] = narrow<Element>(on ? e.h : 0.0f);
    if (step + 1 < p.steps) fetch(e, p, at, step + 1);
}

// All steps of a direction and a part of the batch.
DEVICE void run(const Params& p, const Weights& own, const Place& at, float* states) {
    float* const gated = states + BUFFERS * STATES;
    for (int i = threadIdx.x; i < (BUFFERS + RESET_FIRST) * STATES; i += THREADS) {
        const int n = i / PITCH, k = i % PITCH;
        float value = 0.0f;
        if (HAS_INITIAL && n < at.count && k < HIDDEN)
            value = widen(p.initial_h[(i64(at.direction) * p.batch + at.first + n) * HIDDEN + k]);
        states[i] = value;
    }
    Entry entries[ROUNDS];
    #pragma unroll
    for (int i = 0; i < ROUNDS; i++) begin(entries[i], p, at, i);
    u32* const own_epoch = p.epoch + at.item;
    const u32 epoch = PARTS > 1 ? *reinterpret_cast<volatile u32*>(own_epoch) : 0;
    __syncthreads();
    for (int step = 0; step < p.steps; step++) {
        float* const now = states + step % BUFFERS * STATES;
        float* const next = states + (step + 1) % BUFFERS * STATES;
        if (PARTS > 1 && step > 0) {
            __syncthreads();                       // nobody reads the previous states
            receive(now, slot_of(p, at, 0, step - 1), epoch + step, at);
            __syncthreads();
        }
        if (RESET_FIRST) reset_states(entries, own, now, gated, p, at, step, epoch + step + 1);
        #pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            Entry& e = entries[i];
            float g[GATES] = {};
            if (RESET_FIRST)
                multiply_round<GATES - 1, GATES>(g, own, gated, i, at);
            else
                multiply_round<0, GATES>(g, own, now, i, at);
            if (!e.mine) continue;
            finish_entry(e, g, own, p, at, step);
            if (PARTS == 1)
                next[(i * LANES + at.lane) * PITCH + at.unit] = e.h;
            else if (step + 1 < p.steps)
                give(slot_of(p, at, 0, step), e, at.unit, e.h, epoch + step + 1);
        }
        if (PARTS == 1) __syncthreads();
    }
    #pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        const Entry& e = entries[i];
        const i64 to = (i64(at.direction) * p.batch + e.number) * HIDDEN + at.unit;
        if (!e.mine) continue;
        p.final_h[to] = narrow<Element>(e.h);
        if (CELL == 0) p.final_c[to] = narrow<Element>(e.c);
    }
    // All blocks of the item have read the epoch: this block has read values that they sent later.
    if (PARTS > 1 && at.part == 0 && threadIdx.x == 0) *own_epoch = epoch + p.steps;
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) rnn_resident(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    launch_dependents();
    const int groups = (p.batch + COLUMNS - 1) / COLUMNS;
    Weights own;
    int loaded = -1;                               // the direction of the weights
    for (int item = blockIdx.x / PARTS; item < DIRECTIONS * groups; item += gridDim.x / PARTS) {
        const Place at = place_of(p, item, groups);
        if (at.direction != loaded) load(own, p, at);
        loaded = at.direction;
        wait_for_predecessor();                    // weights are constants
        load_vectors(own, p, at);
        run(p, own, at, reinterpret_cast<float*>(memory));
    }
}
