// The functions of C's math.h. C++'s own header, <cmath>, takes longer to load than most kernels take to compile, precompiled or not.
#pragma once
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS            // math.h itself, not the one of libstdc++ that includes <cmath>
#include <math.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS
