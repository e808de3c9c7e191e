"""Kernel families of the cuda target, one folder each: problem, configurations, cost, launch."""
