"""ai.onnx.ml's TreeEnsembleClassifier in exported ONNX: one node in place of a TreeEnsembleRegressor and the ArgMax of its scores.

ONNX Runtime takes less time for it, which counts in networks of a few microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
import onnx.helper

_LEAVES = ("treeids", "nodeids", "ids", "weights", "weights_as_tensor")


def with_classifiers(nodes: Sequence[onnx.NodeProto]) -> tuple[list[onnx.NodeProto], dict[str, str]]:
    """The nodes with classifiers inserted, and the name of each removed ArgMax -> the name of its classifier.

    Only sums of three and more classes: with two, ONNX Runtime's classifier compares the second score with a threshold.
    """
    sums = {n.output[0]: n for n in nodes if n.op_type == "TreeEnsembleRegressor" and _is_sum(_attributes(n))}
    chosen: dict[str, onnx.NodeProto] = {}
    for n in nodes:
        if n.op_type == "ArgMax" and n.input[0] in sums and _by_row(_attributes(n)):
            chosen.setdefault(n.input[0], n)
    gone = {n.name: sums[scores].name for scores, n in chosen.items()}
    found = []
    for n in nodes:
        if n.name in gone and n.op_type == "ArgMax":
            continue
        if n.output and n.output[0] in chosen and n.op_type == "TreeEnsembleRegressor":
            n = _classifier(n, chosen[n.output[0]].output[0])
        found.append(n)
    return found, gone


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


def _is_sum(attrs: dict[str, Any]) -> bool:
    return attrs.get("aggregate_function", b"SUM") == b"SUM" and int(attrs.get("n_targets", 1)) > 2


def _by_row(attrs: dict[str, Any]) -> bool:
    return attrs.get("axis", 0) in (1, -1) and not attrs.get("keepdims", 1) and not attrs.get("select_last_index", 0)


def _classifier(node: onnx.NodeProto, label: str) -> onnx.NodeProto:
    """The classifier with the regressor's trees, whose labels count from 0."""
    made = onnx.NodeProto(name=node.name, op_type="TreeEnsembleClassifier", domain=node.domain, input=node.input)
    made.output.extend([label, node.output[0]])
    classes = 1
    for a in node.attribute:
        if a.name == "n_targets":
            classes = int(a.i)
        elif a.name != "aggregate_function":
            kept = made.attribute.add()
            kept.CopyFrom(a)
            head, _, tail = a.name.partition("_")
            if head == "target" and tail in _LEAVES:
                kept.name = f"class_{tail}"
    made.attribute.append(onnx.helper.make_attribute("classlabels_int64s", list(range(classes))))
    ordered = sorted(made.attribute, key=lambda a: str(a.name))
    del made.attribute[:]
    made.attribute.extend(ordered)
    return made
