"""Dynamo's graphs prepared for torch's ONNX exporter: numbers become constants, fused calls that it does not know are expanded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def numbers(torch: Any, graph: Any, args: Sequence[Any]) -> dict[int, Any]:
    """Number of an argument -> its value, for the Python numbers among ``args``. With dynamic shapes, dynamo passes floats as
    fp64 tensors without dimensions; the graph then reads only their ``item()``."""
    found: dict[int, Any] = {}
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for i, (node, a) in enumerate(zip(placeholders, args, strict=True)):
        if not isinstance(a, torch.Tensor):
            found[i] = a
        elif a.ndim == 0 and a.dtype == torch.float64 and a.device.type == "cpu" and node.users and _only_items(node):
            found[i] = a.item()
    return found


def _only_items(node: Any) -> bool:
    return all(user.op == "call_method" and user.target == "item" for user in node.users)


def specialized(torch: Any, graph: Any, values: Mapping[int, Any]) -> Any:
    """A copy of the graph module with ``values`` (by argument) as constants; its arguments stay."""
    copied = torch.fx.GraphModule(graph, torch.fx.Graph())
    renamed: dict[Any, Any] = {}
    copied.graph.output(copied.graph.graph_copy(graph.graph, renamed))
    own = [renamed[node] for node in graph.graph.nodes if node.op == "placeholder"]
    for i, value in values.items():
        readers = [user for user in own[i].users if user.op == "call_method" and user.target == "item"]
        for node in readers or [own[i]]:
            for user in list(node.users):
                user.args = torch.fx.map_arg(user.args, lambda n, node=node, value=value: value if n is node else n)
                user.kwargs = torch.fx.map_arg(user.kwargs, lambda n, node=node, value=value: value if n is node else n)
        for node in readers:
            copied.graph.erase_node(node)
    for node in copied.graph.nodes:
        if node.op == "call_function" and node.target is torch._transformer_encoder_layer_fwd:
            node.target = _encoder_layer
    copied.recompile()
    return copied


def _encoder_layer(
    x: Any, width: int, heads: int, qkv: Any, qkv_bias: Any, projection: Any, projection_bias: Any, gelu: bool, norm_first: bool,
    eps: float, scale_1: Any, bias_1: Any, scale_2: Any, bias_2: Any, up: Any, up_bias: Any, down: Any, down_bias: Any,
    mask: Any = None, mask_type: int | None = None,
) -> Any:  # fmt: skip
    """``torch._transformer_encoder_layer_fwd``, which nn.TransformerEncoderLayer calls in inference, as plain functions."""
    import torch

    functions = torch.nn.functional
    batch, length = x.shape[:2]

    def attended(y: Any) -> Any:
        parts = (
            functions.linear(y, qkv, qkv_bias).reshape(batch, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        )
        scores = parts[0] @ parts[1].transpose(2, 3) / math.sqrt(width // heads)
        if mask is not None:
            wide = mask[:, None, None, :] if mask_type == 1 else mask
            scores = scores.masked_fill(wide, -math.inf) if mask.dtype == torch.bool else scores + wide
        y = (torch.softmax(scores, -1) @ parts[2]).transpose(1, 2).reshape(batch, length, width)
        return functions.linear(y, projection, projection_bias)

    def widened(y: Any) -> Any:
        y = functions.linear(y, up, up_bias)
        return functions.linear(functions.gelu(y) if gelu else torch.relu(y), down, down_bias)

    def norm(y: Any, scale: Any, bias: Any) -> Any:
        return functions.layer_norm(y, (width,), scale, bias, eps)

    if norm_first:
        x = x + attended(norm(x, scale_1, bias_1))
        return x + widened(norm(x, scale_2, bias_2))
    x = norm(x + attended(x), scale_1, bias_1)
    return norm(x + widened(x), scale_2, bias_2)
