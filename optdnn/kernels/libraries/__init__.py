"""Calls of cuDNN and cuBLASLt."""
