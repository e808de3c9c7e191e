"""Kernel sources and their compilation by NVRTC."""
