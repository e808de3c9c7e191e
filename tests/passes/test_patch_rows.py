"""patch_rows: convolutions of patches that do not overlap become products in the order that their readers want."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.dim import symbol
from optdnn.ir.graph import Graph
from optdnn.ops.binary import CastAttrs
from optdnn.ops.quant import IntegerConvAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.patch_rows import PatchEmbedding
from optdnn.passes.support.facts import channels_to_last
from optdnn.types import FP32


def embedding(
    *, channels: int = 3, size: Any = (8, 12), patch: Any = 4, flat: bool = True, bias: bool = True, batch: Any = 2,
    pads: int | Sequence[int] = 0, twice: bool = False, dtype: Any = np.float64,
) -> Graph:  # fmt: skip
    """A patch embedding of a ViT (``flat``) or of a Swin, of images or of videos."""
    n = Net(dtype)
    y = n.conv(n.input(batch, channels, *size), 6, patch, pads=pads, strides=patch, bias=bias)
    more = [n.op("Relu", y)] if twice else []
    if flat:
        y = n.op("Reshape", y, n.ints(0, 6, -1))
    z = n.op("Transpose", y, attrs=TransposeAttrs((0, 2, 1) if flat else channels_to_last(2 + len(size))))
    return n.done(z, *more)


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [(8, 12), (4, 8, 12)])
def test_patches_are_rows_of_a_product(size: tuple[int, ...], flat: bool, bias: bool) -> None:
    patch = (2, 4, 4)[-len(size) :]
    kinds = {"Reshape": 2, "Transpose": 1, "MatMul": 1} | ({"Add": 1} if bias else {})
    graph = embedding(size=size, patch=patch, flat=flat, bias=bias)
    check_pass(PatchEmbedding(), graph, changes=1, kinds=kinds)


def test_tubelets_are_copied_once() -> None:
    """The copy also converts the video."""
    found = kinds(
        check_simulated(embedding(size=(4, 8, 16), patch=(2, 4, 8), dtype=np.float32), "fp16", tolerance=1e-2)
    )
    assert found == ["Pointwise", "Conv", "Pointwise"]  # the last one converts the result


@pytest.mark.parametrize(
    ("size", "pads", "added"),
    [
        ((8, 12), 2, [0, 0, 2, 2, 0, 0, 2, 2]),
        ((9, 12), 2, [0, 0, 2, 2, 0, 0, 1, 2]),  # three windows down, which begin at -2
        (
            (10, 13),
            (1, 0, 0, 0),
            [0, 0, 1, 0, 0, 0, -3, -1],
        ),  # the last three rows and the last column are read by no window
    ],
)
def test_an_image_is_brought_to_whole_patches(
    size: tuple[int, int], pads: int | Sequence[int], added: list[int]
) -> None:
    kinds = {"Pad": 1, "Reshape": 2, "Transpose": 1, "MatMul": 1, "Add": 1}
    graph, _ = check_pass(PatchEmbedding(), embedding(size=size, pads=pads), changes=1, kinds=kinds)
    (pad,) = graph.of_kind("Pad")
    assert graph.constant_value(pad.input(1)).tolist() == added


@pytest.mark.parametrize(
    ("size", "pads", "cuts"),
    [((8, 13), 0, [(0, 12, 3)]), ((11, 13), 0, [(0, 8, 2), (0, 12, 3)]), ((13, 12), (-4, 0, 0, 0), [(4, 12, 2)])],
)
def test_an_image_that_is_only_cropped_is_sliced(
    size: tuple[int, int], pads: int | Sequence[int], cuts: list[tuple[int, int, int]]
) -> None:
    kinds = {"Slice": len(cuts), "Reshape": 2, "Transpose": 1, "MatMul": 1, "Add": 1}
    graph, _ = check_pass(PatchEmbedding(), embedding(size=size, pads=pads), changes=1, kinds=kinds)
    slices = [op for op in graph.order() if op.kind == "Slice"]
    assert [tuple(int(graph.constant_value(op.input(i))[0]) for i in (1, 2, 3)) for op in slices] == cuts


def test_a_symbolic_batch() -> None:
    check_pass(PatchEmbedding(), embedding(batch=symbol("N", 1)), changes=1, sizes={"N": 3})


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (embedding(size=(8, symbol("W", 4))), "not known to cover the image"),
        (embedding(channels=1, patch=2), "a patch has 4 elements"),
    ],
)
def test_refused(graph: Graph, reason: str) -> None:
    check_refused(PatchEmbedding(), graph, because=reason)


def test_others_are_no_candidates() -> None:
    check_untouched(PatchEmbedding(), embedding(twice=True))
    n = Net(np.float64)
    y = n.conv(n.input(2, 4, 8, 8), 6, 3, pads=1)
    check_untouched(PatchEmbedding(), n.done(n.op("Transpose", y, attrs=TransposeAttrs((0, 2, 3, 1)))))
    n = Net(np.float64)
    check_untouched(PatchEmbedding(), n.done(n.op("Relu", n.conv(n.input(2, 4, 8, 8), 6, 4, pads=0, strides=4))))


def cut(
    kernel: tuple[int, ...] = (2, 4, 4), *, batch: Any = 5, bias: bool = True, group: int = 1, pads: int = 0,
    size: tuple[int, ...] = (), rows: bool = True,
) -> Graph:  # fmt: skip
    """Patches that are cut already, of ``size`` (that of the filter), and their embedding."""
    n, shape = Net(np.float64), size or kernel
    channels = 3 * group
    x = n.input(batch, channels * int(np.prod(shape))) if rows else n.input(batch, channels, *shape)
    x = n.op("Reshape", x, n.ints(-1, channels, *shape)) if rows else n.op("Relu", x)
    y = n.conv(x, 8, kernel, pads=pads, strides=4, bias=bias, group=group)
    return n.done(n.op("Relu", y))


@pytest.mark.parametrize("kernel", [(2, 4, 4), (4, 4), (7,)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch", [5, symbol("N", 1)])
def test_patches_that_are_cut_already_are_rows(kernel: tuple[int, ...], bias: bool, batch: Any) -> None:
    kinds = {"Reshape": 3, "MatMul": 1, "Relu": 1} | ({"Add": 1} if bias else {})
    sizes = {} if isinstance(batch, int) else {"N": 3}
    check_pass(PatchEmbedding(), cut(kernel, bias=bias, batch=batch), changes=1, kinds=kinds, sizes=sizes)


@pytest.mark.parametrize(
    "graph",
    [cut(group=2), cut(pads=1), cut((4, 4), size=(4, 8)), cut(rows=False)],
    ids=["groups", "padded", "two windows", "images"],
)
def test_other_images_stay(graph: Graph) -> None:
    check_untouched(PatchEmbedding(), graph)


def integers(
    *, size: Any = (8, 12), patch: int = 4, channels: int = 3, pads: int = 0, batch: Any = 2, strides: int | None = None,
    group: int = 1, zeros: Any = None, cast: bool = False,
) -> Graph:  # fmt: skip
    """A dynamically quantized embedding, of data with a zero point. ``zeros``: the zero points of the weights; ``cast``: its sums
    become floats."""
    n = Net(np.float32)
    x = n.input(batch, channels * group, *size, name="x", dtype=np.uint8)
    w = np.random.default_rng(0).integers(-127, 128, (6, channels, patch, patch)).astype(np.int8)
    more = [] if zeros is None else [n.const(zeros, np.int8)]
    attrs = IntegerConvAttrs(strides=(strides or patch,) * 2, pads=(pads,) * 4, dilations=(1, 1), group=group)
    y = n.op("ConvInteger", x, n.const(w, np.int8), n.const(7, np.uint8), *more, attrs=attrs)
    return n.done(n.op("Cast", y, attrs=CastAttrs(FP32)) if cast else y)


@pytest.mark.parametrize("zeros", [None, 3, [3], [1, -2, 3, 0, 5, 6]], ids=["none", "scalar", "one", "each"])
@pytest.mark.parametrize("batch", [2, symbol("N", 1)])
def test_patches_of_integers(zeros: Any, batch: Any) -> None:
    kinds = {"Reshape": 2, "Transpose": 2, "MatMulInteger": 1}
    check_pass(PatchEmbedding(), integers(zeros=zeros, batch=batch), changes=1, kinds=kinds, sizes={"N": 3})


def test_their_cast_stays_next_to_the_sums() -> None:
    after, _ = check_pass(PatchEmbedding(), integers(cast=True), changes=1)
    (product,) = after.of_kind("MatMulInteger")
    assert [u.kind for u in after.users(product.value)] == ["Cast"]


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (integers(size=(8, 13)), "not known to cover the image"),
        (integers(size=(8, symbol("W", 4))), "not known to cover the image"),
        (integers(channels=1, patch=2), "a patch has 4 elements"),
    ],
)
def test_integers_that_are_refused(graph: Graph, reason: str) -> None:
    check_refused(PatchEmbedding(), graph, because=reason)


@pytest.mark.parametrize("options", [{"pads": 1}, {"strides": 2}, {"group": 2}, {"patch": 1}])
def test_other_integers_are_no_candidates(options: dict[str, Any]) -> None:
    check_untouched(PatchEmbedding(), integers(**options))
