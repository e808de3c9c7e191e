"""C++ of the activation functions of recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping

from optdnn.ir.graph import Op
from optdnn.kernels.pointwise.expressions import EXPRESSIONS, literal
from optdnn.ops.rnn import RNNAttrs


def per_direction(op: Op) -> int:
    """Number of activations of a direction."""
    return len(op.attrs.activations) // int(op.outputs[0].type.static_shape[1])


def activation(a: RNNAttrs, index: int, gate: bool, x: str, t: str, texts: Mapping[str, str]) -> str:
    """C++ of activation function number ``index`` of ``x``, in arithmetic of type ``t``.

    ``gate``: clip its argument if the layer clips. ``texts``: function -> C++ with ``{x}`` that replaces the exact function.
    """
    name, alpha, beta = a.activations[index], a.alphas[index], a.betas[index]
    if a.clip is not None and gate:
        x = f"min_nan(max_nan({x}, {literal(-a.clip, t)}), {literal(a.clip, t)})"
    if name in texts:
        return texts[name].format(x=x)
    if name == "Affine":
        return f"({literal(alpha, t)} * ({x}) + {literal(beta, t)})"
    if name == "ScaledTanh":
        return f"({literal(alpha, t)} * tanh({literal(beta, t)} * ({x})))"
    return EXPRESSIONS[name]([f"({x})"], {"alpha": alpha, "beta": beta}, t, t)
