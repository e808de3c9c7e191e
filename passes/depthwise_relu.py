"""A ReLU that only depthwise convolutions read becomes their prologue, as does an activation that one convolution reads.

Such an activation is left where its input has other readers as well: the sums between the blocks of Xception, which the shortcuts
read, the cells of NASNet, and the residual blocks of RefineNet, VQ-VAE, HiFi-GAN (LeakyReLU), EnCodec (ELU) and EDM2 (SiLU). A
launch for it would read and write the image once more. So would one for the squares of image compression, whose kernel divides the
image by the root of their weighted sum (GDN: Ballé et al., 2016). Of several depthwise convolutions each applies it for itself.
"""

from __future__ import annotations

from optdnn.ir.activations import KEEP_ZEROS
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.base import Stage
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import operand
from optdnn.passes.support.stages import with_stages
from optdnn.types import BF16, FP16

VECTOR = 8
"""Channels of the vectors that the kernel changes."""
MOST_TAPS = 49
"""Larger filters have no kernel that applies it."""


@rule("depthwise_relu", {"Conv"})
def depthwise_relu(graph: Graph, op: Op) -> Match | Miss | None:
    """Depthwise Conv of a ReLU, in 16-bit floats."""
    relu = graph.op(operand(op))
    if relu.kind != "Relu" or relu.outputs[0].type.dtype not in (FP16, BF16) or not _filters(graph, op, relu.value):
        return None
    others = [user for user in graph.users(relu.value) if not _filters(graph, user, relu.value)]
    if others:
        return Miss(f"{others[0].name} reads the result of {relu.name}, too, so that it is stored anyway")

    def build(patch: Patch) -> Value:
        inputs = (relu.inputs[0], *op.inputs[1:])
        return patch.add("Conv", inputs, with_stages(op.attrs, prologue=[Stage("Relu", (~0,), relu.attrs)]))

    return Match((op, relu), build)


def _filters(graph: Graph, op: Op, x: Value) -> bool:
    """Whether ``op`` is a convolution that reads ``x`` alone, and that the depthwise kernels run."""
    if op.kind != "Conv" or op.attrs.prologue or op.inputs[0] != x or x in op.inputs[1:]:
        return False
    weight = graph.constant_value(op.inputs[1])
    if weight is None or weight.ndim not in (3, 4) or weight.shape[1] != 1 or weight.shape[0] != op.attrs.group:
        return False
    return bool(weight.shape[0] % 4 == 0 and weight[0].size <= MOST_TAPS)


@rule("conv_activation", {"Conv"})
def conv_activation(graph: Graph, op: Op) -> Match | Miss | None:
    """Ungrouped Conv of an activation that keeps zeros, or of squares, in 16-bit floats. Its kernel applies it, or leaves it to a
    launch."""
    relu, weight = graph.op(operand(op)), graph.constant_value(op.inputs[1])
    squares = relu.kind == "Mul" and relu.inputs[0] == relu.inputs[1]
    if not (squares or relu.kind in KEEP_ZEROS) or relu.outputs[0].type.dtype not in (FP16, BF16) or op.attrs.prologue:
        return None
    if weight is None or weight.ndim not in (3, 4) or op.attrs.group != 1 or weight.shape[1] % VECTOR:
        return None
    if graph.sole_user(relu.value) is None:
        return Miss(f"the result of {relu.name} has {graph.use_count(relu.value)} readers, so that it is stored once")
    if graph.use_count(operand(relu)) == len(relu.inputs):
        return Miss(
            f"only {relu.name} reads the result before it: the launch of a normalization, for example, applies {relu.name}"
        )

    def build(patch: Patch) -> Value:
        inputs = (relu.inputs[0], *op.inputs[1:])
        return patch.add("Conv", inputs, with_stages(op.attrs, prologue=[stage]))

    stage = Stage(relu.kind, (~0,) * len(relu.inputs), relu.attrs)
    return Match((op, relu), build)


class DepthwiseRelu(RulePass):
    """Runs after precisions are assigned: kernels of 8-bit integers do not apply it. Before layouts."""

    name = "depthwise_relu"
    rules = (depthwise_relu, conv_activation)
