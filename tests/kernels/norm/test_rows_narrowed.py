"""Norms of fp32 rows that store fp16, alone or beside fp32: products in tf32 read the fp16 rows."""

from __future__ import annotations

import pytest
from support.net import Net
from support.on_gpu import checked_launches
from support.simulated import check_simulated, lowered, refusals, tactics

from optdnn.ir.graph import Graph
from optdnn.ops.binary import CastAttrs
from optdnn.ops.norm import LayerNormAttrs
from optdnn.types import FP16

KINDS = ("LayerNormalization", "RMSNormalization")


def layer(kind: str, *, added: bool, read: bool, width: int = 96) -> Graph:
    """A norm (of a sum, if it is ``added``) and a product of its rows. ``read``: the norm's result is also added to the product's."""
    n = Net()
    x = n.input(2, 12, width)
    x = n.op("Add", x, n.input(2, 12, width, name="y")) if added else x
    shift = [n.random(width)] if kind == "LayerNormalization" else []
    y = n.op(kind, x, n.positive(width), *shift, attrs=LayerNormAttrs(-1, 1e-3))
    z = n.op("MatMul", y, n.random(width, width, scale=0.2))
    return n.done(n.op("Add", z, y) if read else z, *([x] if added else []))


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_one_launch(kind: str, added: bool, read: bool) -> None:
    program = check_simulated(layer(kind, added=added, read=read), "tf32")
    assert tactics(program, "Add" if added else kind)[0] == ("add_norm_narrowed" if added else "rows_narrowed")
    assert len(program.steps) == 2


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("added", [False, True])
def test_other_precisions_convert_nothing(precision: str, added: bool) -> None:
    program = lowered(layer(KINDS[0], added=added, read=False), precision)
    name, what = ("add_norm_narrowed", "normalized sum") if added else ("rows_narrowed", "result")
    assert any(f"converts {'the' if added else 'its'} {what} to fp16" in r for r in refusals(program, name))


@pytest.mark.hopper
@pytest.mark.parametrize("width", [96, 768, 1032])
@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu(kind: str, added: bool, read: bool, width: int) -> None:
    checked_launches(layer(kind, added=added, read=read, width=width), "tf32", 2e-3)


def activated(width: int = 96) -> Graph:
    """A norm, an activation, and the conversion of its result."""
    n = Net()
    y = n.op("Gelu", n.op("LayerNormalization", n.input(2, 12, width), n.positive(width), n.random(width)))
    return n.done(n.op("Cast", y, attrs=CastAttrs(FP16)))


def modulated(width: int = 96, *, activation: bool = False) -> Graph:
    """A norm with a factor and a shift for each image, and the conversion of its result."""
    n = Net()
    y = n.op("LayerNormalization", n.input(2, 12, width), n.positive(width), n.random(width))
    y = n.op("Add", n.op("Mul", y, n.op("Add", n.input(2, 1, width, name="f"), 1.0)), n.input(2, 1, width, name="s"))
    return n.done(n.op("Cast", n.op("Gelu", y) if activation else y, attrs=CastAttrs(FP16)))


NARROWED = {"activated": activated, "modulated": modulated, "both": lambda width=96: modulated(width, activation=True)}
TACTICS = {"activated": "rows_activated", "modulated": "rows_modulated", "both": "rows_modulated"}


@pytest.mark.parametrize("name", NARROWED)
def test_stages_before_the_conversion(name: str) -> None:
    program = check_simulated(NARROWED[name](), "fp32", tolerance=2e-3)
    assert len(program.steps) == 1
    assert TACTICS[name] in tactics(program)


@pytest.mark.parametrize("name", NARROWED)
def test_rows_of_fp16_that_would_have_gaps_are_converted_apart(name: str) -> None:
    program = check_simulated(NARROWED[name](100), "fp32", tolerance=2e-3)
    assert "rows of 100 numbers of fp16 are not a multiple of 16 bytes" in refusals(program, TACTICS[name])


@pytest.mark.hopper
@pytest.mark.parametrize("width", [96, 768, 1032])
@pytest.mark.parametrize("name", NARROWED)
def test_stages_before_the_conversion_on_a_gpu(name: str, width: int) -> None:
    checked_launches(NARROWED[name](width), "fp32", 2e-3)


def twice(kind: str, *, read: bool) -> Graph:
    """Two norms, one after the other, and a product of the second one's rows. ``read``: they are also added to the product's."""
    n = Net()
    x = n.op("LayerNormalization", n.input(2, 12, 96), n.positive(96), n.random(96), attrs=LayerNormAttrs(-1, 1e-3))
    shift = [n.random(96)] if kind == "LayerNormalization" else []
    y = n.op(kind, x, n.positive(96), *shift, attrs=LayerNormAttrs(-1, 1e-3))
    z = n.op("Add", n.op("MatMul", y, n.random(96, 96, scale=0.2)), x)
    return n.done(z, *([n.op("Erf", y)] if read else []))


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_of_a_norm(kind: str, read: bool) -> None:
    """The norm of a model's embeddings, and the first norm of its first layer (CLIP)."""
    program = check_simulated(twice(kind, read=read), "tf32")
    assert tactics(program, "LayerNormalization")[0] == "norm_norm_narrowed"
    assert len(program.steps) == 2 + read


def test_a_norm_of_a_norm_in_fp32_converts_nothing() -> None:
    program = lowered(twice(KINDS[0], read=False), "fp32")
    assert any("converts the second result to fp16" in r for r in refusals(program, "norm_norm_narrowed"))


@pytest.mark.hopper
@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_of_a_norm_on_a_gpu(kind: str, read: bool) -> None:
    checked_launches(twice(kind, read=read), "tf32", 2e-3)
