// A generated matrix product in tiles of true fp32 (see optdnn/kernels/gemm/tiles.py): what it builds on.
#include "general.cuh"
#include "generated.cuh"
