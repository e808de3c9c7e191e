// A generated matrix product in tiles on tensor cores (see optdnn/kernels/gemm/tiles.py): what it builds on.
#include "general.cuh"
#include "generated.cuh"
