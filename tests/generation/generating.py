"""Engines for generators, and the expected results: everything is computed again for each token, by the target ``reference``."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import onnx
from support.decoder import decoder
from support.growing import growing
from support.language_models import language_model

import optdnn
from optdnn.importers.values import with_values
from optdnn.runtime.engine import Engine
from optdnn.runtime.reference.sampling import sample_token
from optdnn.types import Array

CAPACITY = 64
PROMPTS = [[3, 4, 5], [7], [9, 1, 2, 3, 4, 5, 6, 11, 0]]
MORE = [[1, 2], [5], [6, 6, 6]]


@cache
def model(form: str) -> onnx.ModelProto:
    if form == "lengths":
        return _with_lengths(language_model("llama"))
    return {"growing": growing, "decoder": decoder}[form]() if form in ("growing", "decoder") else language_model(form)


def _with_lengths(made: onnx.ModelProto) -> onnx.ModelProto:
    """GroupQueryAttention's own inputs, ``seqlens_k`` and ``total_sequence_length``, in place of the mask."""
    names = {"/model/attn_mask/k/output_0": "seqlens_k", "/model/attn_mask/total/output_0": "total_sequence_length"}
    kept = [n for n in made.graph.node if not n.name.startswith("/model/attn_mask")]
    for node in kept:
        node.input[:] = [names.get(n, n) for n in node.input]
    del made.graph.node[:]
    made.graph.node.extend(kept)
    inputs = [p for p in made.graph.input if p.name != "attention_mask"]
    inputs.append(onnx.helper.make_tensor_value_info("seqlens_k", 6, ["batch_size"]))
    inputs.append(onnx.helper.make_tensor_value_info("total_sequence_length", 6, []))
    del made.graph.input[:]
    made.graph.input.extend(inputs)
    return made


@cache
def engine(form: str, target: str, batch: int = 1, sample: bool = True, rows: Any = None, half: bool = False) -> Engine:
    """An engine of a model: in genai's form (the name of a family), in Optimum's ("growing") or in ours ("decoder")."""
    made = model(form)
    shapes: dict[str, Any] = {}
    if (target in ("simulate", "cuda") and form != "decoder") or form == "lengths":
        shapes = {"input_ids": (batch, rows or optdnn.DimRange(1, 1, 16))}
        shapes |= {} if form == "lengths" else {"attention_mask": (batch, CAPACITY)}
        for port in made.graph.input:
            dims = port.type.tensor_type.shape.dim
            if len(dims) == 4:
                shapes[port.name] = (batch, dims[1].dim_value, CAPACITY, dims[3].dim_value)
    more: dict[str, Any] = {"tactics": "heuristic"} if target == "cuda" else {}
    if half:
        more |= {"precision": "fp16", "io_dtype": "fp16"}
    if target == "cpu":
        more = {"tactics": "onnxruntime", "threads": 1}
    if form == "lengths":
        made = with_values(made, {"total_sequence_length": CAPACITY}).proto
    return optdnn.build(made, target=target, shapes=shapes, sample="logits" if sample else None, **more)


@cache
def _whole(form: str) -> Engine:
    return optdnn.build(model(form), target="reference")


def scores(form: str, tokens: list[int]) -> Array:
    """The logits after these tokens, computed without a cache."""
    if form == "decoder":
        return _decoded(tokens)
    form = "llama" if form == "lengths" else form
    feeds: dict[str, Any] = {}
    for port in _whole(form).inputs:
        if len(port.shape) == 4:
            sizes = [d if isinstance(d, int) else 1 if k == 0 else 0 for k, d in enumerate(port.shape)]
            feeds[port.name] = np.zeros(sizes, port.dtype)
        else:
            of = {"input_ids": tokens, "position_ids": range(len(tokens))}
            feeds[port.name] = np.array([of.get(port.name, [1] * len(tokens))])
    return np.asarray(_whole(form).run(feeds)["logits"][0, -1])


def _decoded(tokens: list[int]) -> Array:
    found, caches = None, {s.name: np.zeros(s.shape, s.dtype) for s in _whole("decoder").inputs[2:]}
    for at, token in enumerate(tokens):
        found = _whole("decoder").run({"token": np.array([[token]]), "at": np.array([at]), **caches})
        caches = {name: found[f"new.{name}"] for name in caches}
    assert found is not None
    return np.asarray(found["logits"][0, 0])


def expected(form: str, tokens: list[int], count: int, *, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0,
             seed: int = 0, stops: tuple[int, ...] = ()) -> list[int]:  # fmt: skip
    """The tokens that follow."""
    found: list[int] = []
    for _ in range(count):
        whole, one = [*tokens, *found], np.ones(1, np.int64)
        columns = (np.float32([temperature]), one * top_k, np.float32([top_p]), one * seed, one * len(whole))
        found.append(int(sample_token(scores(form, whole)[None], *columns)[0][0, 0]))
        if found[-1] in stops:
            break
    return found
