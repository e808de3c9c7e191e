"""``SampleToken``: the next token of each sequence of a batch, drawn from its logits.

    SampleToken(logits [B, V], temperature [B], top_k [B], top_p [B], seed [B], position [B]) -> token [B, 1]

Logits are floats, ``temperature`` and ``top_p`` fp32, all others int64. For each sequence:

* A temperature of 0 (or less, or NaN) or a ``top_k`` of 1 selects the token with the largest logit, the first of equal ones.
* Otherwise the probabilities are ``softmax(logits / temperature)``.
* ``top_k`` from 2 to V - 1 keeps the tokens with logits of at least the k-th largest one. Any other value keeps all.
* ``top_p`` below 1 keeps the most probable tokens that together have at least this share of the probability that ``top_k``
  kept. Tokens as probable as the last of these are kept, too.
* One of the kept tokens is drawn, by random bits that depend only on ``seed`` and ``position`` (Philox4x32-10).
* The token is -1 if the logits contain NaN or +inf, or only -inf.

Probabilities are integers of 28 bits, so that sums do not depend on the order. Targets agree, except where an exponential is
rounded differently at the border between two tokens. Models contain it as the operator ``SampleToken`` of the domain ``optdnn``
(:mod:`optdnn.importers.sampling` adds it).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optdnn.errors import ShapeError, UnsupportedError
from optdnn.ops.base import EXACT, Attrs, Call, Result, Traits
from optdnn.ops.checks import agree, floating, per_element, require_rank
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import Emit, Export, NodeSpec, Ref
from optdnn.types import FP32, INT64, TensorType, dtype_name

DOMAIN = "optdnn"
SETTINGS = {"temperature": FP32, "top_k": INT64, "top_p": FP32, "seed": INT64, "position": INT64}
"""The operands after the logits, one value per sequence."""


def _infer(call: Call) -> Result:
    logits = floating(call)
    require_rank(logits, 2, "SampleToken logits")
    batch = logits.dims[0]
    for i, (name, dtype) in enumerate(SETTINGS.items(), 1):
        t = call.type(i)
        require_rank(t, 1, f"SampleToken {name}")
        if t.dtype != dtype:
            raise ShapeError(f"SampleToken {name} is {t}; it must be {dtype_name(dtype)}")
        batch = agree(batch, t.dims[0], f"SampleToken {name} has one number per sequence")
    if logits.dims[1] == 0:
        raise ShapeError(f"SampleToken of {logits}: there is no token to take")
    return Result((TensorType(INT64, (batch, 1)),))


def _import(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    return e.op("SampleToken", node.inputs)


def _export(attrs: Attrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Any:
    raise UnsupportedError("no library samples tokens: SampleToken is an operator of optdnn")


DEFS: tuple[OpDef, ...] = (
    OpDef(
        "SampleToken",
        _infer,
        onnx={f"{DOMAIN}.SampleToken": _import},
        to_onnx=_export,
        cost=per_element(10),
        tol=EXACT,
        traits=Traits(own_precision=True),
    ),
)
