// Shared by the general kernels: element types, their conversion to and from the type of arithmetic, dependent launch.
//
// 16-bit floats are stored as structs of their bits and computed in float; every conversion to a narrower type rounds to nearest
// even, once. The kernels of this family run on every architecture from sm_80 on and read any strides.
#pragma once
#define DEVICE __device__ __forceinline__

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef short i16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;
typedef long long i64;

#include "machine.cuh"

// A divisor of numbers below 2^31, with the factor and the shift of its reciprocal (Granlund and Montgomery, 1994): a division by a number
// that the compiler does not know takes some twenty instructions.
struct Size { u32 size, factor, shift; };
DEVICE u32 operator/(u32 x, Size d) { return u32((u64(x) * d.factor) >> d.shift); }
DEVICE u32 operator%(u32 x, Size d) { return x - x / d * d.size; }
DEVICE u32& operator/=(u32& x, Size d) { return x = x / d; }

struct f16 { u16 bits; };
struct bf16 { u16 bits; };
struct boolean { u8 bits; };
struct e4m3 { u8 bits; };       // 8-bit floats without infinities, NaN is 0x7f; below: with IEEE's special values
struct e5m2 { u8 bits; };
struct i4 { u8 bits; };         // elements of less than a byte, each in the low bits of a byte
struct u4 { u8 bits; };
struct i2 { u8 bits; };
struct u2 { u8 bits; };
// Floats of 8 or fewer bits without infinities: MANTISSA bits after the point, the sign at bit SIGN. FNUZ formats have no negative zero: its
// code is NaN; the others have no NaN.
template <int MANTISSA, int BIAS, int SIGN, bool FNUZ> struct Tiny { u8 bits; };
typedef Tiny<3, 8, 7, true> e4m3fnuz;
typedef Tiny<2, 16, 7, true> e5m2fnuz;
typedef Tiny<3, 1, 5, false> e2m3;
typedef Tiny<2, 3, 5, false> e3m2;
typedef Tiny<1, 1, 3, false> e2m1;
struct e8m0 { u8 bits; };       // powers of two
typedef float f32;
typedef double f64;

// The type that an element type is computed in.
template <typename T> struct Arithmetic { typedef T type; };
template <> struct Arithmetic<f16> { typedef float type; };
template <> struct Arithmetic<bf16> { typedef float type; };
template <> struct Arithmetic<e4m3> { typedef float type; };
template <> struct Arithmetic<e5m2> { typedef float type; };
template <> struct Arithmetic<boolean> { typedef bool type; };
template <> struct Arithmetic<i4> { typedef int type; };
template <> struct Arithmetic<u4> { typedef int type; };
template <> struct Arithmetic<i2> { typedef int type; };
template <> struct Arithmetic<u2> { typedef int type; };
template <int M, int B, int S, bool F> struct Arithmetic<Tiny<M, B, S, F>> { typedef float type; };
template <> struct Arithmetic<e8m0> { typedef float type; };

DEVICE float widen(f16 v) { return half_to_float(v.bits); }
DEVICE float widen(bf16 v) { return __uint_as_float(u32(v.bits) << 16); }
DEVICE float widen(e5m2 v) { return half_to_float(u16(v.bits << 8)); }
DEVICE float widen(e4m3 v) {
    const u32 sign = u32(v.bits & 0x80) << 24, exponent = (v.bits >> 3) & 15, mantissa = v.bits & 7;
    if (exponent == 15 && mantissa == 7) return __uint_as_float(0x7fc00000u);
    if (exponent) return __uint_as_float(sign | ((exponent + 120) << 23) | (mantissa << 20));
    return (sign ? -1.0f : 1.0f) * float(mantissa) * 0.001953125f;     // in units of 2^-9
}
DEVICE int widen(i4 v) { return int((v.bits & 15) ^ 8) - 8; }
DEVICE int widen(u4 v) { return v.bits & 15; }
DEVICE int widen(i2 v) { return int((v.bits & 3) ^ 2) - 2; }
DEVICE int widen(u2 v) { return v.bits & 3; }
template <int M, int B, int S, bool F> DEVICE float widen(Tiny<M, B, S, F> v) {
    const u32 code = v.bits & ((1u << S) - 1), exponent = code >> M, mantissa = code & ((1u << M) - 1);
    const u32 sign = (u32(v.bits) >> S & 1u) << 31;
    if (F && sign && code == 0) return __uint_as_float(0x7fc00000u);
    if (exponent) return __uint_as_float(sign | ((exponent + 127 - B) << 23) | (mantissa << (23 - M)));
    const float least = __uint_as_float(u32(128 - B - M) << 23);      // 2 ^ (1 - B - M)
    return (sign ? -least : least) * float(mantissa);
}
DEVICE float widen(e8m0 v) { return __uint_as_float(v.bits == 255 ? 0x7fc00000u : v.bits ? u32(v.bits) << 23 : 0x400000u); }
DEVICE bool widen(boolean v) { return v.bits != 0; }
template <typename T> DEVICE T widen(T v) { return v; }

// Conversions as ONNX's Cast: floats to integers truncate, anything to bool compares with zero.
template <typename T> struct Narrow {
    template <typename S> DEVICE static T from(S v) { return T(v); }
};
template <> struct Narrow<f16> {
    DEVICE static f16 from(float v) { f16 out; out.bits = float_to_half(v); return out; }
    DEVICE static f16 from(double v) { f16 out; out.bits = double_to_half(v); return out; }
    template <typename S> DEVICE static f16 from(S v) { return from(double(v)); }
};
template <> struct Narrow<bf16> {
    DEVICE static bf16 from(float v) { bf16 out; out.bits = float_to_bfloat(v); return out; }
    DEVICE static bf16 from(double v) {     // through a float rounded to odd, so that the value is effectively rounded once
        float f = __double2float_rz(v);
        if (double(f) != v && f == f) f = __uint_as_float(__float_as_uint(f) | 1u);
        return from(f);
    }
    template <typename S> DEVICE static bf16 from(S v) { return from(double(v)); }
};
// Rounds a double to odd. Rounding this float again gives the same result as rounding the double once.
DEVICE float rounded_to_odd(double v) {
    const float f = __double2float_rz(v);
    return double(f) != v && f == f ? __uint_as_float(__float_as_uint(f) | 1u) : f;
}
// Rounds a float to 8 bits with MANTISSA bits after the point, to nearest even; values above the largest give OVERFLOWN.
template <int MANTISSA, int BIAS, u32 LARGEST, u32 OVERFLOWN, u32 NAN8> DEVICE u8 float_to_8(float v) {
    const u32 bits = __float_as_uint(v), sign = (bits >> 24) & 0x80u, rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) return u8(sign | NAN8);
    if (rest == 0x7f800000u) return u8(sign | OVERFLOWN);
    const int exponent = int(rest >> 23) - 127, least = 1 - BIAS;
    const int shift = 23 - MANTISSA + (exponent < least ? least - exponent : 0);
    if (shift > 25) return u8(sign);
    const u32 mantissa = (rest & 0x7fffffu) | 0x800000u;
    u32 code = (mantissa + ((1u << (shift - 1)) - 1) + ((mantissa >> shift) & 1u)) >> shift;
    if (exponent >= least) code += u32(exponent + BIAS - 1) << MANTISSA;
    return u8(sign | (code > LARGEST ? OVERFLOWN : code));
}
template <> struct Narrow<e4m3> {
    DEVICE static e4m3 from(float v) { e4m3 out; out.bits = float_to_8<3, 7, 0x7e, 0x7f, 0x7f>(v); return out; }
    DEVICE static e4m3 from(double v) { return from(rounded_to_odd(v)); }
    template <typename S> DEVICE static e4m3 from(S v) { return from(double(v)); }
};
template <> struct Narrow<e5m2> {
    DEVICE static e5m2 from(float v) { e5m2 out; out.bits = float_to_8<2, 15, 0x7b, 0x7c, 0x7e>(v); return out; }
    DEVICE static e5m2 from(double v) { return from(rounded_to_odd(v)); }
    template <typename S> DEVICE static e5m2 from(S v) { return from(double(v)); }
};
template <int M, int B, int S, bool F> struct Narrow<Tiny<M, B, S, F>> {
    DEVICE static Tiny<M, B, S, F> from(float v) {
        const u32 sign = __float_as_uint(v) >> 31, top = (1u << S) - 1;
        const u32 code = float_to_8<M, B, (1u << S) - 1, F ? 0x80u : (1u << S) - 1, F ? 0x80u : 0u>(fabsf(v));
        Tiny<M, B, S, F> out;
        if (F) out.bits = u8(code > top || code == 0 ? code : sign << S | code);
        else out.bits = u8((v != v ? sign ^ 1u : sign) << S | code);     // NaN becomes a zero
        return out;
    }
    DEVICE static Tiny<M, B, S, F> from(double v) { return from(rounded_to_odd(v)); }
    template <typename V> DEVICE static Tiny<M, B, S, F> from(V v) { return from(double(v)); }
};
template <> struct Narrow<i4> {
    template <typename S> DEVICE static i4 from(S v) { i4 out; out.bits = u8(i64(v) & 15); return out; }
};
template <> struct Narrow<u4> {
    template <typename S> DEVICE static u4 from(S v) { u4 out; out.bits = u8(i64(v) & 15); return out; }
};
template <> struct Narrow<i2> {
    template <typename S> DEVICE static i2 from(S v) { i2 out; out.bits = u8(i64(v) & 3); return out; }
};
template <> struct Narrow<u2> {
    template <typename S> DEVICE static u2 from(S v) { u2 out; out.bits = u8(i64(v) & 3); return out; }
};
template <> struct Narrow<boolean> {
    template <typename S> DEVICE static boolean from(S v) { boolean out; out.bits = v != S(0); return out; }
};
template <typename T, typename S> DEVICE T narrow(S v) { return Narrow<T>::from(v); }

template <int BYTES> struct Word;
template <> struct Word<1> { typedef u8 type; };
template <> struct Word<2> { typedef u16 type; };
template <> struct Word<4> { typedef u32 type; };
template <> struct Word<8> { typedef uint2 type; };
template <> struct Word<16> { typedef uint4 type; };

// COUNT consecutive elements as one access (COUNT * sizeof(T) bytes, aligned to that size).
template <typename T, int COUNT> struct Pack {
    union { typename Word<sizeof(T) * COUNT>::type word; T lane[COUNT]; };
    DEVICE Pack() {}
    DEVICE explicit Pack(const T* p) : word(*reinterpret_cast<const typename Word<sizeof(T) * COUNT>::type*>(p)) {}
    DEVICE void store(T* p) const { *reinterpret_cast<typename Word<sizeof(T) * COUNT>::type*>(p) = word; }
};

// Integer power by squaring, which wraps like multiplication: pow() on doubles may be off by one.
template <typename T, typename E> DEVICE T integer_power(T base, E exponent) {
    if (exponent < E(0)) return base == T(1) ? T(1) : base == T(-1) ? (exponent & 1 ? T(-1) : T(1)) : T(0);
    u64 result = 1, factor = u64(base);
    for (u64 rest = u64(exponent); rest; rest >>= 1, factor *= factor)
        if (rest & 1) result *= factor;
    return T(result);
}
template <typename T> DEVICE T integer_power(T base, float exponent) { return T(pow(double(base), double(exponent))); }
template <typename T> DEVICE T integer_power(T base, double exponent) { return T(pow(double(base), exponent)); }

// The remainder with the divisor's sign, as in Python and NumPy: exact, also for infinities and zeros.
template <typename T> DEVICE T floor_mod(T a, T b) {
    const T r = fmod(a, b);
    if (r == 0) return copysign(T(0), b);
    return (r < 0) != (b < 0) ? r + b : r;
}
DEVICE bool is_nan(float v) { return v != v; }
// NumPy's (and ONNX's) maximum and minimum: a NaN wins.
DEVICE float max_nan(float a, float b) { return a > b || is_nan(a) ? a : b; }
DEVICE float min_nan(float a, float b) { return a < b || is_nan(a) ? a : b; }
DEVICE double max_nan(double a, double b) { return a > b || a != a ? a : b; }
DEVICE double min_nan(double a, double b) { return a < b || a != a ? a : b; }
template <typename T> DEVICE T max_nan(T a, T b) { return a > b ? a : b; }
template <typename T> DEVICE T min_nan(T a, T b) { return a < b ? a : b; }
// Adds to a value that other threads may add to as well.
DEVICE void add_to(double* at, double v) { atomicAdd(at, v); }

// ---- 8-bit integers and floats, without the slow conversions ---------------------------------------------------------------

// A byte in the low mantissa of 2^23 makes a float.
DEVICE float byte_to_float(i8 v) { return __uint_as_float(0x4b000000u + (u32(v) + 128u & 255u)) - 8388736.0f; }
DEVICE float byte_to_float(u8 v) { return __uint_as_float(0x4b000000u + v) - 8388608.0f; }

// a / b, rounded to nearest even like the division itself: two correction steps from the product with the reciprocal, which is computed once
// for many divisions by one value. Quotients beyond 1e30 or of subnormal values may be off; they saturate or vanish.
DEVICE float quotient(float a, float b) {
    const float r = 1.0f / b, q = a * r;
    const float nearer = fmaf(fmaf(-q, b, a), r, q);
    return fabsf(q) < 1e30f ? fmaf(fmaf(-nearer, b, a), r, nearer) : q;
}

// Rounded half to even, shifted by a zero point, bounded: an 8-bit integer's low byte. A NaN gives the lower bound.
DEVICE u32 quantized(float v, float zero, float low, float high) {
    return __float_as_uint(fminf(fmaxf(v, low - zero), high - zero) + 12582912.0f) + int(zero);
}
