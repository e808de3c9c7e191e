"""Runs programs for GPUs in NumPy: the same steps, arena, offsets, strides and precisions; needs no GPU library."""
