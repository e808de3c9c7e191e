"""A generator of random networks, and the runner that compares optdnn with ONNX Runtime on them.

- ``draw``: the builder that draws nodes, constants and inputs from one seed; ``families`` is the table of kinds of network.
- ``oracle``: what ONNX Runtime computes without optimizations, and the same in float64.
- ``judge``: whether a result is right, given how much the network magnifies rounding.
- ``targets``: builds a network by optdnn and runs it; ``trial`` joins all of this for one seed.
- ``pool``: worker processes with a time limit; ``shrink`` makes a failing network small.
"""
