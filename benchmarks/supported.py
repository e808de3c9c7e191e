"""The tables of supported and of unsupported operators, which ``docs/generate.py`` publishes."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from optdnn.importers.draw_nodes import DRAWS
from optdnn.ops import classic, contrib, sequences
from optdnn.ops import tf_ops as leftovers
from optdnn.ops.table import FAMILIES, IMPORTERS


def table() -> str:
    """A Markdown table: the ONNX operators that import, by family."""
    lines = ["| family | ONNX operators |", "|---|---|"]
    for name, definitions in FAMILIES.items():
        operators = sorted({op for d in definitions for op in d.importers}, key=lambda op: ("." in op, op.lower()))
        if operators:
            lines.append(f"| {name} | {', '.join(operators)} |")
    beside = {
        "lists of tensors whose length is known": sequences.IMPORTERS,
        "classical machine learning": classic.IMPORTERS,
        "ONNX Runtime's own": contrib.IMPORTERS,
        "TensorFlow's, left by tf2onnx": leftovers.IMPORTERS,
    }
    for title, group in beside.items():
        names = sorted(group, key=lambda op: op.split(".")[-1].lower())
        lines.append(f"| {title} | {', '.join(names)} |")
    count = len(IMPORTERS) - len(classic.REFUSALS) - len(leftovers.IMPORTERS)
    lines += ["", f"{count} ONNX operators in all; those that ONNX defines by a function of others import too.", ""]
    random = ", ".join(kind for kind in DRAWS if kind != "Dropout")
    lines += [f"With a seed (`--random-seed`), also the random operators: {random}, and Dropout in training mode.", ""]
    lines += ["Not supported, of the newest opset:", "", "| reason | operators |", "|---|---|"]
    lines += [f"| {why} | {', '.join(names)} |" for why, names in missing().items()]
    return "\n".join(lines)


NOT_DONE: Mapping[str, str] = {
    "*String*": "text is not computed",
    "Regex*": "text is not computed",
    "TfIdf*": "text is not computed",
    "ai.onnx.ml.CategoryMapper": "text is not computed",
    "ai.onnx.ml.CastMap": "maps are not tensors",
    "ai.onnx.ml.DictVectorizer": "maps are not tensors",
    "ai.onnx.preview.training.*": "training",
    "ImageDecoder": "files of pictures are decoded before the network",
}
"""Pattern of operators -> the reason why they are not supported."""


def missing() -> dict[str, list[str]]:
    """Reason -> the operators of the newest opset that do not import, and are not functions of operators that do.

    Raises ValueError for an operator without a reason, and for a pattern that matches none.
    """
    import onnx.defs

    found: dict[str, list[str]] = {}
    used = set()
    for schema in onnx.defs.get_all_schemas():
        name = f"{schema.domain}.{schema.name}" if schema.domain else schema.name
        pattern = next((p for p in NOT_DONE if fnmatch.fnmatchcase(name, p)), None)
        defined: Any = schema  # onnx's stubs lack these two
        composed = defined.has_function or defined.has_context_dependent_function
        imported = (name in IMPORTERS and name not in classic.REFUSALS) or name in DRAWS
        done = imported or (composed and pattern is None)
        if schema.deprecated or done:
            continue
        if pattern is None:
            raise ValueError(f"{name} does not import, and there is no reason for it")
        used.add(pattern)
        found.setdefault(NOT_DONE[pattern], []).append(name)
    if unused := sorted(NOT_DONE.keys() - used):
        raise ValueError(f"{unused[0]} matches nothing that is not done")
    return {why: sorted(names, key=str.lower) for why, names in sorted(found.items())}
