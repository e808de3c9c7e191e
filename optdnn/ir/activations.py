"""Activations by their operators, the functions that render them in kernels, and which of them keep zeros.

Kernels read this without the graph, so it does not import networkx.
"""

from __future__ import annotations

from collections.abc import Sequence

from optdnn.runtime.cuda.compile import render

RENDERED: dict[str, tuple[str, ...]] = {
    "Relu": ("relu",),
    "Sigmoid": ("sigmoid",),
    "Tanh": ("tanh",),
    "HardSwish": ("hard_swish",),
    "Softplus": ("softplus",),
    "LeakyRelu": ("leaky_relu", "alpha"),
    "Elu": ("elu", "alpha"),
    "Swish": ("swish", "alpha"),
    "HardSigmoid": ("hard_sigmoid", "alpha", "beta"),
    "Selu": ("selu", "alpha", "gamma"),
    "Celu": ("celu", "alpha"),
    "Mish": ("mish",),
    "Softsign": ("softsign",),
    "Abs": ("abs",),
    "Sqrt": ("sqrt",),
    "Reciprocal": ("reciprocal",),
    "Sin": ("sin",),
    "Cos": ("cos",),
    "FakeQuantize": ("fake_quantize", "inverse", "low", "high", "scale"),
}
"""Activation -> its function in kernels, and the attributes that are its arguments."""
KEEP_ZEROS = frozenset({
    "Relu", "LeakyRelu", "Elu", "Selu", "Celu", "Swish", "Gelu", "Tanh", "Mish", "HardSwish", "Softsign", "FakeQuantize",
})  # fmt: skip
"""Activations of zero that are zero: they may follow the padding of a convolution."""
_ZERO_AT_ZERO = frozenset(
    {"gelu", "gelu_tanh", "silu", "square", *(RENDERED[kind][0] for kind in KEEP_ZEROS if kind in RENDERED)}
)


def keeps_zeros(stages: Sequence[render.Stage]) -> bool:
    """Whether stages of a kernel are activations of :data:`KEEP_ZEROS`, or squares."""
    return all(stage[0] in _ZERO_AT_ZERO for stage in stages)
