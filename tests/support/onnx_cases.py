"""The cases of ONNX's own backend tests, generated once per process."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import onnx
from onnx.backend.test.loader import load_model_tests

from support.onnx_pool import quick_generators

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator", "real")


@functools.cache
def cases() -> dict[str, Any]:
    """All cases by name."""
    with warnings.catch_warnings(), quick_generators():
        warnings.simplefilter("ignore")  # ONNX's generators overflow and divide by zero on purpose
        return {case.name: case for kind in KINDS for case in load_model_tests(kind=kind)}


def group(name: str) -> str:
    """The operator that a case tests ("Softmax", or "Softmax, expanded" for the body of a function), or the kind of the case."""
    case = cases()[name]
    if case.model is None:
        return str(case.kind)
    base, expanded, _ = name.partition("_expanded")
    nodes: list[onnx.NodeProto] = list(cases().get(base, case).model.graph.node)
    return f"{nodes[-1].op_type}, expanded" if expanded else nodes[-1].op_type
