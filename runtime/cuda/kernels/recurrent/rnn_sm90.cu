// LSTM and GRU as one persistent launch over all layers and time steps: weights stay in registers, layers run as a wavefront.
//
// A cluster of RANKS blocks holds one matrix of one layer: the input's (kind 0, "projection") or the recurrent one (kind 1, "recurrence").
// A block owns 32 hidden units and a warp four. The four gates of four units are the sixteen rows of an m16n8k16 product: row
// 4 * gate + unit. The warp's share of the matrix, 16 rows x K, stays in its registers as mma.sync fragments for the whole launch. K is
// walked in chunks of 32: lane t of four takes elements 8 t .. 8 t + 7 of a chunk, and the weights are packed in this order.
//
// Warps 0-7 multiply. Warp 8 stores results and raises flags: a release at device scope takes longer than the rest of a step. In a
// projection, warps 9-11 load the inputs into a ring.
//
// Recurrence: h goes to all blocks of the cluster through distributed shared memory (st.async, counted by the receiver's mbarrier). Two
// buffers suffice, since a block sends step t + 1 only after it has received all of step t. Projection: it runs ahead of its recurrence,
// or behind the recurrence of the previous layer, and passes gate values through global memory with release/acquire flags. Dependencies go
// from lower to higher cluster indices only, so the launch makes progress even where not all clusters are resident at once. Flags must be
// zero at the start: rnn_reset runs before.
//
// generated.cuh defines CELL (0 LSTM, 1 GRU), RANKS (hidden size / 32), INPUT_CHUNKS (input size / 32, rounded up), TILES (columns of a
// recurrence's part of the batch / 8), INPUT_TILES (columns of the whole batch / 8, for a projection), INPUT_STAGES, HAS_INITIAL and REVERSE.
#include "ptx.cuh"
#include "generated.cuh"

constexpr int HIDDEN = RANKS * 32;
constexpr int COLUMNS = TILES * 8, INPUT_COLUMNS = INPUT_TILES * 8;
constexpr int COMPUTE = 256, THREADS = 384, FETCHERS = 96;
constexpr u32 HIDDEN_BYTES = RANKS * COLUMNS * 64; // [rank][column][32 units]

struct Params {
    const u16* input;                              // [steps][batch][inputs]
    const uint4* weights;                          // per layer: projection, recurrence: [rank][warp][k tile][lane]
    const float4* bias;                            // [layer][unit]: four gates
    const u16* initial_h;                          // [layer][batch][unit]
    const u16* initial_c;
    u16* hidden;                                   // [layer - 1][steps][batch][unit]: outputs of the inner layers
    u16* output;                                   // [steps][batch][unit] of the last layer
    u16* final_h;                                  // [layer][batch][unit]
    u16* final_c;
    float4* gates;                                 // [layer][steps][rank][batch][unit of 32]
    u32* progress;                                 // [cluster][rank]: finished steps
    int steps, batch, inputs, layers, groups;      // groups: parts of the batch, with one recurrence cluster each
};

DEVICE void store_release(u32* at, u32 value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
// A form of the protocols that racecheck can follow. It judges hazards by barriers at which every thread arrives, all at one instruction. It
// does not understand two protocols below: one lane that arrives for its warp, and a named barrier that two roles reach in different code.
// RACECHECK (benchmarks/kinds/sanitize.py) replaces both by an mbarrier of all threads: the same waits, at the same points.
#ifdef RACECHECK
constexpr int RING_ARRIVALS = COMPUTE;
DEVICE void leave_stage(u32 barrier, int) { barrier_arrive(barrier); }
DEVICE void meet_publisher(u32 base, int step) {
    barrier_arrive(base + 32);
    barrier_wait(base + 32, step & 1);
}
#else
constexpr int RING_ARRIVALS = COMPUTE / 32;
DEVICE void leave_stage(u32 barrier, int lane) {
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
}
DEVICE void meet_publisher(u32, int) { named_barrier(1, COMPUTE + 32); }
#endif
DEVICE void spin_guard(int tries) {
#ifdef BARRIER_TRAP
    if (tries > 4000000) __trap();
#endif
}
DEVICE void send(u32 address, u32 barrier, const uint4& v) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
                 ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier) : "memory");
}
DEVICE uint4 shared_words(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
}
DEVICE void shared_half(u32 address, u16 v) { asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(v) : "memory"); }
DEVICE void shared_words_store(u32 address, const uint4& v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE void copy_async(u32 target, const void* source, int bytes) {     // 16 bytes; bytes from ``bytes`` on become zero
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(bytes) : "memory");
}
DEVICE void mma(float (&d)[4], const uint4& a, u32 b0, u32 b1) {
#if defined(DTYPE_BF16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
DEVICE float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
DEVICE float tangent(float x) {                    // accurate to 1e-7, for any x
    const float e = __expf(-2.0f * fabsf(x));
    return copysignf(__fdividef(1.0f - e, 1.0f + e), x);
}

struct Place {                                     // of this thread
    int layer, kind, group, rank, warp, lane, row, quad;
    int first, count;                              // its cluster's part of the batch
    u32* flag;                                     // flag of its block
    int unit, pick;                                // hidden unit within the block; the column of a pair that it takes
};

template <int CHUNKS> DEVICE void load_weights(uint4 (&w)[2 * CHUNKS], const Params& p, const Place& at) {
    // Chunks before this matrix: INPUT_CHUNKS of the layer-0 projection, RANKS of every other matrix.
    const int matrix = at.layer * 2 + at.kind;
    const long long before = matrix == 0 ? 0 : (long long)INPUT_CHUNKS + (matrix - 1) * RANKS;
    const uint4* from = p.weights + before * (RANKS * 8 * 2 * 32) + (at.rank * 8 + at.warp) * (2 * CHUNKS * 32) + at.lane;
    #pragma unroll
    for (int i = 0; i < 2 * CHUNKS; i++) w[i] = __ldg(from + i * 32);
}

// Multiplies sixteen rows by COUNT tiles of eight columns from tile ``first`` on. The tiles are interleaved: operands of one arrive while the
// other multiplies. Then each lane has the four gates of its unit in column tile * 8 + 2 * quad + pick.
template <int CHUNKS, int COUNT>
DEVICE void multiply(float4 (&gates)[COUNT], const uint4 (&w)[2 * CHUNKS], u32 operand, u32 column_stride, u32 chunk_stride, int first,
                     int live, const Place& at) {
    constexpr int CHAINS = COUNT == 1 ? 4 : 2;     // independent accumulators of a tile hide mma's latency
    float acc[COUNT][CHAINS][4];
    #pragma unroll
    for (int i = 0; i < COUNT * CHAINS * 4; i++) (&acc[0][0][0])[i] = 0.0f;
    u32 from[COUNT];
    bool inside[COUNT];                            // a column's result depends on that column alone
    #pragma unroll
    for (int t = 0; t < COUNT; t++) {
        const int column = (first + t) * 8 + at.row;
        from[t] = operand + column * column_stride + at.quad * 16;
        inside[t] = column < live;
    }
    #pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        #pragma unroll
        for (int t = 0; t < COUNT; t++) {
            uint4 b = make_uint4(0u, 0u, 0u, 0u);
            if (inside[t]) b = shared_words(from[t] + c * chunk_stride);
            mma(acc[t][c * 2 % CHAINS], w[2 * c], b.x, b.y);
            mma(acc[t][(c * 2 + 1) % CHAINS], w[2 * c + 1], b.z, b.w);
        }
    }
    #pragma unroll
    for (int t = 0; t < COUNT; t++) {
        #pragma unroll
        for (int i = CHAINS / 2; i > 0; i /= 2) {
            #pragma unroll
            for (int k = 0; k < i; k++) {
                #pragma unroll
                for (int j = 0; j < 4; j++) acc[t][k][j] += acc[t][k + i][j];
            }
        }
        const float x = __shfl_xor_sync(0xffffffffu, at.pick ? acc[t][0][0] : acc[t][0][1], 16);
        const float y = __shfl_xor_sync(0xffffffffu, at.pick ? acc[t][0][2] : acc[t][0][3], 16);
        gates[t] = at.pick ? make_float4(x, acc[t][0][1], y, acc[t][0][3]) : make_float4(acc[t][0][0], x, acc[t][0][2], y);
    }
}

// The flags of a layer's projection, or of its first recurrence.
DEVICE u32* flags_of(const Params& p, int layer, int kind) {
    return p.progress + (layer * (1 + p.groups) + kind) * RANKS;
}

DEVICE long long gate_index(const Params& p, const Place& at, int step, int n) {       // n: entry of the whole batch
    return ((((long long)at.layer * p.steps + step) * RANKS + at.rank) * p.batch + n) * 32 + at.unit;
}

// ---- projection ------------------------------------------------------------------------------------------------------------------

// A tile of a small batch takes several time steps: column c is entry c % batch of step c / batch.
struct Tiling {
    int span, tiles, columns;
};
DEVICE Tiling tiling(const Params& p) {
    const int span = INPUT_TILES == 1 ? 8 / p.batch : 1;
    return {span, (p.steps + span - 1) / span, span * p.batch};
}
template <int CHUNKS> constexpr u32 PITCH_OF = CHUNKS * 64 + (CHUNKS % 2 ? 0 : 64);    // odd multiples of 64 bytes: no bank conflicts

// base: full barriers, then empty ones; the ring at base + 128.
template <int CHUNKS> DEVICE void project(const Params& p, const Place& at, u32 base) {
    constexpr u32 PITCH = PITCH_OF<CHUNKS>;
    uint4 w[2 * CHUNKS];
    load_weights<CHUNKS>(w, p, at);
    const float4 bias = __ldg(p.bias + at.layer * HIDDEN + at.rank * 32 + at.unit);
    grid_dependency_wait();
    const Tiling t = tiling(p);
    for (int tile = 0, stage = 0, parity = 0; tile < t.tiles; tile++) {
        barrier_wait(base + 8 * stage, parity);
        constexpr int PAIR = INPUT_TILES > 1 ? 2 : 1;
        #pragma unroll
        for (int i = 0; i < INPUT_TILES; i += PAIR) {
            float4 g[PAIR];
            multiply<CHUNKS, PAIR>(g, w, base + 128 + stage * INPUT_COLUMNS * PITCH, PITCH, 64, i, t.columns, at);
            #pragma unroll
            for (int k = 0; k < PAIR; k++) {
                const int column = (i + k) * 8 + at.quad * 2 + at.pick, step = tile * t.span + column / p.batch;
                if (column < t.columns && step < p.steps)
                    p.gates[gate_index(p, at, step, column % p.batch)] =
                        make_float4(g[k].x + bias.x, g[k].y + bias.y, g[k].z + bias.z, g[k].w + bias.w);
            }
        }
        leave_stage(base + 64 + 8 * stage, at.lane);
        named_barrier(1, COMPUTE + 32);            // all gates are stored: the publisher raises the flag
        if (++stage == INPUT_STAGES) stage = 0, parity ^= 1;
    }
}

template <int CHUNKS> DEVICE void fetch_inputs(const Params& p, const Place& at, u32 base) {
    constexpr u32 PITCH = PITCH_OF<CHUNKS>;
    grid_dependency_wait();
    const Tiling t = tiling(p);
    const int width = at.layer == 0 ? p.inputs : HIDDEN, own = threadIdx.x - COMPUTE - 32;
    const u16* input = at.layer == 0 ? p.input : p.hidden + (long long)(at.layer - 1) * p.steps * p.batch * HIDDEN;
    const u32* before = flags_of(p, at.layer - 1, 1);
    int known = at.layer == 0 ? p.steps : 0;       // steps that the previous layer has finished
    for (int tile = 0, stage = 0, parity = 1; tile < t.tiles; tile++) {
        if (tile >= INPUT_STAGES) barrier_wait(base + 64 + 8 * stage, parity);
        const int need = min(p.steps, (tile + 1) * t.span);
        for (int tries = 0; known < need; tries++) {
            u32 least = 0x7fffffffu;
            for (int i = at.lane; i < RANKS * p.groups; i += 32) least = min(least, load_acquire(before + i));
            known = int(__reduce_min_sync(0xffffffffu, least));
            spin_guard(tries);
        }
        __syncwarp();
        for (int i = own; i < t.columns * CHUNKS * 4; i += FETCHERS) {
            const int column = i / (CHUNKS * 4), k = i % (CHUNKS * 4) * 8, step = tile * t.span + column / p.batch;
            const int position = REVERSE ? p.steps - 1 - step : step;
            const bool inside = step < p.steps && k < width;
            const u16* from = input + ((long long)position * p.batch + column % p.batch) * width + k;
            copy_async(base + 128 + (stage * INPUT_COLUMNS + column) * PITCH + k * 2, inside ? from : input, inside ? 16 : 0);
        }
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(base + 8 * stage) : "memory");
        if (++stage == INPUT_STAGES) stage = 0, parity ^= 1;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

DEVICE void publish_projection(const Params& p, const Place& at) {
    grid_dependency_wait();
    const Tiling t = tiling(p);
    for (int tile = 0; tile < t.tiles; tile++) {
        named_barrier(1, COMPUTE + 32);
        if (at.lane == 0) store_release(at.flag, min(p.steps, (tile + 1) * t.span));
        __syncwarp();
    }
}

// ---- recurrence ------------------------------------------------------------------------------------------------------------------

// base: two barriers; at base + 128 two buffers of h, then two buffers of this block's own part of h.
DEVICE void recur(const Params& p, const Place& at, u32 base) {
    const u32 full = base, hidden = base + 128, staging = hidden + 2 * HIDDEN_BYTES;
    uint4 w[2 * RANKS];
    load_weights<RANKS>(w, p, at);
    grid_dependency_wait();
    const u32* flag = flags_of(p, at.layer, 0) + at.rank;
    const long long state = ((long long)at.layer * p.batch + at.first) * HIDDEN;       // offset of this cluster in the state arrays
    float c[TILES], h[TILES];
    #pragma unroll
    for (int i = 0; i < TILES; i++) {
        const int n = i * 8 + at.quad * 2 + at.pick;
        c[i] = h[i] = 0.0f;
        if (HAS_INITIAL && n < at.count) {
            const long long from = state + (long long)n * HIDDEN + at.rank * 32 + at.unit;
            h[i] = unpack1(p.initial_h[from]);
            if (CELL == 0) c[i] = unpack1(p.initial_c[from]);
        }
    }
    for (int i = threadIdx.x; i < RANKS * at.count * 4; i += COMPUTE) {
        const int quarter = i % 4, n = i / 4 % at.count, rank = i / 4 / at.count;
        uint4 v = make_uint4(0u, 0u, 0u, 0u);
        if (HAS_INITIAL) v = *reinterpret_cast<const uint4*>(p.initial_h + state + (long long)n * HIDDEN + rank * 32 + quarter * 8);
        shared_words_store(hidden + (rank * COLUMNS + n) * 64 + quarter * 16, v);
    }
    named_barrier(2, COMPUTE);

    u32 known = 0;
    float4 in[TILES];
    auto fetch = [&](int step) {                   // loads the projection's results for this warp's units
        if (known <= u32(step)) {
            for (int tries = 0; ; tries++) {
                u32 value = 0;
                if (at.lane == 0) value = load_acquire(flag);
                known = __shfl_sync(0xffffffffu, value, 0);
                if (known > u32(step)) break;
                spin_guard(tries);
            }
            __syncwarp();
        }
        #pragma unroll
        for (int i = 0; i < TILES; i++) {
            const int n = i * 8 + at.quad * 2 + at.pick;
            in[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (n < at.count) in[i] = __ldcg(p.gates + gate_index(p, at, step, at.first + n));
        }
    };
    fetch(0);
    for (int step = 0; step < p.steps; step++) {
        const int buffer = step & 1;
        const u32 own = staging + buffer * COLUMNS * 64;       // two buffers: a slow warp may still read the previous step's
        if (step > 0) {
            barrier_wait_cluster(full + 8 * buffer, ((step - 1) >> 1) & 1);
            if (threadIdx.x == 0 && step + 2 < p.steps) barrier_expect(full + 8 * buffer, RANKS * at.count * 64);
        }
        constexpr int PAIR = TILES > 1 ? 2 : 1;
        #pragma unroll
        for (int first = 0; first < TILES; first += PAIR) {
            float4 products[PAIR];
            multiply<RANKS, PAIR>(products, w, hidden + buffer * HIDDEN_BYTES, 64, COLUMNS * 64, first, at.count, at);
            #pragma unroll
            for (int k = 0; k < PAIR; k++) {
                const int i = first + k;
                if (i >= TILES) continue;
                const float4 g = products[k];
                if (CELL == 0) {
                    c[i] = sigmoid(in[i].z + g.z) * c[i] + sigmoid(in[i].x + g.x) * tangent(in[i].w + g.w);
                    h[i] = sigmoid(in[i].y + g.y) * tangent(c[i]);
                } else {
                    const float z = sigmoid(in[i].x + g.x), r = sigmoid(in[i].y + g.y);
                    const float candidate = tangent(in[i].z + r * (g.z + in[i].w));
                    h[i] = candidate + z * (h[i] - candidate);
                }
                const int n = i * 8 + at.quad * 2 + at.pick;
                if (n < at.count) shared_half(own + n * 64 + at.unit * 2, pack1(h[i]));
            }
        }
        meet_publisher(base, step);
        if (step + 1 < p.steps) {
            // Neighboring lanes send neighboring pieces to one peer; each rank starts with a different peer.
            const u32 target = hidden + (buffer ^ 1) * HIDDEN_BYTES + at.rank * COLUMNS * 64, pieces = at.count * 4;
            for (u32 i = threadIdx.x; i < pieces * RANKS; i += COMPUTE) {
                const u32 peer = (i / pieces + at.rank) % RANKS, piece = i % pieces;
                send(cluster_map(target + piece * 16, peer), cluster_map(full + 8 * (buffer ^ 1), peer), shared_words(own + piece * 16));
            }
            fetch(step + 1);
        }
    }
    #pragma unroll
    for (int i = 0; i < TILES; i++) {
        const int n = i * 8 + at.quad * 2 + at.pick;
        const long long to = state + (long long)n * HIDDEN + at.rank * 32 + at.unit;
        if (n < at.count) {
            p.final_h[to] = pack1(h[i]);
            if (CELL == 0) p.final_c[to] = pack1(c[i]);
        }
    }
}

DEVICE void publish_recurrence(const Params& p, const Place& at, u32 base) {
    const u32 staging = base + 128 + 2 * HIDDEN_BYTES;
    u16* output = at.layer + 1 == p.layers ? p.output : p.hidden + (long long)at.layer * p.steps * p.batch * HIDDEN;
    grid_dependency_wait();
    for (int step = 0; step < p.steps; step++) {
        meet_publisher(base, step);
        const int position = REVERSE ? p.steps - 1 - step : step;
        for (int i = at.lane; i < at.count * 4; i += 32)
            *reinterpret_cast<uint4*>(output + ((long long)position * p.batch + at.first + i / 4) * HIDDEN + at.rank * 32 + i % 4 * 8) =
                shared_words(staging + (step & 1) * COLUMNS * 64 + i * 16);
        __syncwarp();
        if (at.layer + 1 < p.layers && at.lane == 0) store_release(at.flag, step + 1);
        __syncwarp();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) rnn_sm90(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 shared[];
    grid_launch_dependents();
    // Clusters, layer by layer: the projection, then the recurrences of the batch's parts.
    Place at;
    const int cluster = blockIdx.x / RANKS;
    at.rank = blockIdx.x % RANKS;
    at.layer = cluster / (1 + p.groups);
    at.group = cluster % (1 + p.groups) - 1;
    at.kind = at.group >= 0;
    at.warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    at.lane = threadIdx.x % 32;
    at.row = at.lane / 4;
    at.quad = at.lane % 4;
    at.unit = at.warp % 8 * 4 + at.row % 4;
    at.pick = at.row / 4;
    at.first = at.kind ? at.group * COLUMNS : 0;
    at.count = min(COLUMNS, p.batch - at.first);
    at.flag = flags_of(p, at.layer, 0) + (at.group + 1) * RANKS + at.rank;
    const u32 base = smem_address(shared);
    if (threadIdx.x == 0) {
        if (at.kind) {
#ifdef RACECHECK
            barrier_init(base + 32, COMPUTE + 32);
#endif
            for (int i = 0; i < 2; i++) {
                barrier_init(base + 8 * i, 1);
                barrier_expect(base + 8 * i, RANKS * at.count * 64);
            }
        } else {
            for (int i = 0; i < INPUT_STAGES; i++) {
                barrier_init(base + 8 * i, FETCHERS);
                barrier_init(base + 64 + 8 * i, RING_ARRIVALS);
            }
        }
        barrier_init_fence();
    }
    __syncthreads();
    cluster_arrive_relaxed();
    cluster_wait();                                // the peers run and their barriers are initialized
    if (at.warp < COMPUTE / 32) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        if (at.kind)
            recur(p, at, base);
        else if (at.layer == 0)
            project<INPUT_CHUNKS>(p, at, base);
        else
            project<RANKS>(p, at, base);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        if (at.warp == COMPUTE / 32) {
            if (at.kind)
                publish_recurrence(p, at, base);
            else
                publish_projection(p, at);
        } else if (!at.kind) {
            if (at.layer == 0)
                fetch_inputs<INPUT_CHUNKS>(p, at, base);
            else
                fetch_inputs<RANKS>(p, at, base);
        }
    }
}

struct ResetParams {
    u32* progress;
    int count;
};

extern "C" __global__ void __launch_bounds__(256) rnn_reset(const ResetParams p) {
    grid_launch_dependents();
    grid_dependency_wait();
    for (int i = threadIdx.x; i < p.count; i += 256) p.progress[i] = 0;
}
