// The base of a generated matrix product in tiles of true fp32 (see optdnn/kernels/gemm/tiles.py).
#include "general.cuh"
#include "generated.cuh"
