// What products of a few rows with a matrix (gemv.cu, gemv_staged.cu) read and write.
//
// generated.cuh defines RESULT_FLOAT (results and residuals are fp32).
#pragma once

#if RESULT_FLOAT
typedef float Result;
DEVICE float widen(float v) { return v; }
DEVICE Result narrow(float v) { return v; }
#else
typedef u16 Result;
DEVICE float widen(u16 v) { return unpack1(v); }
DEVICE Result narrow(float v) { return pack1(v); }
#endif

DEVICE void unpack(float (&x)[8], const uint4& v) {
    x[0] = low_float(v.x), x[1] = high_float(v.x), x[2] = low_float(v.y), x[3] = high_float(v.y);
    x[4] = low_float(v.z), x[5] = high_float(v.z), x[6] = low_float(v.w), x[7] = high_float(v.w);
}
