// The prologue of the Hopper convolution, on pixels in shared memory: part of conv_sm90.cu.
#pragma once

#if PROLOGUE
#if GATE_ALONE
DEVICE u32 change_pair(u32 pair, const float2*, u32 gate) {        // the same bits: a product of two of them is exact in fp32
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

// Applies the prologue between the copy engine, which fills stages, and the warpgroups that multiply what is ``changed``. Each warp
// takes every CHANGERS-th fill, so several fills are in work at a time. A lane keeps to one group of eight channels of the swizzled rows.
//
// A wait names a phase by its parity alone, so a waiting warp must know that the phase before it has ended. Where the warps take turns
// at a stage, a warp has not seen the stage's last fill. Fills end in any order: this warp's last fill may have ended while that one
// is still on its way, and then the wait would return for the fill before both. So the warp first waits until the stage's last fill was
// changed. That wait is safe: its own last fill was issued after fill k - CHANGERS - STAGES was consumed, and so was all before it.
// tests/kernels/conv/test_barrier_protocol.py runs this protocol, with and without that wait.
constexpr int CHANGERS = STAGES < 4 ? STAGES : 4;
constexpr bool TURNS_AT_STAGES = STAGES % CHANGERS != 0;

DEVICE void change_pixels(const Params& p, u32 ring, u32 full, u32 changed, int first_tile, int tile_step, int sharer, int k_begin, int k_count, int warp,
                          int lane) {
    constexpr int CHUNKS = SPAN / 16, STEP = 32 / CHUNKS, ROWS = WGN * BN, EACH = (ROWS + STEP - 1) / STEP, BATCH = EACH < 4 ? EACH : 4;
    const int chunk = lane % CHUNKS, first_row = lane / CHUNKS, last_image = p.images - 1;
    int tile = first_tile, k = warp, stage = warp, parity = 0, wanted = 0, tile_channel, tile_pixel;
    float2 next[8];
    uint4 next_gate = make_uint4(0, 0, 0, 0), next_later = next_gate;
    auto settle = [&] {                            // k within a tile
        while (k >= k_count) k -= k_count, tile += tile_step;
        tile_at(p, tile, sharer, tile_channel, tile_pixel);
    };
    auto gate_at = [&](int image, int channel) {
        return channel < p.gate_channels ? *reinterpret_cast<const uint4*>(p.gate + (long long)image * p.gate_pitch + channel) : make_uint4(0, 0, 0, 0);
    };
    auto fetch = [&](bool with_gate) {
        const int channel = (k_begin + k) * BK + chunk * 8;
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const float4 v = __ldg(reinterpret_cast<const float4*>(p.before + channel) + i);
            next[2 * i] = make_float2(v.x, v.y), next[2 * i + 1] = make_float2(v.z, v.w);
        }
        if (GATED && with_gate) {
            wanted = min((tile_pixel + first_row) / p.image_pixels, last_image);
            next_gate = gate_at(wanted, channel), next_later = gate_at(min(wanted + 1, last_image), channel);
        }
    };
    settle();
    if (tile >= p.tiles) return;
    fetch(false);
    if (GATED) {                                   // the gate is another kernel's result
        grid_dependency_wait();
        fetch(true);
    }
    while (tile < p.tiles) {
        float2 c[8];
        #pragma unroll
        for (int i = 0; i < 8; i++) c[i] = next[i];
        uint4 gate = next_gate, later = next_later;        // of the row's image and of the one behind it
        int image = wanted, until = GATED ? (image + 1) * p.image_pixels - tile_pixel : 0;     // the first row of that one
        const int channel = (k_begin + k) * BK + chunk * 8;
        const u32 at = ring + stage * STAGE_BYTES;
        auto next_image = [&](int row) {
            gate = later, image = min(image + 1, last_image), until += p.image_pixels;
            if (row >= until && image < last_image) {      // images of a few pixels
                while (row >= until && image < last_image) image++, until += p.image_pixels;
                gate = gate_at(image, channel);
            }
            later = gate_at(min(image + 1, last_image), channel);
        };
        auto address = [&](int row) { return at + row * SPAN + ((chunk ^ (row / (128 / SPAN)) % CHUNKS) << 4); };
        k += CHANGERS;
        settle();
        if (tile < p.tiles) fetch(true);
        if (TURNS_AT_STAGES) barrier_wait(changed + 8 * stage, parity ^ 1);   // passes at once at a stage's first fill
        barrier_wait(full + 8 * stage, parity);
        for (int begin = first_row; begin < ROWS; begin += STEP * BATCH) {     // loads first: they are on their way together
            uint4 v[BATCH];
            #pragma unroll
            for (int i = 0; i < BATCH; i++)
                if (begin + i * STEP < ROWS) v[i] = shared_load16(address(begin + i * STEP));
            #pragma unroll
            for (int i = 0; i < BATCH; i++) {
                const int row = begin + i * STEP;
                if (row >= ROWS) continue;
                if (GATED && row >= until) next_image(row);
                v[i].x = change_pair(v[i].x, c, gate.x), v[i].y = change_pair(v[i].y, c + 2, gate.y);
                v[i].z = change_pair(v[i].z, c + 4, gate.z), v[i].w = change_pair(v[i].w, c + 6, gate.w);
            }
            #pragma unroll
            for (int i = 0; i < BATCH; i++)
                if (begin + i * STEP < ROWS) shared_store16(address(begin + i * STEP), v[i]);
        }
        async_proxy_fence();
        __syncwarp();
        if (lane == 0) barrier_arrive(changed + 8 * stage);
        for (stage += CHANGERS; stage >= STAGES; stage -= STAGES) parity ^= 1;
    }
}
#endif
