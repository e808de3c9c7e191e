// The base of a kernel whose body is generated (see optdnn/kernels/launch.py): general.cuh has its building blocks.
#include "general.cuh"
#include "generated.cuh"
