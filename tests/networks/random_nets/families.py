"""The table of families, and :func:`network`: one seed of a family gives one network."""

from __future__ import annotations

from collections.abc import Callable

import onnx

from random_nets import attention, control, convolution, dynamic, packed, quantized, recurrent, soup
from random_nets.draw import Draw, Network

FAMILIES: dict[str, Callable[[Draw], None]] = {
    "conv": convolution.draw,
    "attention": attention.draw,
    "recurrent": recurrent.draw,
    "soup": soup.draw,
    "quantized": quantized.draw,
    "control": control.draw,
    "dynamic": dynamic.draw,
    "packed": packed.draw,
}
NUMBER = {name: k + 1 for k, name in enumerate(FAMILIES)}


def network(family: str, seed: int) -> Network:
    """The network of this family and seed. ONNX's checker and its strict shape inference accept it."""
    d = Draw(seed * 16 + NUMBER[family], family)
    FAMILIES[family](d)
    model = d.model()
    onnx.checker.check_model(model, full_check=True)
    symbols = {n for f in d.inputs for n in f.value.dims if isinstance(n, str)}
    if symbols:
        sizes = tuple({"N": n, "S": s} for n, s in dynamic.SIZES)
        feeds = tuple(d.feeds(s, k) for k, s in enumerate(sizes))
        return Network(f"{family}-{seed}", model, feeds, tuple({k: s[k] for k in sorted(symbols)} for s in sizes))
    runs = max([len(f.turns) for f in d.inputs] or [0]) or 1
    return Network(f"{family}-{seed}", model, tuple(d.feeds({}, k) for k in range(runs)))
