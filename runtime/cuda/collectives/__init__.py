"""Collectives of several GPUs: NCCL, and kernels over the memory of peers."""
