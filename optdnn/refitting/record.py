"""The record of an engine's network, which distinguishes other weights from another network.

``meta["network"]`` is ``{"nodes": {output: "Kind digest"}, "weights": {name: type}}`` of the graph as imported. The digest of an
operator covers its kind, attributes, operands' names, and the types of its results; not the elements of weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

from optdnn.errors import EngineError, RefusedNode, UnsupportedError
from optdnn.ir.digest import SMALL
from optdnn.ir.graph import Graph, Op
from optdnn.runtime.program import Plain, Program
from optdnn.types import BOOL, INT64

NETWORK = "network"
"""The key in the program's ``meta``."""
STRUCTURE = "structure"
"""The key in ``meta["model"]`` of the optimized graph's digest."""
SHOWN = 8
"""Most differences that an error names."""
REBUILD = "build it again from the new model: optdnn build"


def network_record(graph: Graph) -> dict[str, Plain]:
    """The record of a graph as it was imported."""
    nodes, weights = {}, {}
    for op in graph.order():
        name = op.outputs[0].name
        if op.kind == "Constant":
            weights[name] = str(op.outputs[0].type)
        if op.kind != "Constant" or _decides(op):
            nodes[name] = f"{op.kind} {_digest(graph, op)}"
    return {"nodes": nodes, "weights": weights}


def _decides(op: Op) -> bool:
    """Whether a constant is one that holds sizes, axes, positions or conditions. (Other integers are quantized weights.)"""
    value = op.attrs.value
    return bool(value.dtype in (INT64, BOOL) and value.size <= SMALL)


def _digest(graph: Graph, op: Op) -> str:
    operands = [None if v is None else graph.output(v).name for v in op.inputs]
    attrs = op.attrs.value.tolist() if op.kind == "Constant" else repr(op.attrs)
    types = [str(o.type) for o in op.outputs]
    return hashlib.sha256(repr((op.kind, attrs, operands, types)).encode()).hexdigest()[:8]


def recorded(program: Program) -> Mapping[str, Mapping[str, str]]:
    """The record in an engine. Raises EngineError where it has none."""
    found = program.meta.get(NETWORK)
    tables = [found.get(name) if isinstance(found, Mapping) else None for name in ("nodes", "weights")]
    if not all(isinstance(t, Mapping) and all(isinstance(v, str) for v in t.values()) for t in tables):
        raise EngineError(
            "the engine does not record its network: it cannot take other weights",
            hint="an earlier version built it; build it again",
        )
    return {"nodes": tables[0], "weights": tables[1]}  # type: ignore[dict-item]


def check_same_network(program: Program, graph: Graph) -> None:
    """Raise UnsupportedError, which names every difference, unless ``graph`` (as imported) differs from the engine's network only
    in the elements of its weights."""
    old, new = recorded(program), network_record(graph)
    refuse(
        [
            *_differences(old["weights"], new["weights"], "weight", "is {new}; the engine was built with {old}"),
            *_differences(old["nodes"], new["nodes"], "node", "has other attributes or operands ({old}; now {new})"),
        ],
        "the model is another network than the engine's",
    )


def _differences(old: Mapping[str, str], new: Mapping[str, str], what: str, changed: str) -> list[tuple[str, str, str]]:
    """(what and its name, kind, difference) of entries that are not in both, or not equal."""
    found = []
    for name in {**old, **new}:
        a, b = old.get(name), new.get(name)
        if a == b:
            continue
        kind = (b or a or "").partition(" ")[0] if what == "node" else "initializer"
        said = "is not in the engine" if a is None else "is not in the model" if b is None else ""
        found.append((f"{what} {name!r}", kind, said or changed.format(old=a, new=b)))
    return found


def refuse(differences: Sequence[tuple[str, str, str]], because: str) -> None:
    """Raise UnsupportedError that names these (name, kind, difference), where there are any."""
    if not differences:
        return
    rows = [RefusedNode(name, kind, "", 0, said) for name, kind, said in differences[:SHOWN]]
    more = f" ({len(differences)} differences; the first {SHOWN}:)" if len(differences) > SHOWN else ":"
    raise UnsupportedError(f"{because}{more}", rows, hint=REBUILD)


@contextmanager
def checked_record() -> Iterator[None]:
    """Raises EngineError for a record in another form than builds write: what an engine holds is unchecked."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise EngineError(
            f"the engine's record of its build is malformed ({type(error).__name__}: {error})", hint="build it again"
        ) from error


@checked_record()
def check_same_rewrites(program: Program, passes: Sequence[Mapping[str, Any]], structure: str) -> None:
    """Raise UnsupportedError that names the nodes unless the passes made the same graph of the new weights: its ``structure``
    is that of the engine's. ``passes`` are their reports as plain data."""
    if program.meta.get("model", {}).get(STRUCTURE) == structure:
        return
    differences: list[tuple[str, str, str]] = []
    nothing: Mapping[str, Any] = {}
    old: Mapping[str, Any]
    new: Mapping[str, Any]
    for old, new in zip_longest(program.meta.get("passes", ()), passes, fillvalue=nothing):
        rewrites = [[(f["rule"], tuple(f["nodes"])) for f in p.get("fired", ())] for p in (old, new)]
        for which, said in (
            (0, "was made for the engine's weights, not for these"),
            (1, "is made only for these weights"),
        ):
            for rule, nodes in rewrites[which]:
                if (rule, nodes) not in rewrites[1 - which]:
                    name = (new or old).get("name", "")
                    differences.append((f"node {' + '.join(nodes)!r}", name, f"the rewrite {rule} {said}"))
    refuse(
        differences or [("the graph", "", "a layout, a type or an attribute differs")],
        "these weights are optimized otherwise than the engine's",
    )


@checked_record()
def check_same_steps(old: Program, new: Program) -> None:
    """Raise UnsupportedError that names the nodes unless two programs run the same kernels in the same order."""
    differences = []
    for a, b in zip_longest(_steps(old), _steps(new)):
        if a != b:
            src, kind = (b or a or ((), ""))[:2]
            differences.append((f"node {' + '.join(src)!r}", kind, "other kernels would run it"))
    refuse(differences, "this machine, version or these weights make another program")


def _steps(program: Program) -> list[tuple[tuple[str, ...], str, Any, int]]:
    """Each step: its nodes, its executor, its operator, its lane."""
    rows = []
    for k, step in enumerate(program.steps):
        launch = step.params.get("launch")
        kernel = program.kernels[launch["kernel"]] if isinstance(launch, Mapping) and "kernel" in launch else None
        template = ("", "") if kernel is None else (kernel.template, kernel.function)  # its text may contain scales
        what = (template, step.params.get("tactic"), step.params.get("kind"))
        rows.append((step.src, step.executor, what, program.lanes[k].lane if program.lanes else 0))
    return rows
