"""Memory on the GPU."""
