"""The three networks that are shipped trained, as :class:`optdnn.models.zoo.net.Net` writes them: 8x8 pictures of
digits in, ten logits out.

Each reads ``x``, float32 in 0 … 1 with a batch "N", and gives ``logits``, float32 (N, 10). Parameters carry the names
of the torch modules in :mod:`optdnn.models.trained.train`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx

from optdnn.models.zoo.builder import Value
from optdnn.models.zoo.common import squeeze_excite
from optdnn.models.zoo.net import Net
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


NETWORKS: dict[str, Callable[[Net], Value]] = {
    "digits_resnet": digits_resnet,
    "digits_mobile": digits_mobile,
    "digits_gru": digits_gru,
}


def build(name: str, state: Mapping[str, Array]) -> onnx.ModelProto:
    """The network ``name`` with the parameters ``state`` (a torch state_dict as arrays); UsageError where they do not
    fit."""
    net = Net(name, state=state, doc=(NETWORKS[name].__doc__ or "").strip())
    net.output("logits", NETWORKS[name](net))
    return net.model()
