// A kernel that is generated as a whole (see optdnn/tactics/cuda): general.cuh is what it builds on.
#include "general.cuh"
#include "generated.cuh"
