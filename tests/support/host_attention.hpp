// The products of attention_parts_sm90.cu on a processor. Operands in shared memory have rows of SPAN bytes, swizzled.
static float swizzled_half(u32 at) {
    u16 bits;
    memcpy(&bits, memory + (at ^ (at >> 7 & (SPAN / 16 - 1)) << 4), 2);
    return unpack1(bits);
}
static u32 address_of(u64 descriptor) { return u32(descriptor & 0x3fff) << 4; }
static unsigned lane_row(int i) { return threadIdx.x % 32 / 4 + i / 2 % 2 * 8; }          // of accumulator i, in the warp's 16 rows
static unsigned lane_column(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }
template <int N, class Left, class Right> static void sum_products(float (&d)[N], int accumulate, const Left& left, const Right& right) {
    for (int i = 0; i < N; i++) {
        float total = 0;
        for (unsigned k = 0; k < 16; k++) total += left(lane_row(i), k) * right(lane_column(i), k);
        d[i] = (accumulate ? d[i] : 0) + total;
    }
}
static float in_registers(unsigned row, unsigned k) {
    const u32 pair = shown(row % 8 * 4 + k % 8 / 2)[row / 8 + k / 8 * 2];
    return k % 2 ? high_float(pair) : low_float(pair);
}
// Queries in registers or in shared memory, keys K-major.
template <int N> static void wgmma_kept(float (&d)[N], const u32 (&a)[4], u64 b, int accumulate) {
    show(a, 4);
    sum_products(d, accumulate, in_registers, [&](unsigned key, unsigned k) { return swizzled_half(address_of(b) + key * SPAN + k * 2); });
}
template <int N> static void wgmma_scores(float (&d)[N], u64 a, u64 b, int accumulate) {
    const unsigned first = threadIdx.x / 32 % 4 * 16;
    sum_products(d, accumulate, [&](unsigned row, unsigned k) { return swizzled_half(address_of(a) + (first + row) * SPAN + k * 2); },
                 [&](unsigned key, unsigned k) { return swizzled_half(address_of(b) + key * SPAN + k * 2); });
}
// Weights in registers, values MN-major: their rows are keys, and SPAN bytes of features are a subtile.
template <int N> static void wgmma_features(float (&d)[N], const u32 (&a)[4], u64 b, int accumulate) {
    show(a, 4);
    sum_products(d, accumulate, in_registers, [&](unsigned feature, unsigned key) {
        return swizzled_half(address_of(b) + feature * 2 / SPAN * (BLOCK_KEYS * SPAN) + key * SPAN + feature * 2 % SPAN);
    });
}
