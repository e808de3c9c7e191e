"""Small graphs of attention, recurrent layers and group norms, which tests run in ``simulate`` and on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Value
from optdnn.ops.attention import AttentionAttrs
from optdnn.ops.index import ConcatAttrs, SplitAttrs
from optdnn.ops.norm import EpsilonAttrs, GroupNormAttrs, LayerNormAttrs
from optdnn.ops.rnn import GRUAttrs, LSTMAttrs, RNNAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.ops.unary import AlphaAttrs
from support.net import Net


def heads(n: Net, x: Value, count: int, size: int) -> Value:
    """(B, L, C) projected to (B, H, L, D)."""
    batch, length, _ = n.dims(x)
    split = n.op("Reshape", n.matmul(x, count * size), n.ints(batch, length, count, size))  # type: ignore[arg-type]
    return n.op("Transpose", split, attrs=TransposeAttrs((0, 2, 1, 3)))


def merged(n: Net, y: Value) -> Value:
    """(B, H, L, D) to (B, L, H * D)."""
    batch, count, length, size = n.dims(y)
    back = n.op("Transpose", y, attrs=TransposeAttrs((0, 2, 1, 3)))
    return n.op("Reshape", back, n.ints(batch, length, count * size))  # type: ignore[arg-type, operator]


def attention(
    *, batch: int = 2, length: int = 20, keys: int = 0, count: int = 4, shared: int = 0, size: int = 32, mask: str = "",
    past: int = 0, lengths: bool = False, sinks: bool = False, outputs: int = 1, value_size: int = 0, **attrs: Any,
) -> Graph:  # fmt: skip
    """Self-attention, or with ``keys`` cross-attention, between projections. ``mask``: "row" (B, 1, 1, S), "full" (1, H, L, S),
    "bool" (B, 1, L, S), "short" (L, S - 3), "windows" (B, H, L, S) of two that repeat."""
    n = Net()
    x = n.input(batch, length, 48)
    y = x if not keys else n.input(batch, keys, 40, name="y")
    total = (keys or length) + past
    q = heads(n, x, count, size)
    k, v = heads(n, y, shared or count, size), heads(n, y, shared or count, value_size or size)
    operands: list[Any] = [q, k, v, None, None, None, None, None]
    if mask == "row":
        operands[3] = n.op("Mul", n.op("Abs", n.input(batch, 1, 1, total, name="mask")), -1.5)
    elif mask == "full":
        operands[3] = n.random(1, count, length, total)
    elif mask == "short":
        operands[3] = n.random(length, total - 3)
    elif mask == "windows":
        operands[3] = n.const(np.tile(n.rng.standard_normal((2, count, length, total)), (batch // 2, 1, 1, 1)))
    elif mask == "bool":
        operands[3] = n.op("Greater", n.input(batch, 1, length, total, name="mask"), -0.5)
    if past:
        operands[4] = n.input(batch, shared or count, past, size, name="past_key")
        operands[5] = n.input(batch, shared or count, past, value_size or size, name="past_value")
    if lengths:
        operands[6] = n.op(
            "Add", n.input(batch, name="lengths", dtype=np.int64), n.const([length - 3] * batch, np.int64)
        )
    if sinks:
        operands[7] = n.const(n.rng.standard_normal(count) + 2)
    while operands[-1] is None:
        operands.pop()
    made = n.op("Attention", *operands, attrs=AttentionAttrs(**attrs), outputs=outputs)
    results = made if outputs > 1 else [made]
    return n.done(n.matmul(merged(n, results[0]), 24), *results[1:])


def attention_of_image(
    *,
    size: tuple[int, int] = (14, 14),
    batch: int = 3,
    count: int = 2,
    readers: int = 1,
    turn: bool = False,
    features: int = 16,
) -> Graph:
    """Attention between positions of images, as SAM has it: a bias of relative rows and one of relative columns.

    With as many features as rows and columns, ``position_features`` makes features of the bias."""
    n = Net()
    h, w = size
    x = n.input(batch, h * w, 48)
    q, k, v = (heads(n, x, count, features) for _ in range(3))
    place = n.op("Reshape", q, n.ints(batch * count, h, w, features))
    factors = []
    for axis, size_along in ((1, h), (2, w)):
        order = (1, 0, 2, 3) if axis == 1 else (2, 0, 1, 3)
        turned = n.op("Transpose", place, attrs=TransposeAttrs(order))
        rows = n.op("Reshape", turned, n.ints(size_along, batch * count * h * w // size_along, features))
        product = n.op("MatMul", rows, n.random(size_along, features, size_along, scale=features**-0.5))
        others = [batch * count, w if axis == 1 else h]
        back = n.op("Reshape", product, n.ints(size_along, *others, size_along))
        back = n.op("Transpose", back, attrs=TransposeAttrs((1, 0, 2, 3) if axis == 1 else (1, 2, 0, 3)))
        factors.append(n.op("Unsqueeze", back, n.ints(4 if axis == 1 else 3)))
    total = n.op("Add", *(factors[::-1] if turn else factors))
    bias = n.op("Reshape", total, n.ints(batch, count, h * w, h * w))
    y = n.op("Attention", q, k, v, bias)
    return n.done(n.matmul(merged(n, y), 24), *(n.op("Relu", total) for _ in range(readers - 1)))


def windows_between(units: int = 3, length: int = 16, count: int = 2, size: int = 32) -> Graph:
    """Attention within windows, as in Hiera: the axis of windows is between tokens and heads."""
    n = Net()
    width, tokens = count * size, units * length
    rows = n.matmul(n.input(1, tokens, 24), 3 * width)
    parts = n.op("Reshape", rows, n.ints(length, units, 3, count, size))
    parts = n.op("Transpose", parts, attrs=TransposeAttrs((2, 3, 1, 0, 4)))
    q, k, v = (n.op("Squeeze", p, n.ints(0)) for p in n.op("Split", parts, attrs=SplitAttrs(0, 3), outputs=3))
    y = n.op("Reshape", n.op("Attention", q, k, v), n.ints(1, count, units, length, size))
    y = n.op("Transpose", y, attrs=TransposeAttrs((0, 3, 2, 1, 4)))
    return n.done(n.matmul(n.op("Reshape", y, n.ints(1, tokens, width)), 40))


ATTENTION: dict[str, tuple[Callable[[], Graph], str]] = {
    "plain": (attention, "attention_sm90"),
    "long": (lambda: attention(length=150, size=64, count=2), "attention_sm90"),
    "odd head": (lambda: attention(size=40), "attention_sm90"),
    "grouped": (lambda: attention(count=8, shared=2, size=16), "attention_sm90"),
    "cross": (lambda: attention(keys=33), "attention_sm90"),
    "few queries, many keys": (lambda: attention(length=9, keys=1100, size=64), "attention_sm90"),
    "scaled": (lambda: attention(scale=0.3), "attention_sm90"),
    "causal": (lambda: attention(is_causal=True, length=70), "attention_sm90"),
    "windows between tokens and heads": (windows_between, "attention_sm90"),
    "row mask": (lambda: attention(mask="row"), "attention_sm90"),
    "full mask": (lambda: attention(mask="full", length=21), "attention_sm90"),
    "tiled mask": (lambda: attention(mask="full", length=204, size=64), "attention_sm90"),
    "window masks": (lambda: attention(mask="windows", batch=6, length=24), "attention_sm90"),
    "bool mask": (lambda: attention(mask="bool"), "attention_sm90"),
    "past": (lambda: attention(past=8, outputs=3), "attention_sm90"),
    "causal past": (lambda: attention(past=8, is_causal=True, length=16), "attention_sm90"),
    "lengths": (lambda: attention(lengths=True), "attention_sm90"),
    "image": (attention_of_image, "attention_factors_sm90"),
    "image, columns first": (lambda: attention_of_image(size=(6, 20), batch=1, turn=True), "attention_factors_sm90"),
    "image, rows of a tile": (lambda: attention_of_image(size=(5, 64), batch=2), "attention_factors_sm90"),
    "image, odd rows": (lambda: attention_of_image(size=(14, 7)), "attention_sm90"),
    "image, wide": (lambda: attention_of_image(features=32), "attention_sm90"),
    "image, bias read again": (lambda: attention_of_image(readers=2), "attention_sm90"),
    "softcap": (lambda: attention(softcap=2.0, mask="full"), "attention_sm90"),
    "window": (lambda: attention(left_window_size=3, right_window_size=2), "attention_sm90"),
    "causal lengths": (lambda: attention(lengths=True, is_causal=True, left_window_size=9), "attention_sm90"),
    "short mask": (lambda: attention(mask="short"), "attention_sm90"),
    "weights": (lambda: attention(outputs=4, mask="bool", qk_matmul_output_mode=3), "attention_steps"),
    "raw scores": (lambda: attention(outputs=4, count=4, shared=2, softcap=1.0), "attention_steps"),
    "wide values": (lambda: attention(value_size=24, size=16), "attention_sm90"),
    "wide heads": (lambda: attention(size=136, count=2), "attention_sm90"),
    "widest heads": (lambda: attention(size=512, count=1), "attention_sm80"),
    "heads of 264": (lambda: attention(size=264, count=1, mask="full", softcap=3.0), "attention_sm80"),
    "wider heads": (lambda: attention(size=520, count=1), "attention_steps"),
    "right window": (lambda: attention(right_window_size=2), "attention_sm90"),
    "left window": (lambda: attention(left_window_size=4, length=40), "attention_sm90"),
    "causal window of the past": (
        lambda: attention(past=8, is_causal=True, length=16, left_window_size=5),
        "attention_sm90",
    ),
    "sinks": (lambda: attention(sinks=True), "attention_sm90"),
    "sinks and a window": (
        lambda: attention(sinks=True, is_causal=True, left_window_size=7, count=8, shared=2, length=40),
        "attention_sm90",
    ),
    "sinks and masks": (lambda: attention(sinks=True, mask="windows", batch=6, length=24), "attention_sm90"),
    "sinks of wide heads": (lambda: attention(sinks=True, size=136, count=2), "attention_sm90"),
    "sinks, lengths": (lambda: attention(sinks=True, lengths=True, is_causal=True), "attention_sm90"),
    "sinks, weights": (
        lambda: attention(sinks=True, outputs=4, count=4, shared=2, qk_matmul_output_mode=3),
        "attention_steps",
    ),
    "short mask, lengths": (lambda: attention(mask="short", lengths=True), "attention_steps"),
}
"""Name -> a function that builds the graph, and the tactic that runs it in half precision on Hopper."""


def recurrent(
    cell: str, *, layers: int = 1, steps: int = 6, batch: int = 3, inputs: int = 40, hidden: int = 64, direction: str = "forward",
    initial: bool = False, lengths: bool = False, peepholes: bool = False, bias: bool = True, computed: bool = False,
    skips: bool = False, **attrs: Any,
) -> Graph:  # fmt: skip
    """Stacked recurrent layers as PyTorch's exporter writes them. ``computed``: the recurrent weights are no constants. ``skips``:
    the outputs of all layers are joined, and those of the first layer are an output of the network."""
    n = Net()
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[cell]
    x = n.input(steps, batch, inputs)
    count = 2 if direction == "bidirectional" else 1
    kinds = 2 if cell == "LSTM" else 1
    finals, outputs = list[Value](), list[Value]()
    for layer in range(layers):
        width = n.dims(x)[2]
        assert isinstance(width, int)
        scale = 1 / math.sqrt(hidden)
        operands: list[Any] = [
            x, n.random(count, gates * hidden, width, scale=scale), n.random(count, gates * hidden, hidden, scale=scale),
            n.random(count, 2 * gates * hidden, scale=0.5) if bias else None,
        ]  # fmt: skip
        lens = (
            n.op("Add", n.input(batch, name=f"lens{layer}", dtype=np.int32), n.const([steps - 3] * batch, np.int32))
            if lengths
            else None
        )
        operands.append(lens)
        operands += [n.input(count, batch, hidden, name=f"s{layer}{k}") if initial else None for k in range(kinds)]
        if peepholes:
            operands.append(n.random(count, 3 * hidden, scale=0.3))
        while operands[-1] is None:
            operands.pop()
        if computed:
            operands[2] = n.op("Mul", n.input(count, gates * hidden, hidden, name=f"weights{layer}"), n.const(scale))
        names = {"RNN": RNNAttrs, "GRU": GRUAttrs, "LSTM": LSTMAttrs}
        usual = names[cell](hidden)
        own = attrs.get("activations", usual.activations)
        numbers = {k: attrs.get(k, (0.0,) * len(own)) for k in ("alphas", "betas")}
        rest = {k: v for k, v in attrs.items() if k not in ("activations", "alphas", "betas")}
        made = names[cell](hidden, direction, own * count, numbers["alphas"] * count, numbers["betas"] * count, **rest)
        y, *last = n.op(cell, *operands, attrs=made, outputs=1 + kinds)
        finals += last
        if count == 1:
            x = n.op("Squeeze", y, n.ints(1))
        else:
            swapped = n.op("Transpose", y, attrs=TransposeAttrs((0, 2, 1, 3)))
            x = n.op("Reshape", swapped, n.ints(steps, batch, count * hidden))
        outputs.append(x)
    if skips:
        x = n.op("Relu", n.op("Concat", *outputs, attrs=ConcatAttrs(2)))
        finals.append(outputs[0])
    return n.done(x, *finals)


LBR: dict[str, Any] = {"linear_before_reset": True}
WIDE: dict[str, Any] = {"hidden": 192, "steps": 16}
SMALL: dict[str, Callable[..., Graph]] = {
    "rnn": partial(recurrent, "RNN", direction="bidirectional"),
    "rnn relu": partial(recurrent, "RNN", activations=("Relu",), clip=0.9, lengths=True),
    "gru other": partial(recurrent, "GRU", initial=True),
    "gru lengths": partial(recurrent, "GRU", lengths=True, direction="bidirectional", **LBR),
    "lstm peepholes": partial(recurrent, "LSTM", initial=True, peepholes=True, lengths=True, direction="reverse"),
    "lstm functions": partial(
        recurrent, "LSTM", activations=("HardSigmoid", "ScaledTanh", "Affine"), alphas=(0.3, 1.2, 0.8),
        betas=(0.4, 0.7, 0.1), clip=2.0,
    ),
    "lstm coupled": partial(recurrent, "LSTM", input_forget=True, hidden=33),
    "lstm wide batch": partial(recurrent, "LSTM", batch=40, steps=3),
}  # fmt: skip
"""Recurrent layers with all operands and attributes that ONNX allows."""
SIZES: dict[str, Callable[..., Graph]] = {
    "lstm of 48 both": partial(recurrent, "LSTM", hidden=48, steps=16, batch=16, direction="bidirectional"),
    "lstm of 7": partial(recurrent, "LSTM", hidden=7, batch=5, lengths=True, direction="reverse"),
    "lstm of 100": partial(recurrent, "LSTM", hidden=100, steps=5),
    "gru of 300": partial(recurrent, "GRU", hidden=300, batch=9, steps=4, initial=True, lengths=True),
    "rnn of 500": partial(recurrent, "RNN", hidden=500, batch=33, steps=4, direction="bidirectional"),
}
"""Layers with sizes that no other fast kernel takes. In the larger ones, blocks share the units."""
RECURRENT: dict[str, tuple[Callable[[], Graph], str]] = {
    "lstm": (lambda: recurrent("LSTM", **WIDE), "rnn_sm90"),
    "lstm stacked": (lambda: recurrent("LSTM", layers=3), "rnn_sm90"),
    "lstm initial": (lambda: recurrent("LSTM", initial=True, batch=9, **WIDE), "rnn_sm90"),
    "lstm stacked initial": (lambda: recurrent("LSTM", initial=True, layers=2), "rnn_sm90"),
    "lstm reverse": (lambda: recurrent("LSTM", direction="reverse", **WIDE), "rnn_sm90"),
    "lstm both": (lambda: recurrent("LSTM", direction="bidirectional", initial=True, layers=2, **WIDE), "rnn_sm90"),
    "lstm without bias": (lambda: recurrent("LSTM", bias=False, **WIDE), "rnn_sm90"),
    "lstm of 13 inputs": (lambda: recurrent("LSTM", **{**WIDE, "inputs": 13}), "rnn_sm90"),
    "lstm of 60 inputs both": (
        lambda: recurrent("LSTM", direction="bidirectional", **{**WIDE, "inputs": 60}),
        "rnn_sm90",
    ),
    "gru": (lambda: recurrent("GRU", **WIDE, **LBR), "rnn_sm90"),
    "gru stacked": (lambda: recurrent("GRU", layers=2, inputs=32, **LBR), "rnn_sm90"),
    "gru both": (lambda: recurrent("GRU", direction="bidirectional", **WIDE, **LBR), "rnn_sm90"),
    "gru with skips": (lambda: recurrent("GRU", layers=3, initial=True, skips=True, **LBR), "rnn_sm90"),
    "lstm with skips": (lambda: recurrent("LSTM", layers=2, inputs=13, skips=True), "rnn_sm90"),
    **{name: (make, "rnn_resident") for name, make in SMALL.items()},
    **{f"{name}, computed": (partial(make, computed=True), "rnn") for name, make in SMALL.items()},
    **{name: (make, "rnn_resident") for name, make in SIZES.items()},
    "grid rnn both": (lambda: recurrent("RNN", hidden=256, activations=("Relu",), batch=2, direction="bidirectional"), "rnn_grid"),
    "grid rnn": (lambda: recurrent("RNN", hidden=512, batch=9, inputs=44, initial=True, direction="reverse"), "rnn_grid"),
    "grid lstm": (lambda: recurrent("LSTM", hidden=256, batch=40, steps=5, initial=True, direction="bidirectional"), "rnn_grid"),
    "grid gru": (lambda: recurrent("GRU", hidden=768, steps=4, bias=False, **LBR), "rnn_grid"),
}  # fmt: skip
"""Name -> a function that builds the graph, and the tactic that runs it in half precision on Hopper."""


def group_norm(
    kind: str = "GroupNormalization", channels: int = 32, groups: int = 4, size: tuple[int, ...] = (10, 9), then: str = "",
    **more: Any,
) -> Graph:  # fmt: skip
    """A normalization between channels-last convolutions. ``then``: the kind of an activation after it."""
    n = Net()
    x = n.conv(n.input(2, 8, *size), channels, 3)
    attrs = GroupNormAttrs(groups, 1e-3) if kind == "GroupNormalization" else EpsilonAttrs(1e-3)
    y = n.op(kind, x, n.positive(channels), n.random(channels), attrs=attrs)
    if then:
        y = n.op(then, y, **more)
    return n.done(n.conv(y, 8, 3))


def group_norm_of_sum(
    kind: str = "GroupNormalization",
    *,
    each: bool = True,
    size: tuple[int, ...] = (10, 9),
    part: bool = False,
    then: str = "Swish",
) -> Graph:
    """A normalization of a sum of images and a vector of channels. ``each``: one vector per image, else one for all. ``part``:
    the images are also a part of a concatenation."""
    n = Net()
    x = n.conv(n.input(2, 8, *size), 32, 3)
    time = n.input(2 if each else 1, 16, name="time")
    both = n.op("Split", n.matmul(time, 64), attrs=SplitAttrs(axis=1, num_outputs=2), outputs=2)
    vectors = n.op("Reshape", both[1], n.ints(2 if each else 1, 32, *(1 for _ in size)))
    attrs = GroupNormAttrs(4, 1e-3) if kind == "GroupNormalization" else EpsilonAttrs(1e-3)
    y = n.op(kind, n.op("Add", x, vectors), n.positive(32), n.random(32), attrs=attrs)
    if then:
        y = n.op(then, y)
    results = [n.conv(y, 8, 3), n.matmul(both[0], 4)]
    if part:
        results.append(
            n.conv(n.op("Concat", x, n.conv(n.input(2, 8, *size, name="z"), 16, 3), attrs=ConcatAttrs(1)), 8, 3)
        )
    return n.done(*results)


def plain_norm(
    kind: str, shape: tuple[int, ...], groups: int = 1, *, axis: int = -1, then: str = "", bias: bool = True
) -> Graph:
    """A normalization of an input in ONNX's order."""
    n = Net()
    x = n.input(*shape)
    own = shape[axis:] if kind == "LayerNormalization" else shape[1:2]
    attrs: Any = {
        "LayerNormalization": LayerNormAttrs(axis, 1e-3), "GroupNormalization": GroupNormAttrs(groups, 1e-3),
    }.get(kind, EpsilonAttrs(1e-3))  # fmt: skip
    y = n.op(kind, x, n.positive(*own), *([n.random(*own)] if bias else []), attrs=attrs)
    return n.done(n.op(then, y) if then else y)


GROUP_NORM: dict[str, tuple[Callable[[], Graph], str]] = {
    "groups": (group_norm, "group_norm"),
    "instances": (lambda: group_norm("InstanceNormalization"), "group_norm"),
    "odd groups": (lambda: group_norm(channels=24, groups=2), "group_norm"),
    "odd channels": (lambda: group_norm(channels=12, groups=3), "rows"),
    "groups, relu": (lambda: group_norm(then="Relu"), "group_norm"),
    "groups of a large image, swish": (
        lambda: group_norm(size=(160, 220), then="Swish", attrs=AlphaAttrs(1.0)),
        "group_norm",
    ),
    "groups of images and vectors": (group_norm_of_sum, "add_group_norm"),
    "instances of images and a vector": (
        lambda: group_norm_of_sum("InstanceNormalization", each=False, then=""),
        "add_group_norm",
    ),
    "groups of large images and vectors": (lambda: group_norm_of_sum(size=(160, 220)), "add_group_norm"),
    "groups of parts and vectors": (lambda: group_norm_of_sum(part=True), "add_group_norm"),
    "groups of large parts and vectors": (lambda: group_norm_of_sum(part=True, size=(160, 220)), "add_group_norm"),
    "groups in plain order": (lambda: plain_norm("GroupNormalization", (2, 12, 10, 8), 3, then="Sigmoid"), "row_tiles"),
    "instances in plain order": (lambda: plain_norm("InstanceNormalization", (3, 5, 7, 9)), "row_tiles"),
    "long rows in plain order": (lambda: plain_norm("GroupNormalization", (2, 8, 200, 200), 2), "row_tiles"),
}


def residual(norm: str = "LayerNormalization", width: int = 48) -> Graph:
    """A sum that is normalized, and has another reader."""
    n = Net()
    x = n.op("Softmax", n.matmul(n.input(2, 6, 32), width))
    total = n.op("Add", x, n.op("Softmax", n.input(2, 6, width, name="r")))
    y = n.op(norm, total, n.positive(width), *([n.random(width)] if norm == "LayerNormalization" else []))
    return n.done(n.matmul(y, 8), n.matmul(total, 8))


def normalized_residual(
    norm: str = "LayerNormalization", width: int = 48, *, turn: bool = False, before: bool = False
) -> Graph:
    """A sum with normalized rows, as in Swin V2. ``before``: the normalized value is also a sum."""
    n = Net()
    other = n.op("Softmax", n.input(2, 6, width, name="r"))
    x = n.matmul(n.input(2, 6, 32), width)
    x = n.op("Add", n.op("Softmax", x), other) if before else x
    y = n.op(norm, x, n.positive(width), *([n.random(width)] if norm == "LayerNormalization" else []))
    total = n.op("Add", *((other, y) if turn else (y, other)))
    return n.done(n.matmul(total, 8), n.op("Softmax", total))


def sandwich(first: str = "RMSNormalization", second: str = "RMSNormalization", width: int = 48) -> Graph:
    """Rows of products that are normalized, added to others and normalized again: Gemma 2, GLM-4."""
    n = Net()
    stream, y = n.op("Softmax", n.input(2, 6, width, name="stream")), n.input(2, 6, 32)

    def parameters(kind: str) -> list[Any]:
        return [n.positive(width), *([n.random(width)] if kind == "LayerNormalization" else [])]

    for kind in (first, second):
        norm = n.op(kind, n.matmul(y, width), *parameters(kind), attrs=LayerNormAttrs(-1, 1e-3))
        stream = n.op("Add", stream, norm)
        y = n.op(second, stream, *parameters(second))
    return n.done(n.matmul(y, 16), n.op("Softmax", stream))


def norm_of_norm(first: str = "LayerNormalization", second: str = "LayerNormalization", width: int = 48) -> Graph:
    """Rows that are normalized twice. The first result has another reader (the layers of a Conformer)."""
    n = Net()
    y = n.matmul(n.input(2, 6, 32), width)
    made: list[Value] = []
    for kind in (first, second):
        more = [n.random(width)] if kind == "LayerNormalization" else []
        y = n.op(kind, y, n.positive(width), *more, attrs=LayerNormAttrs(-1, 1e-3))
        made.append(y)
    return n.done(n.matmul(made[1], 8), n.op("Tanh", made[0]))


NORMS_OF_NORMS: dict[str, Callable[[], Graph]] = {
    "norms of norms": norm_of_norm,
    "rms norms of long norms": lambda: norm_of_norm("RMSNormalization", "RMSNormalization", 1160),
    "a layer norm of an rms norm": lambda: norm_of_norm("RMSNormalization"),
}


RESIDUAL: dict[str, tuple[Callable[[], Graph], str]] = {
    "layer norm of a sum": (residual, "add_norm"),
    "layer norm added to rows": (normalized_residual, "norm_add"),
    "rms norm added to rows": (lambda: normalized_residual("RMSNormalization", 768, turn=True), "norm_add"),
    "layer norm between sums": (lambda: normalized_residual(before=True), "add_norm"),
    "norms around sums": (sandwich, "norm_add_norm"),
    "layer norms around sums": (
        lambda: sandwich("LayerNormalization", "LayerNormalization", 768),
        "norm_add_norm",
    ),
    "a layer norm, a sum and an rms norm": (lambda: sandwich("LayerNormalization"), "norm_add_norm"),
    "an rms norm, a sum and a layer norm": (
        lambda: sandwich(second="LayerNormalization", width=1160),
        "norm_add_norm",
    ),
    "rms norm of a sum": (lambda: residual("RMSNormalization", 768), "add_norm"),
}
