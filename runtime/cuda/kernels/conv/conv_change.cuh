// The prologue of the Hopper convolution, on pixels in shared memory: part of conv_sm90.cu.
#pragma once

#if PROLOGUE
#if GATE_ALONE
DEVICE u32 change_pair(u32 pair, const float2*, u32 gate) {        // bit-identical to fp32: a product of two such values is exact there
    u32 product;
#if defined(DTYPE_BF16)
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(gate));
#else
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(gate));
#endif
    return product;
}
#else
DEVICE u32 change_pair(u32 pair, const float2* c, u32 gate) {
    return pack2(prologue(low_float(pair), c[0], low_float(gate)), prologue(high_float(pair), c[1], high_float(gate)));
}
#endif

// Applies the prologue between the copy engine, which fills stages, and the warpgroups, which multiply stages that are ``changed``. Each
// warp takes every CHANGERS-th fill, so several fills are processed at a time. A lane keeps to one group of eight channels of the
// swizzled rows.
//
// A wait names a phase by its parity alone, so a waiting warp must know that the phase before it has ended. Where the warps take turns
// at a stage, a warp has not seen the stage's last fill. Fills end in any order: this warp's last fill may have ended while the stage's
// last fill is still in flight, and then the wait would return for the fill before both. So the warp first waits until the stage's last
// fill has been changed. That wait is safe: the warp's own last fill was issued after fill k - CHANGERS - STAGES and all earlier fills
// were consumed. tests/kernels/conv/test_barrier_protocol.py runs this protocol, with and without that wait.
constexpr int CHANGERS = STAGES < 4 ? STAGES : 4;
constexpr bool TURNS_AT_STAGES = STAGES % CHANGERS != 0;

constexpr int CHUNKS = SPAN / 16, CHANGED_STEP = 32 / CHUNKS, CHANGED_ROWS = WGN * BN;        // a lane's rows until the swizzle repeats
constexpr int PHASES = CHANGED_STEP < 8 ? 8 / CHANGED_STEP : 1;                                // rows of a lane after which the swizzle repeats

struct Fill {                                      // a fill of a warp, with its tile's first pixel and that pixel's image
    int tile, k, pixel, image;
};

DEVICE void move_on(const Params& p, Fill& fill, int fills, int tile_step, int k_count, int sharer, bool first = false) {
    const int before = fill.tile;
    for (fill.k += fills; fill.k >= k_count; fill.k -= k_count) fill.tile += tile_step;
    if (fill.tile >= p.tiles || (!first && fill.tile == before)) return;
    int channel;
    tile_at(p, fill.tile, sharer, channel, fill.pixel);
    fill.image = GATED ? min(fill.pixel / p.image_pixels, p.images - 1) : 0;
}

struct Factors {                                   // of eight channels, for the pixels of a fill
    uint4 gate, later, third;                      // of the tile's first image and of the next two
    float2 constants[8];
    int image, until, channel;                     // the first image, and the first row after it
};

DEVICE uint4 gate_at(const Params& p, int image, int channel) {
    return channel < p.gate_channels ? *reinterpret_cast<const uint4*>(p.gate + (long long)image * p.gate_pitch + channel) : make_uint4(0, 0, 0, 0);
}

DEVICE void fetch_constants(const Params& p, Factors& f) {
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        const float4 v = __ldg(reinterpret_cast<const float4*>(p.before + f.channel) + i);
        f.constants[2 * i] = make_float2(v.x, v.y), f.constants[2 * i + 1] = make_float2(v.z, v.w);
    }
}

DEVICE void fetch_gates(const Params& p, const Fill& fill, Factors& f) {
    f.image = fill.image, f.until = GATED ? (fill.image + 1) * p.image_pixels - fill.pixel : CHANGED_ROWS;
    if (!GATED) return;
    f.gate = f.later = gate_at(p, f.image, f.channel);
    if (f.until < CHANGED_ROWS) f.later = gate_at(p, min(f.image + 1, p.images - 1), f.channel);
    f.third = f.later;
    if (f.until + p.image_pixels < CHANGED_ROWS) f.third = gate_at(p, min(f.image + 2, p.images - 1), f.channel);
}

// Changes the lane's vectors of a fill; ``gate_of``: the gate of a row. All loads come first, so that they are in flight together. The
// loop is not unrolled: blocks with few fills run it once or twice, and would wait for instruction fetches.
template <class GateOf>
DEVICE void change_rows(u32 at, const u32 (&offset)[PHASES], int first_row, const float2* constants, GateOf gate_of) {
    constexpr int EACH = (CHANGED_ROWS + CHANGED_STEP - 1) / CHANGED_STEP, BATCH = EACH < 4 ? EACH : 4;
    constexpr bool WHOLE = CHANGED_ROWS % CHANGED_STEP == 0;
    static_assert(EACH <= BATCH || BATCH % PHASES == 0, "a batch begins with the first phase of the swizzle");
    #pragma unroll 1
    for (int begin = 0; begin < EACH; begin += BATCH, at += BATCH * CHANGED_STEP * SPAN) {
        uint4 v[BATCH];
        auto is_one = [&](int i) { return (EACH % BATCH == 0 || begin + i < EACH) && (WHOLE || first_row + (begin + i) * CHANGED_STEP < CHANGED_ROWS); };
        auto address = [&](int i) { return at + offset[i % PHASES] + i * CHANGED_STEP * SPAN; };
        #pragma unroll
        for (int i = 0; i < BATCH; i++)
            if (is_one(i)) v[i] = shared_load16(address(i));
        #pragma unroll
        for (int i = 0; i < BATCH; i++) {
            if (!is_one(i)) continue;
            const uint4 gate = gate_of(first_row + (begin + i) * CHANGED_STEP);
            v[i].x = change_pair(v[i].x, constants, gate.x), v[i].y = change_pair(v[i].y, constants + 2, gate.y);
            v[i].z = change_pair(v[i].z, constants + 4, gate.z), v[i].w = change_pair(v[i].w, constants + 6, gate.w);
        }
        #pragma unroll
        for (int i = 0; i < BATCH; i++)
            if (is_one(i)) shared_store16(address(i), v[i]);
    }
}

DEVICE void change_fill(const Params& p, u32 at, const u32 (&offset)[PHASES], int first_row, const Factors& f) {
    const int last_image = p.images - 1;
    uint4 gate = f.gate, later = f.later;
    int image = f.image, until = f.until;
    if (!GATED || until >= CHANGED_ROWS) {
        change_rows(at, offset, first_row, f.constants, [&](int) { return gate; });
    } else if (until + p.image_pixels >= CHANGED_ROWS || image + 1 >= last_image) {            // rows of two images
        change_rows(at, offset, first_row, f.constants, [&](int row) {
            const bool own = row < until;
            return make_uint4(own ? gate.x : later.x, own ? gate.y : later.y, own ? gate.z : later.z, own ? gate.w : later.w);
        });
    } else if (until + 2 * p.image_pixels >= CHANGED_ROWS || image + 2 >= last_image) {        // rows of three images (of 7 by 7 pixels)
        const int second = until + p.image_pixels;
        const uint4 third = f.third;
        change_rows(at, offset, first_row, f.constants, [&](int row) {
            const bool own = row < until, next = row < second;
            return make_uint4(own ? gate.x : next ? later.x : third.x, own ? gate.y : next ? later.y : third.y,
                              own ? gate.z : next ? later.z : third.z, own ? gate.w : next ? later.w : third.w);
        });
    } else {
        change_rows(at, offset, first_row, f.constants, [&](int row) {
            if (row < until) return gate;
            gate = later, image = min(image + 1, last_image), until += p.image_pixels;
            if (row >= until && image < last_image) {      // images of a few pixels
                while (row >= until && image < last_image) image++, until += p.image_pixels;
                gate = gate_at(p, image, f.channel);
            }
            later = gate_at(p, min(image + 1, last_image), f.channel);
            return gate;
        });
    }
}

DEVICE void change_pixels(const Params& p, u32 ring, u32 full, u32 changed, int first_tile, int tile_step, int sharer, int k_begin, int k_count, int warp,
                          int lane) {
    const int chunk = lane % CHUNKS, first_row = lane / CHUNKS;
    Fill ahead = {first_tile, 0, 0, 0};
    move_on(p, ahead, warp, tile_step, k_count, sharer, true);
    if (ahead.tile >= p.tiles) return;
    Factors next;
    next.channel = (k_begin + ahead.k) * BK + chunk * 8;
    if (!GATE_ALONE) fetch_constants(p, next);
    if (GATED) grid_dependency_wait();             // another kernel writes the gate
    fetch_gates(p, ahead, next);
    u32 offset[PHASES];                            // offsets of a lane's first rows within a stage
    #pragma unroll
    for (int i = 0; i < PHASES; i++) offset[i] = first_row * SPAN + ((chunk ^ ((first_row + i * CHANGED_STEP) / (128 / SPAN)) % CHUNKS) << 4);
    int stage = warp, parity = 0;
    for (bool more = true; more;) {
        const Factors now = next;
        move_on(p, ahead, CHANGERS, tile_step, k_count, sharer);
        more = ahead.tile < p.tiles;
        if (more) {
            next.channel = (k_begin + ahead.k) * BK + chunk * 8;
            if (!GATE_ALONE) fetch_constants(p, next);
            fetch_gates(p, ahead, next);
        }
        if (TURNS_AT_STAGES) barrier_wait(changed + 8 * stage, parity ^ 1);   // returns at once at a stage's first fill
        barrier_wait(full + 8 * stage, parity);
        change_fill(p, ring + stage * STAGE_BYTES, offset, first_row, now);
        async_proxy_fence();
        __syncwarp();
        if (lane == 0) barrier_arrive(changed + 8 * stage);
        for (stage += CHANGERS; stage >= STAGES; stage -= STAGES) parity ^= 1;
    }
}
#endif
