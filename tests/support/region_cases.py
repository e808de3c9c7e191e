"""One operator of a lowered program: its NumPy meaning, and a check that its shape function agrees with the meaning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optdnn.errors import InternalError
from optdnn.ops.base import Attrs, Call, Result
from optdnn.ops.fused import plain_attrs, typed_attrs
from optdnn.ops.table import OPDEFS
from optdnn.runtime.reference.run import run_kernel
from optdnn.runtime.steps.attrs import attrs_from_plain, attrs_to_plain
from optdnn.types import Array, TensorType


def random(*shape: int, seed: int = 0) -> Array:
    """Normal numbers in fp32, which depend on the seed."""
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def infer(kind: str, attrs: Attrs, operands: Sequence[Array | None], outputs: int = 1) -> Result:
    """The types and shapes that the kind's shape function infers from these operands."""

    def no_symbol(hint: str, most: object = None) -> object:
        raise InternalError(hint)

    types = tuple(None if x is None else TensorType(x.dtype, x.shape) for x in operands)
    return OPDEFS[kind].infer(Call(kind, attrs, types, (None,) * len(types), outputs, no_symbol))  # type: ignore[arg-type]


def results(kind: str, attrs: Attrs, operands: Sequence[Array | None], outputs: int = 1) -> tuple[Array, ...]:
    """The kind's results in fp32, with attributes read back from plain data. Types and shapes must equal those of the shape
    function."""
    stored = attrs_from_plain(attrs_to_plain(plain_attrs(OPDEFS[kind], attrs)))
    assert typed_attrs(OPDEFS[kind], stored) == attrs
    found = run_kernel(kind, operands, stored)[:outputs]
    result = infer(kind, attrs, operands, outputs)
    assert [(t.shape, t.dtype) for t in result.types] == [(x.shape, x.dtype) for x in found]
    cost = OPDEFS[kind].cost
    assert cost is not None
    call = Call(kind, attrs, tuple(None if x is None else TensorType(x.dtype, x.shape) for x in operands), (), 1, None)  # type: ignore[arg-type]
    assert cost(call, result).flops >= 0
    return found
