"""ViT-B/16: Dosovitskiy et al., "An Image is Worth 16x16 Words", 2020, as torchvision has it and ``torch.onnx.export`` writes it.

The shape arithmetic that the exporter leaves behind for fixed shapes is folded.
"""

from __future__ import annotations

from dataclasses import dataclass

from optdnn.models.zoo.builder import Dims, Value
from optdnn.models.zoo.common import ImageOptions, image
from optdnn.models.zoo.net import Net, normal

HEAD = 64  # channels of one attention head


@dataclass(frozen=True)
class VitOptions(ImageOptions):
    patch_size: int = 16
    decomposed: bool = False


def vit_b_16(net: Net, o: VitOptions) -> None:
    """12 pre-norm layers, 768 channels, 12 heads; 86.57 M parameters.

    Queries, keys and values come from one packed projection, sequence first, and are split by Gather. LayerNormalization is one
    operator (opset 17) unless ``decomposed``. ``width`` scales the number of heads.
    """
    heads, batch = max(1, round(12 * o.width)), o.batch
    hidden = HEAD * heads
    x = image(net, o, multiple=o.patch_size)
    x = net.conv(x, hidden, o.patch_size, stride=o.patch_size, bias=True, gain=1.0, name="conv_proj")
    patches = x.extent(2) * x.extent(3)
    x = net.transpose(net.reshape(x, (batch, hidden, patches)), 0, 2, 1)
    token, _ = net.param("class_token", (1, 1, hidden), normal(0.5))
    first = net.node("Expand", [token, net.dims(x, (batch, 1, hidden))], (batch, 1, hidden))
    x = net.concat([first, x], axis=1)
    with net.scope("encoder"):
        position, _ = net.param("pos_embedding", (1, patches + 1, hidden), normal(0.3))
        x = net.node("Add", [x, position], x.shape)
        with net.scope("layers"):
            for i in range(o.repeats(12)):
                with net.scope(f"encoder_layer_{i}"):
                    y = net.layer_norm(x, eps=1e-6, decomposed=o.decomposed, name="ln_1")
                    x = net.node("Add", [_packed_attention(net, y, heads), x], x.shape)
                    y = net.layer_norm(x, eps=1e-6, decomposed=o.decomposed, name="ln_2")
                    with net.scope("mlp"):
                        y = net.gelu(net.dense(y, 4 * hidden, name=0), decomposed=o.decomposed, name=1)
                        y = net.dense(y, hidden, name=3)
                    x = net.node("Add", [x, y], x.shape)
        x = net.layer_norm(x, eps=1e-6, decomposed=o.decomposed, name="ln")
    x = net.node("Gather", [x, net.const(0)], (batch, hidden), axis=1)
    with net.scope("heads"):
        net.output("y", net.linear(x, o.num_classes, name="head"))


def _packed_attention(net: Net, x: Value, heads: int) -> Value:
    """nn.MultiheadAttention as exported: (batch, sequence, hidden) in and out, (sequence, batch, hidden) inside."""
    batch, length, hidden = x.shape[0], x.extent(1), x.extent(2)
    # torch joins batch and heads, but the product of a symbolic batch and the heads is not a dimension: here they stay apart.
    split: Dims = (length, batch, heads, HEAD)
    with net.scope("self_attention"):
        x = net.transpose(x, 1, 0, 2)
        qkv = net.dense(x, 3 * hidden, name=None, weight="in_proj_weight", bias="in_proj_bias")
        qkv = net.reshape(qkv, (length, batch, 3, hidden))
        qkv = net.node("Unsqueeze", [qkv, net.const([0])], (1, *qkv.shape))
        qkv = net.transpose(qkv, 3, 1, 2, 0, 4)
        qkv = net.node("Squeeze", [qkv, net.const([3])], (3, length, batch, hidden))
        q, k, v = (net.node("Gather", [qkv, net.const(i)], (length, batch, hidden), axis=0) for i in range(3))
        q, k, v = (net.transpose(net.reshape(t, split), 1, 2, 0, 3) for t in (q, k, v))
        scale = HEAD**-0.25
        scores = net.node(
            "MatMul",
            [net.binary("Mul", q, scale), net.binary("Mul", net.transpose(k, 0, 1, 3, 2), scale)],
            (*q.shape[:3], length),
        )
        y = net.node("MatMul", [net.node("Softmax", [scores], scores.shape, axis=-1), v], q.shape)
        y = net.reshape(net.transpose(y, 2, 0, 1, 3), (length, batch, hidden))
        return net.transpose(net.dense(y, hidden, name="out_proj"), 1, 0, 2)
