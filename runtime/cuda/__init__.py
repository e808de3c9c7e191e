"""The CUDA runtime: NVRTC, driver launches, CUDA graphs, and the kernels' own planning. Imports no CUDA package by itself."""
