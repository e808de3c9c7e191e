// The base of a generated matrix product in tiles on tensor cores (see optdnn/kernels/gemm/tiles.py).
#include "general.cuh"
#include "generated.cuh"
