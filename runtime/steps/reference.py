"""The "reference" executor: runs one operator with its NumPy kernel.

A step's params are ``{"kind": operator kind, "attrs": attributes in plain form (see runtime.steps.attrs)}``; the attributes are
the arguments of ``runtime.reference.run.run_kernel``, with ``prologue``, ``epilogue`` and ``arity`` if stages are fused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from optdnn.errors import EngineError
from optdnn.runtime.program import Plain, Program, Step
from optdnn.runtime.reference.run import run_kernel
from optdnn.runtime.steps.attrs import attrs_from_plain, attrs_to_plain, check_kind
from optdnn.runtime.steps.executor import LoadOptions
from optdnn.types import Array, DType


def reference_step(
    kind: str,
    attrs: Mapping[str, Any],
    inputs: Sequence[int],
    outputs: Sequence[int],
    src: Sequence[str] = (),
) -> Step:
    """The step that runs one operator with its NumPy kernel; ``attrs`` are run_kernel's (``ops.fused.plain_attrs``)."""
    params = {"kind": kind, "attrs": attrs_to_plain(attrs)}
    return Step("reference", params, tuple(inputs), tuple(outputs), tuple(src))


class ReferenceExecutor:
    """One operator, its attributes and its results' types; stateless, so it is its own session."""

    aliases = True  # Identity, Reshape and the like return views
    facts: Mapping[str, Plain] = {"executor": "reference", "library": "numpy", "version": np.__version__}

    def __init__(self, kind: str, attrs: Mapping[str, Any], dtypes: Sequence[DType]):
        self._kind = kind
        self._attrs = dict(attrs)
        self._dtypes = tuple(dtypes)

    def session(self) -> ReferenceExecutor:
        return self

    def run(self, inputs: Sequence[Array | None], outs: Sequence[Array | None]) -> Sequence[Array]:
        # Infinities and NaNs are results like any other, not warnings.
        with np.errstate(all="ignore"):
            return run_kernel(self._kind, inputs, self._attrs, self._dtypes)[: len(self._dtypes)]


def prepare(step: Step, program: Program, options: LoadOptions) -> ReferenceExecutor:
    """Raises EngineError for a kind without a kernel or malformed attributes."""
    kind = step.params.get("kind")
    if set(step.params) != {"kind", "attrs"} or not isinstance(kind, str):
        raise EngineError("a reference step holds something other than a kind and its attributes")
    check_kind(kind)
    return ReferenceExecutor(
        kind, attrs_from_plain(step.params["attrs"]), [program.buffers[i].dtype for i in step.outputs]
    )
