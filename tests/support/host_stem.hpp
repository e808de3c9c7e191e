// The instructions of stem_instructions.cuh on a processor (host_warps.hpp). Copies land at once.
static void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const float (&c)[4]) {
    float sum[4] = {c[0], c[1], c[2], c[3]};
    multiply(sum, a, b0, b1);
    memcpy(d, sum, sizeof d);
}
static void load_matrices(u32 address, u32 (&a)[2], u32 (&b)[2]) { ldmatrix_x4(address, a[0], a[1], b[0], b[1]); }
static void load_matrices(u32 address, u32 (&a)[2]) {
    u32 unused[2];
    ldmatrix_x4(address, a[0], a[1], unused[0], unused[1]);
}
static u32 pack_results(float low, float high) {
    return FINAL_RELU ? pack2(max_or_nan(low, 0.0f), max_or_nan(high, 0.0f)) : pack2(low, high);
}
template <int BYTES> static void copy_async(u32 to, const void* from) { memcpy(memory + to, from, BYTES); }
static void copies_landed() {}
static void store_zeros(u32 to, int bytes) { memset(memory + to, 0, bytes); }
static u32 larger(u32 a, u32 b) {
    return pack2(max_or_nan(low_float(a), low_float(b)), max_or_nan(high_float(a), high_float(b)));
}
