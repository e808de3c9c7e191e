"""Import of the attributes that convolutions and pools have in common: strides, pads, dilations, auto_pad."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optdnn.dim import DimLike
from optdnn.errors import ShapeError
from optdnn.ops.checks import require_length
from optdnn.ops.exchange import NodeSpec
from optdnn.runtime.reference.window import resolve_pads


@dataclass(frozen=True)
class Window:
    """``pads`` are begins then ends; they apply only if ``auto_pad`` is "NOTSET"."""

    strides: tuple[int, ...]
    pads: tuple[int, ...]
    dilations: tuple[int, ...]
    auto_pad: str


def read_window(node: NodeSpec, rank: int, spatial: Sequence[DimLike] | None, kernel: Sequence[DimLike]) -> Window:
    """The window attributes of an ONNX node with its defaults filled in.

    ``rank`` is the number of spatial axes. SAME_UPPER and SAME_LOWER become explicit pads if sizes allow it, VALID always.
    Raises ShapeError for attributes of wrong length or value.
    """
    what = node.op_type
    strides = node.ints("strides") or (1,) * rank
    dilations = node.ints("dilations") or (1,) * rank
    pads = node.ints("pads") or (0,) * (2 * rank)
    auto_pad = str(node.get("auto_pad", "NOTSET")) or "NOTSET"
    require_length(strides, rank, f"{what} strides")
    require_length(dilations, rank, f"{what} dilations")
    require_length(pads, 2 * rank, f"{what} pads")
    if min(strides) < 1 or min(dilations) < 1:
        raise ShapeError(f"{what} strides {strides} and dilations {dilations} must be positive")
    if auto_pad not in ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"):
        raise ShapeError(f"{what} auto_pad is {auto_pad!r}; it must be NOTSET, VALID, SAME_UPPER or SAME_LOWER")
    if auto_pad == "NOTSET":
        return Window(strides, pads, dilations, auto_pad)
    zeros = (0,) * (2 * rank)
    if auto_pad == "VALID":
        return Window(strides, zeros, dilations, "NOTSET")
    resolved = resolve_pads(auto_pad, zeros, spatial, kernel, strides, dilations) if spatial is not None else None
    return Window(strides, resolved or zeros, dilations, "NOTSET" if resolved is not None else auto_pad)


def check_window(what: str, rank: int, strides: Sequence[int], pads: Sequence[int], dilations: Sequence[int]) -> None:
    """Raise ShapeError unless window attributes fit ``rank`` spatial axes."""
    require_length(strides, rank, f"{what} strides")
    require_length(dilations, rank, f"{what} dilations")
    require_length(pads, 2 * rank, f"{what} pads")
