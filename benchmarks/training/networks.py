"""The networks that are shipped trained, as :class:`optdnn.models.zoo.net.Net` writes them: 8x8 pictures of
digits in, ten logits out; ``digits_segment`` gives eleven for each pixel of a picture of 24x24.

Each reads ``x``, float32 in 0 … 1 with a batch "N", and gives ``logits``, float32. Parameters carry the names
of the torch modules in :mod:`benchmarks.training.digits`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx

from optdnn.models.zoo.builder import Value
from optdnn.models.zoo.common import squeeze_excite
from optdnn.models.zoo.net import Net, normal
from optdnn.models.zoo.recurrent import recurrent
from optdnn.types import Array

RESNET = ((16, 1), (16, 1), (32, 2), (32, 1))
"""Residual blocks: channels, stride."""
MOBILE = ((24, 1), (32, 2), (32, 1))
"""Inverted residual blocks: channels, stride; each expands its input's channels fourfold."""
EXPANSION = 4
SQUEEZE = 8
HIDDEN = 64
"""Units of the recurrent network."""
CLASSES = 10
HEADS, HEAD, LAYERS = 4, 16, 3
"""The transformer's heads, their width, and its layers."""
SEGMENT = (16, 32, 64)
"""Channels of the segmenting network at each resolution."""


def digits_resnet(net: Net) -> Value:
    """Convolution + BatchNormalization + ReLU with identity and projection shortcuts (He et al., 2015). Input (N, 1,
    8, 8)."""
    x = net.input("x", ("N", 1, 8, 8))
    x = net.relu(net.batch_norm(net.conv(x, 16, 3, padding=1, name="conv"), name="bn"), name="relu")
    with net.scope("blocks"):
        for i, (channels, stride) in enumerate(RESNET):
            with net.scope(i):
                y = net.conv(x, channels, 3, stride=stride, padding=1, name="conv1")
                y = net.relu(net.batch_norm(y, name="bn1"), name="relu")
                y = net.batch_norm(net.conv(y, channels, 3, padding=1, name="conv2"), name="bn2")
                if x.shape != y.shape:
                    with net.scope("downsample"):
                        x = net.batch_norm(net.conv(x, channels, 1, stride=stride, name=0), name=1)
                x = net.relu(net.add(y, x), name="relu")
    return net.linear(net.flatten(net.global_avg_pool(x, name="pool")), CLASSES, name="fc")


def digits_mobile(net: Net) -> Value:
    """Inverted residuals with depthwise convolutions, squeeze-and-excitation and SiLU (Tan & Le, 2019). Input (N, 1,
    8, 8).

    Hard for int8 with one scale to a tensor: the ranges of the depthwise weights, BatchNormalization folded into them, differ
    from channel to channel by a factor of over a hundred, and so do those of the activations before them.
    """
    x = net.input("x", ("N", 1, 8, 8))
    x = net.silu(net.batch_norm(net.conv(x, 16, 3, padding=1, name="conv"), name="bn"), name="act")
    with net.scope("blocks"):
        for i, (channels, stride) in enumerate(MOBILE):
            with net.scope(i):
                hidden = EXPANSION * x.channels
                y = net.silu(net.batch_norm(net.conv(x, hidden, 1, name="expand"), name="bn1"), name="act")
                y = net.conv(y, hidden, 3, stride=stride, padding=1, groups=hidden, name="depthwise")
                y = net.silu(net.batch_norm(y, name="bn2"), name="act")
                y = squeeze_excite(net, y, SQUEEZE, "se")
                y = net.batch_norm(net.conv(y, channels, 1, name="project"), name="bn3")
                x = net.add(y, x) if x.shape == y.shape else y
    return net.linear(net.flatten(net.global_avg_pool(x, name="pool")), CLASSES, name="fc")


def digits_gru(net: Net) -> Value:
    """A GRU (Cho et al., 2014; ONNX GRU with linear_before_reset) that reads a digit's eight rows. Input (N, 8, 8)."""
    x = net.transpose(net.input("x", ("N", 8, 8)), 1, 0, 2)
    _, (last,) = recurrent(net, x, "GRU", HIDDEN, name="gru")
    return net.linear(net.node("Squeeze", [last, net.const([0])], ("N", HIDDEN)), CLASSES, name="fc")


def digits_transformer(net: Net) -> Value:
    """A vision transformer (Dosovitskiy et al., 2020) of three pre-norm layers over sixteen patches of 2x2. Input (N, 1,
    8, 8).

    The scales of its LayerNormalizations differ from channel to channel by a factor of some dozens, as large language
    models' do, which makes their results hard to quantize with one scale to a tensor (Xiao et al., "SmoothQuant", 2023).
    """
    hidden = HEADS * HEAD
    x = net.conv(net.input("x", ("N", 1, 8, 8)), hidden, 2, stride=2, bias=True, name="patches")
    x = net.transpose(net.reshape(x, ("N", hidden, 16)), 0, 2, 1)
    position, _ = net.param("position", (1, 16, hidden), normal(0.02))
    x = net.node("Add", [x, position], x.shape)
    with net.scope("layers"):
        for i in range(LAYERS):
            with net.scope(i):
                y = _attention(net, net.layer_norm(x, eps=1e-5, decomposed=False, name="norm1"))
                x = net.node("Add", [x, y], x.shape)
                y = net.layer_norm(x, eps=1e-5, decomposed=False, name="norm2")
                y = net.gelu(net.dense(y, 2 * hidden, name="up"), decomposed=True, name="gelu")
                x = net.node("Add", [x, net.dense(y, hidden, name="down")], x.shape)
    x = net.layer_norm(x, eps=1e-5, decomposed=False, name="norm")
    x = net.node("ReduceMean", [x], ("N", hidden), axes=[1], keepdims=0)
    return net.linear(x, CLASSES, name="fc")


def _attention(net: Net, x: Value) -> Value:
    """Multi-head self-attention over 16 tokens, with separate projections."""
    split = ("N", 16, HEADS, HEAD)
    q, k, v = (net.transpose(net.reshape(net.dense(x, HEADS * HEAD, name=name), split), 0, 2, 1, 3) for name in "qkv")
    scores = net.node("MatMul", [q, net.transpose(k, 0, 1, 3, 2)], ("N", HEADS, 16, 16))
    scores = net.binary("Mul", scores, HEAD**-0.5)
    y = net.node("MatMul", [net.node("Softmax", [scores], scores.shape, axis=-1), v], ("N", HEADS, 16, HEAD))
    y = net.reshape(net.transpose(y, 0, 2, 1, 3), ("N", 16, HEADS * HEAD))
    return net.dense(y, HEADS * HEAD, name="out")


def digits_segment(net: Net) -> Value:
    """A small U-Net (Ronneberger et al., 2015): which digit, if any, each pixel belongs to. Input (N, 1, 24, 24)."""
    x = net.input("x", ("N", 1, 24, 24))
    skips = []
    for level, channels in enumerate(SEGMENT):
        with net.scope(f"down{level}"):
            if level:
                skips.append(x)
                x = net.max_pool(x, 2, stride=2, name="pool")
            x = _twice(net, x, channels)
    for level, skip in reversed(list(enumerate(skips))):
        with net.scope(f"up{level}"):
            x = net.conv_transpose(x, skip.channels, 2, stride=2, name="up")
            x = _twice(net, net.concat([skip, x]), skip.channels)
    return net.conv(x, CLASSES + 1, 1, bias=True, name="head")


def _twice(net: Net, x: Value, channels: int) -> Value:
    for i in (1, 2):
        x = net.relu(
            net.batch_norm(net.conv(x, channels, 3, padding=1, name=f"conv{i}"), name=f"bn{i}"), name=f"relu{i}"
        )
    return x


NETWORKS: dict[str, Callable[[Net], Value]] = {
    "digits_resnet": digits_resnet,
    "digits_mobile": digits_mobile,
    "digits_gru": digits_gru,
    "digits_transformer": digits_transformer,
    "digits_segment": digits_segment,
}


def build(name: str, state: Mapping[str, Array]) -> onnx.ModelProto:
    """The network ``name`` with the parameters ``state`` (a torch state_dict as arrays); UsageError where they do not
    fit."""
    net = Net(name, state=state, doc=(NETWORKS[name].__doc__ or "").strip())
    net.output("logits", NETWORKS[name](net))
    return net.model()
