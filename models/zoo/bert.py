"""BERT-base: Devlin et al., "BERT", 2018, node by node as ``torch.onnx.export`` writes Hugging Face's BertModel
(dropout gone).

LayerNorm comes as the nine nodes of exports below opset 17, which is how most BERT files are found, or
(``decomposed=False``) as one operator. GELU is the exact one, by Erf; with ``decomposed=False`` and opset 20 one Gelu.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from optdnn.errors import UsageError
from optdnn.models.zoo.builder import Value
from optdnn.models.zoo.common import Batch, Options
from optdnn.models.zoo.net import Net, normal

HEAD = 64  # channels of one attention head


@dataclass(frozen=True)
class BertOptions(Options):
    sequence_length: Batch = 128
    vocab_size: int = 30522
    max_positions: int = 512
    decomposed: bool = True


def bert_base(net: Net, o: BertOptions) -> None:
    """12 post-norm layers, 768 channels, 12 heads, attention mask added to the scores, pooler on the first token;
    109.48 M parameters.

    Inputs ``input_ids``, ``attention_mask``, ``token_type_ids``: int64 (batch, sequence_length). Outputs ``last_hidden_state``,
    float32 (batch, sequence_length, hidden), and ``pooler_output``, (batch, hidden). With a symbolic batch or length
    every Reshape reads its shape through Shape -> Gather -> Concat.
    """
    heads, batch, sequence_length = max(1, round(12 * o.width)), o.batch, o.sequence_length
    hidden = HEAD * heads
    ids, mask, types = (
        net.input(name, (batch, sequence_length), np.int64)
        for name in ("input_ids", "attention_mask", "token_type_ids")
    )
    bias = net.node("Unsqueeze", [mask, net.const([1])], (batch, 1, sequence_length))
    bias = net.node("Unsqueeze", [bias, net.const([2])], (batch, 1, 1, sequence_length))
    bias = net.node("Cast", [bias], bias.shape, to=1)
    bias = net.node("Sub", [net.const(1.0, np.float32), bias], bias.shape)
    bias = net.binary("Mul", bias, float(np.finfo(np.float32).min))
    with net.scope("embeddings"):
        words = _embedding(net, ids, o.vocab_size, hidden, "word_embeddings")
        kinds = _embedding(net, types, 2, hidden, "token_type_embeddings")
        x = net.node("Add", [words, kinds], words.shape)
        places = _embedding(net, _positions(net, ids, o.max_positions), o.max_positions, hidden, "position_embeddings")
        x = net.node("Add", [x, places], x.shape)
        x = net.layer_norm(x, eps=1e-12, decomposed=o.decomposed, name="LayerNorm")
    with net.scope("encoder"), net.scope("layer"):
        for i in range(o.repeats(12)):
            with net.scope(i):
                x = _bert_layer(net, x, bias, heads, o.decomposed)
    with net.scope("pooler"):
        first = net.node("Gather", [x, net.const(0)], (batch, hidden), axis=1)
        pooled = net.tanh(net.linear(first, hidden, name="dense"), name="activation")
    net.output("last_hidden_state", x)
    net.output("pooler_output", pooled)


def _embedding(net: Net, ids: Value, rows: int, hidden: int, name: str) -> Value:
    with net.scope(name):
        table, _ = net.param("weight", (rows, hidden), normal(1.0 if rows > 2 else 0.3))
        return net.node("Gather", [table, ids], (*ids.shape, hidden))


def _positions(net: Net, ids: Value, max_positions: int) -> Value:
    """The first sequence_length entries of the buffer 0, 1, 2, …: (1, sequence_length)."""
    buffer = net.weight("embeddings.position_ids", np.arange(max_positions, dtype=np.int64)[None])
    length = ids.shape[1]
    if not isinstance(length, str) and length > max_positions:
        raise UsageError(f"a sequence of {length} tokens has more than the {max_positions} positions embedded")
    bounds = [net.const([0]), net.dims(ids, (length,)), net.const([1]), net.const([1])]
    return net.node("Slice", [buffer, *bounds], (1, length))


def _bert_layer(net: Net, x: Value, bias: Value, heads: int, decomposed: bool) -> Value:
    batch, length, hidden = x.shape
    with net.scope("attention"):
        with net.scope("self"):
            q, k, v = (
                net.reshape(net.dense(x, heads * HEAD, name=name), (batch, length, heads, HEAD))
                for name in ("query", "key", "value")
            )
            q, v = net.transpose(q, 0, 2, 1, 3), net.transpose(v, 0, 2, 1, 3)
            k = net.transpose(k, 0, 2, 3, 1)
            scores = net.node("MatMul", [q, k], (batch, heads, length, length))
            scores = net.binary("Div", scores, math.sqrt(HEAD))
            scores = net.node("Add", [scores, bias], scores.shape)
            y = net.node("MatMul", [net.node("Softmax", [scores], scores.shape, axis=-1), v], q.shape)
            y = net.reshape(net.transpose(y, 0, 2, 1, 3), (batch, length, hidden))
        with net.scope("output"):
            y = net.dense(y, heads * HEAD, name="dense")
            x = net.layer_norm(net.node("Add", [y, x], x.shape), eps=1e-12, decomposed=decomposed, name="LayerNorm")
    with net.scope("intermediate"):
        y = net.gelu(net.dense(x, 4 * heads * HEAD, name="dense"), decomposed=decomposed, name="intermediate_act_fn")
    with net.scope("output"):
        y = net.dense(y, heads * HEAD, name="dense")
        return net.layer_norm(net.node("Add", [y, x], x.shape), eps=1e-12, decomposed=decomposed, name="LayerNorm")
