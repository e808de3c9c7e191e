// Element: f32 where generated.cuh defines WIDE as 1, bf16 where it defines BFLOAT as 1, else f16.
#pragma once
#include "general.cuh"
#include "generated.cuh"

#if WIDE
typedef f32 Element;
#elif BFLOAT
typedef bf16 Element;
#else
typedef f16 Element;
#endif
