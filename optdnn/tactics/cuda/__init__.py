"""Tactics of the target `cuda`: one file per family of kernels. Each turns operators into launches, as data; none needs a GPU."""
