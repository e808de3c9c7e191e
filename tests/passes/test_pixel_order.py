"""image_tokens: pixels in another order, as MobileViTV2 writes its patches, and norms of them."""

from __future__ import annotations

import pytest
from support.check import check_pass
from support.net import Net
from support.simulated import check_simulated

from optdnn.ir.graph import Value
from optdnn.ops.norm import GroupNormAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.image_tokens import ImageTokens

PASS = ImageTokens()


def unfolded(n: Net, x: Value, size: int = 8) -> Value:
    """MobileViTV2's patches of 2 x 2 pixels: an image (B, C, pixels of a patch, patches)."""
    b, c = (int(d) for d in n.dims(x)[:2])  # type: ignore[call-overload]
    half = size // 2
    y = n.op("Reshape", x, n.ints(b, c, half, 2, half, 2))
    y = n.op("Transpose", y, attrs=TransposeAttrs((0, 1, 3, 5, 2, 4)))
    made: Value = n.op("Reshape", y, n.ints(b, c, 4, half * half))
    return made


def folded(n: Net, x: Value, size: int = 8) -> Value:
    b, c = (int(d) for d in n.dims(x)[:2])  # type: ignore[call-overload]
    half = size // 2
    y = n.op("Reshape", x, n.ints(b, c, 2, 2, half, half))
    y = n.op("Transpose", y, attrs=TransposeAttrs((0, 1, 4, 2, 5, 3)))
    made: Value = n.op("Reshape", y, n.ints(b, c, size, size))
    return made


@pytest.mark.parametrize("batch", [1, 2])
def test_pixels_in_another_order(batch: int) -> None:
    n = Net()
    x = n.conv(n.input(batch, 8, 8, 8), 16)
    y = n.conv(folded(n, n.op("Relu", n.conv(unfolded(n, x), 16, 1, pads=0))), 8)
    result, _ = check_pass(PASS, n.done(y), changes=2, rules={"permuted_pixels": 2})
    assert result.kinds()["Transpose"] == 6


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_on_a_gpu_pixels_are_put_in_order_by_one_copy(precision: str) -> None:
    n = Net()
    y = unfolded(n, n.conv(n.input(1, 8, 8, 8), 16))
    scale, shift = n.positive(16), n.random(16)
    y = n.op("Add", y, n.conv(n.op("GroupNormalization", y, scale, shift, attrs=GroupNormAttrs(1)), 16, 1, pads=0))
    program = check_simulated(n.done(n.conv(folded(n, y), 8)), precision)
    kinds = [s.params["op"]["kind"] for s in program.steps]
    assert kinds.count("Copy") <= 2 + 2  # of the network's input and output, and both orders


def test_a_norm_of_many_axes_is_one_of_the_image() -> None:
    n = Net()
    x = n.op(
        "Transpose",
        n.op("Reshape", n.conv(n.input(2, 8, 8, 8), 16), n.ints(2, 16, 4, 2, 4, 2)),
        attrs=TransposeAttrs((0, 1, 3, 5, 2, 4)),
    )
    normed = n.op("GroupNormalization", x, n.positive(16), n.random(16), attrs=GroupNormAttrs(4))
    y = n.op("Reshape", normed, n.ints(2, 16, 4, 16))
    z = n.op("Add", n.conv(y, 16, 1, pads=0), n.op("Reshape", x, n.ints(2, 16, 4, 16)))
    result, _ = check_pass(PASS, n.done(n.conv(z, 8)), changes=2, rules={"norm_behind_views": 1, "permuted_pixels": 1})
    (norm,) = result.of_kind("GroupNormalization")
    assert norm.outputs[0].type.dims == (2, 16, 4, 16)


@pytest.mark.parametrize("form", ["channels move", "channels are split", "no image", "a sequence"])
def test_other_orders_stay(form: str) -> None:
    n = Net()
    if form == "no image":  # heads of attention
        y = folded(n, n.input(2, 4, 4, 16))
    elif form == "channels move":
        y = n.op("Reshape", n.conv(n.input(2, 8, 8, 8), 16), n.ints(2, 16, 4, 2, 8))
        y = n.op("Reshape", n.op("Transpose", y, attrs=TransposeAttrs((0, 2, 1, 3, 4))), n.ints(2, 4, 16, 16))
    elif form == "channels are split":
        y = n.op("Reshape", n.conv(n.input(2, 8, 8, 8), 16), n.ints(2, 4, 4, 8, 8))
        y = n.op("Reshape", n.op("Transpose", y, attrs=TransposeAttrs((0, 1, 2, 4, 3))), n.ints(2, 4, 4, 64))
    else:
        y = n.op("Reshape", n.conv(n.input(2, 8, 8, 8), 16), n.ints(2, 16, 4, 16))
        y = n.op("Reshape", n.op("Transpose", y, attrs=TransposeAttrs((0, 1, 3, 2))), n.ints(2, 16, 64))
    result = n.done(n.op("Exp", y))
    assert "permuted_pixels" not in {f.rule for f in PASS(result).fired}


@pytest.mark.parametrize("form", ["four axes", "other channels", "two readers"])
def test_norms_that_stay_before_views(form: str) -> None:
    n = Net()
    x = n.input(2, 16, 4, 16) if form == "four axes" else n.input(2, 16, 2, 2, 4, 4)
    y = n.op("GroupNormalization", x, n.positive(16), n.random(16), attrs=GroupNormAttrs(4))
    z = n.op("Reshape", y, n.ints(2, 32, 2, 16) if form == "other channels" else n.ints(2, 16, 8, 8))
    result = n.done(n.op("Exp", z), *([n.op("Relu", y)] if form == "two readers" else []))
    assert "norm_behind_views" not in {f.rule for f in PASS(result).fired}
