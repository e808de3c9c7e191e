"""Modules do not import one another in cycles, including imports inside functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).parents[1]
ROOMS = {"optdnn": "optdnn", **{f"optdnn.{n}": n for n in ("passes", "runtime", "cli")}}
ANNOTATED = 4
"""Cycles that imports for annotations only (``if TYPE_CHECKING``) may close."""


def sources() -> dict[str, str]:
    """Module -> its text."""
    found = {}
    for package, folder in ROOMS.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *(p for p in parts if p != "__init__")))] = path.read_text(encoding="utf-8")
    return found


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements below a node. Expressions, which are most of a tree, hold none."""
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, part, ()):
            yield inner
            yield from _statements(inner)


@cache
def imported(text: str) -> tuple[set[str], set[str]]:
    """Dotted names that a module's text imports anywhere: at run time, and under ``if TYPE_CHECKING``."""
    nodes = [n for n in _statements(ast.parse(text)) if isinstance(n, (ast.If, ast.Import, ast.ImportFrom))]
    checked = [n for n in nodes if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
    annotations = {child for n in checked for child in n.body}
    run: set[str] = set()
    annotated: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.If):
            continue
        assert isinstance(node, ast.Import) or not node.level, "imports are absolute"
        prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        (annotated if node in annotations else run).update(prefix + alias.name for alias in node.names)
    return run, annotated


def cycles(texts: dict[str, str], *, annotations: bool = False) -> list[set[str]]:
    """The sets of modules that all need one another."""
    graph = nx.DiGraph()
    for module, text in texts.items():
        run, annotated = imported(text)
        for name in run | annotated if annotations else run:
            target = name if name in texts else name.rpartition(".")[0]
            if target in texts and target != module:
                graph.add_edge(module, target)
    return [c for c in nx.strongly_connected_components(graph) if len(c) > 1]


def test_a_cycle_is_found() -> None:
    below = "def f():\n    from optdnn import a\n"
    texts = {"optdnn": "", "optdnn.a": "from optdnn.b import x", "optdnn.b": below}
    assert cycles(texts) == [{"optdnn.a", "optdnn.b"}]
    texts["optdnn.b"] = "if TYPE_CHECKING:\n    import optdnn.a\n"
    assert cycles(texts) == []
    assert cycles(texts, annotations=True) == [{"optdnn.a", "optdnn.b"}]


def test_no_import_cycles() -> None:
    assert [sorted(c) for c in cycles(sources())] == []


def test_annotations_close_few_cycles() -> None:
    texts = sources()
    texts["optdnn"] = ""  # its public names are imported when they are first used
    others = cycles(texts)
    found = [sorted(c) for c in cycles(texts, annotations=True) if c not in others]
    assert len(found) <= ANNOTATED, found
