"""The network as data for the page: colors by time, roofline, precision and error, and the facts of each operator in words.

The page's script only draws. Every text, and which class of a color scale an operator is in, is decided here. All texts go through
:func:`optdnn.errors.printable`; the page never reads them as HTML.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from optdnn.errors import printable
from optdnn.passes.support.words import RULES
from optdnn.report.explanation import Explanations
from optdnn.report.network import SOURCES, Network, Node
from optdnn.report.words import duration, error_text, first_of

MOST_LINES = 40
"""Most lines of one list in the facts of an operator."""
CATEGORIES = 7
"""Most kinds that have their own color."""
OTHER, UNKNOWN = "c7", ""
TIME_CLASSES = 6
ROOFLINE = (0.10, 0.25, 0.50, 0.75)
ERRORS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
CHANGES = (-0.10, -0.02, 0.02, 0.10)

Mode = dict[str, Any]
"""A coloring: ``key``, ``title``, ``legend`` (class, text), and by node ``classes``."""


def picture(
    net: Network, known: Explanations, changes: Mapping[int, tuple[float, float]] | None = None
) -> dict[str, Any]:
    """The data of the page's script: nodes, edges, colorings and a table of texts, to which the nodes' lists point.

    ``changes``: µs of an operator in another engine and in this one, by its number.
    """
    texts = _Texts()
    for _, node in net.operators():
        node.precision = _precision(node, known)
    nodes = [_node(k, n, known, texts) for k, n in enumerate(net.nodes)]
    for k, (a, b) in (changes or {}).items():
        nodes[k]["facts"].append(["in A", f"{a:.4g} µs; here {b:.4g} µs"])
    modes = (
        _by_change(net, changes),
        _by_time(net),
        _by_roofline(net),
        _by_error(net),
        _by_kind(net),
        _by_precision(net),
    )
    known_modes = [m for m in modes if m is not None]
    return {"nodes": nodes, "edges": [list(e) for e in net.edges], "modes": known_modes, "texts": texts.table}


class _Texts:
    """Texts, each once."""

    def __init__(self) -> None:
        self.table: list[str] = []
        self._index: dict[str, int] = {}

    def add(self, text: str) -> int:
        if text not in self._index:
            self._index[text] = len(self.table)
            self.table.append(printable(text))
        return self._index[text]


# ---------------------------------------------------------------- the facts of an operator


def _node(k: int, node: Node, known: Explanations, texts: _Texts) -> dict[str, Any]:
    facts = [
        ["step", "" if node.step is None else f"{node.step} ({node.executor})"],
        ["lane", "" if node.lane is None else str(node.lane)],
        ["tactic", node.tactic],
        ["time", time_text(node)],
        ["of roofline", "" if node.roofline is None else f"{node.roofline:.0%}"],
        ["precision", node.precision],
        ["error", node.error if isinstance(node.error, str) else "" if node.error is None else error_text(node.error)],
        ["result", node.result],
    ]
    lists = [[title, [texts.add(t) for t in lines]] for title, lines in _lists(node, known) if lines]
    return {
        "id": k,
        "role": node.role,
        "label": printable(node.label),
        "name": printable(node.name),
        "time": "" if node.us is None else duration(node.us),
        "facts": [[label, printable(text)] for label, text in facts if text],
        "lists": lists,
        "candidates": _candidates(node, known),
    }


def time_text(node: Node) -> str:
    if node.us is None:
        return ""
    share = "" if node.share is None else f", {node.share:.1%} of the run"
    return f"{duration(node.us)}{share}" + f", {SOURCES[node.source]}"


def _lists(node: Node, known: Explanations) -> Iterable[tuple[str, list[str]]]:
    yield "ONNX nodes", _first(node.src)
    yield "Rewrites made", _first(_entries(node, known.made))
    yield "Rewrites refused", _first(_entries(node, known.refused))
    tactics = _unique(t for name in node.src for t in known.of_tactics(name))
    own = [t for t in tactics if not t.get("dropped") and node.tactic.startswith(str(t["tactic"]))] or tactics
    yield "Tactics that refused", _first(f"{r['tactic']}: {r['reason']}" for t in own for r in t.get("refused", ()))
    unusable = (f"{u['candidate']}: {u['why']}" for name in node.src for u in known.unusable(name))
    yield "Candidates that failed", _first(unusable)
    yield "Precision", _first(_precision_lines(node, known))


def _entries(node: Node, entries: Callable[[str], Sequence[Mapping[str, Any]]]) -> Iterable[str]:
    """A line for each rewrite of an operator's nodes: the pass, what it does in words, the reason of a refusal."""
    for name in node.src:
        for e in entries(name):
            others = [n for n in e["nodes"] if n not in node.src]
            beside = f", with {first_of(others, 3)}" if others else ""
            reason = f": {e['reason']}" if e.get("reason") else ""
            yield f"{e['pass']}: {RULES.get(e['rule'], e['rule'])}{reason}{beside}"


def _precision_lines(node: Node, known: Explanations) -> Iterable[str]:
    for name in node.src:
        found = known.of_precision(name)
        if "reason" in found:
            yield f"{found['node']}: {found['reason']}"
        for p, us in found.get("account", {}).get("us", {}).items():
            yield f"{p} takes {us:.1f} µs ({found['account'].get('tactics', {}).get(p, 'no tactic')})"
        for d in found["differs"]:
            yield f"asked for {d['asked']}, runs in {d['runs']}: {d.get('reason', '')}"
        for r in found["remarks"]:
            yield str(r["what"])


def _candidates(node: Node, known: Explanations) -> list[list[Any]]:
    """The candidates that tuning measured here, the fastest first: name, µs, whether it was chosen."""
    rows = _unique(r for name in node.src for r in known.tried(name))
    return [
        [printable(c), us, c == r["chosen"]]
        for r in rows[:1]
        for c, us in list((r.get("us") or {}).items())[:MOST_LINES]
    ]


def _unique(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return list({id(row): row for row in rows}.values())


def _first(lines: Iterable[str]) -> list[str]:
    """The first lines, each once, and how many more there are."""
    found = list(dict.fromkeys(lines))
    more = len(found) - MOST_LINES
    return found if more <= 0 else [*found[:MOST_LINES], f"and {more} more"]


def _precision(node: Node, known: Explanations) -> str:
    found = [known.of_precision(name) for name in node.src]
    names = dict.fromkeys(str(f.get("node", f["engine"])) for f in found)
    own = [n for n in names if not n.startswith("its ")]
    return " and ".join(own) if own else "none of its own" if names else ""


# ---------------------------------------------------------------- colors


def _mode(key: str, title: str, legend: Sequence[tuple[str, str]], classes: Mapping[int, str], net: Network) -> Mode:
    used = set(classes.values())
    shown = [[c, printable(text)] for c, text in legend if c in used]
    return {
        "key": key,
        "title": title,
        "legend": shown,
        "classes": [classes.get(k, UNKNOWN) for k in range(len(net.nodes))],
    }


def _binned(value: float, bounds: Sequence[float]) -> int:
    return sum(value >= b for b in bounds)


def _percent(value: float) -> str:
    return f"{100 * value:.2g} %"


def _ranges(bounds: Sequence[float], show: Callable[[float], str]) -> list[str]:
    middle = [f"{show(a)} to {show(b)}" for a, b in pairwise(bounds)]
    return [f"below {show(bounds[0])}", *middle, f"{show(bounds[-1])} and more"]


def _by_time(net: Network) -> Mode | None:
    """Colors by the share of the run: each class begins at twice the share of the class before."""
    shares = {k: n.share for k, n in net.operators() if n.share}
    if not shares:
        return None
    most = max(shares.values())
    bounds = [most / 2**e for e in range(TIME_CLASSES - 1, 0, -1)]
    legend = [(f"q{i}", text) for i, text in enumerate(_ranges(bounds, _percent))]
    return _mode("time", "time", legend, {k: f"q{_binned(s, bounds)}" for k, s in shares.items()}, net)


def _by_roofline(net: Network) -> Mode | None:
    found = {k: n.roofline for k, n in net.operators() if n.roofline is not None}
    if not found:
        return None
    legend = [(f"d{i}", text) for i, text in enumerate(_ranges(ROOFLINE, lambda v: f"{v:.0%}"))]
    return _mode("roofline", "roofline", legend, {k: f"d{_binned(v, ROOFLINE)}" for k, v in found.items()}, net)


def _by_change(net: Network, changes: Mapping[int, tuple[float, float]] | None) -> Mode | None:
    """Colors by how much longer an operator takes than in the other engine: the slower, the redder."""
    if not changes:
        return None
    texts = ["over 10 % faster", "faster", "the same, within 2 %", "slower", "over 10 % slower"]
    legend = [(f"d{4 - i}", text) for i, text in enumerate(texts)]
    classes = {k: f"d{4 - _binned(b / max(a, 1e-9) - 1, CHANGES)}" for k, (a, b) in changes.items()}
    return _mode("change", "change from A", legend, classes, net)


def _by_error(net: Network) -> Mode | None:
    found = {k: n.error for k, n in net.operators() if n.error is not None}
    if not found:
        return None
    legend = [*((f"q{i}", text) for i, text in enumerate(_ranges(ERRORS, lambda v: f"{v:.0e}"))), ("d0", "not finite")]
    classes = {k: "d0" if isinstance(e, str) else f"q{_binned(e, ERRORS)}" for k, e in found.items()}
    return _mode("error", "error", legend, classes, net)


def _by_precision(net: Network) -> Mode | None:
    found = {k: n.precision for k, n in net.operators() if n.precision}
    return _categories("precision", "precision", found, net) if found else None


def _by_kind(net: Network) -> Mode:
    return _categories("operator", "operator", {k: n.label.split(" + ")[0] for k, n in net.operators()}, net)


def _categories(key: str, title: str, found: Mapping[int, str], net: Network) -> Mode:
    """The most frequent ones have a color each."""
    counts = Counter(found.values()).most_common()
    color = {text: f"c{i}" for i, (text, _) in enumerate(counts[:CATEGORIES])}
    legend = [(c, f"{text} ({n})") for (text, n), c in zip(counts, color.values(), strict=False)]
    rest = sum(n for _, n in counts[CATEGORIES:])
    legend += [(OTHER, f"others ({rest})")] if rest else []
    return _mode(key, title, legend, {k: color.get(text, OTHER) for k, text in found.items()}, net)
