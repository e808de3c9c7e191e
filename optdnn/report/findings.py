"""Possible gains of a run, the largest first: sentences with the time at stake, advice, and the operators.

The time that a step can gain counts once: each finder takes the operators that those before it have left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optdnn.report.network import Network, Node
from optdnn.report.words import counted, milliseconds, slower_text, times
from optdnn.runtime.cpu.layers import LAYOUT
from optdnn.runtime.cuda.measuring.cliffs import BELOW, LAUNCH_US
from optdnn.runtime.cuda.measuring.expected import PREDICTED

CASTS = frozenset({"Cast", "CastLike", "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "DynamicRange"})
MOVES = frozenset(
    {"Copy", "Transpose", "Concat", "Slice", "Split", "Pad", "Expand", "Tile", "DepthToSpace", "SpaceToDepth"}
)
LEAST = 0.002
"""The smallest share of a run that a finding is about."""
REFUSALS = 4
"""How many kinds of refused rewrites are listed."""

_Row = Mapping[str, Any]


@dataclass(frozen=True)
class Finding:
    """``gain_us`` is an upper bound of the gain, in microseconds of a run; None if it is not known. ``nodes`` are the operators
    that the finding is about, and ``share`` their part of the run."""

    text: str
    advice: str
    gain_us: float | None = None
    nodes: tuple[int, ...] = ()
    share: float | None = None


def findings(net: Network, report: _Row) -> list[Finding]:
    """The findings on a network with its times, the largest gain first. ``report`` is the report of a build, a comparison or a
    measurement."""
    left = {k: n for k, n in net.operators() if n.us}
    total = sum(n.us or 0.0 for n in left.values())
    found: list[Finding] = []
    for finder in (_on_cpu, _casts, _moves, _cliffs, _launches):
        for one in finder(left, report, total):
            found.append(one)
            for k in one.nodes:
                left.pop(k, None)
    found += [*_library_layouts(report), *_held_back(net, report), *_whole(report), *_refused(net, report)]
    kept = [f for f in found if f.gain_us is None or not total or f.gain_us >= LEAST * total]
    if any(n.source == PREDICTED for _, n in net.operators()):
        kept.append(_not_measured())
    return sorted(kept, key=lambda f: (f.gain_us is None, -(f.gain_us or 0.0)))


def _sum(nodes: Iterable[Node]) -> float:
    return sum(n.us or 0.0 for n in nodes)


def _part(us: float, total: float) -> str:
    """A time and its part of the run."""
    share = us / total if total else 0.0
    return f"{us / 1e3:.3g} ms, {share:.1%} of the run" if us >= 1e3 else f"{us:.1f} µs, {share:.1%} of the run"


def _kinds(net: Mapping[int, Node], test: Callable[[Node], bool]) -> dict[int, Node]:
    return {k: n for k, n in net.items() if test(n)}


# ---------------------------------------------------------------- operators


def _on_cpu(left: Mapping[int, Node], report: _Row, total: float) -> Iterable[Finding]:
    """Steps of a GPU's program that run on the CPU, with the copies there and back."""
    if not any(n.executor == "cuda" for n in left.values()):
        return
    own = _kinds(left, lambda n: n.executor in ("host", "copy", "reference"))
    if own:
        rows = report.get("host", {}).get("operators", ())
        why = Counter(str(row["why"]) for row in rows).most_common(1)
        n = sum(node.executor != "copy" for node in own.values())
        us = _sum(own.values())
        text = f"{counted(n, 'operator runs', 'operators run')} on the CPU: with the copies {_part(us, total)}."
        advice = f"The reason of most: {why[0][0]}. " if why else ""
        yield Finding(text, advice + "optdnn check lists them; --strict refuses such a build.", us, tuple(own))


def _casts(left: Mapping[int, Node], report: _Row, total: float) -> Iterable[Finding]:
    own = _kinds(left, lambda n: n.label in CASTS)
    if own:
        us = _sum(own.values())
        text = f"{counted(len(own), 'conversion')} between precisions: {_part(us, total)}."
        advice = (
            "Neighbors in one precision need none: --pin NODE=fp16 moves a border, and --io-dtype gives inputs and outputs the "
            "engine's own type."
        )
        yield Finding(text, advice, us, tuple(own))


def _moves(left: Mapping[int, Node], report: _Row, total: float) -> Iterable[Finding]:
    own = _kinds(left, lambda n: n.label.split(" + ")[0] in MOVES and " + " not in n.label)
    if own:
        us = _sum(own.values())
        kinds = ", ".join(kind for kind, _ in Counter(n.label for n in own.values()).most_common(3))
        text = f"{counted(len(own), 'operator only moves', 'operators only move')} data ({kinds}): {_part(us, total)}."
        advice = (
            "Select them to see which fusion was refused, and why. A model that keeps one layout between its products "
            "needs fewer of them."
        )
        yield Finding(text, advice, us, tuple(own))


def _cliffs(left: Mapping[int, Node], report: _Row, total: float) -> Iterable[Finding]:
    """Slow steps, those of one kind and one reason together."""
    by_step = {n.step: k for k, n in left.items()}
    groups: dict[tuple[str, str], list[_Row]] = {}
    for c in report.get("cliffs") or ():
        if c["step"] in by_step:
            groups.setdefault((left[by_step[c["step"]]].label, str(c["why"])), []).append(c)
    for (label, why), rows in groups.items():
        shares = [r["roofline"] or 0.0 for r in rows]
        reach = f"{min(shares):.0%}" if len(rows) == 1 else f"{min(shares):.0%} to {max(shares):.0%}"
        gain = sum(r["gain_us"] for r in rows)
        reaches = counted(len(rows), f"step of {label} reaches", f"steps of {label} reach")
        text = f"{reaches} {reach} of the roofline: {_part(sum(r['us'] for r in rows), total)}."
        advice = f"{why[:1].upper()}{why[1:]}. At {BELOW:.0%} of the roofline the run gains {_part(gain, total)}."
        yield Finding(text, advice, gain, tuple(by_step[r["step"]] for r in rows))


def _launches(left: Mapping[int, Node], report: _Row, total: float) -> Iterable[Finding]:
    """Kernels so short that their launch sets their time."""
    own = _kinds(
        left,
        lambda n: (
            n.executor == "cuda" and (n.us or 0) <= LAUNCH_US and n.roofline is not None and n.roofline < 2 * BELOW
        ),
    )
    if len(own) > 1:
        gain = sum((n.us or 0.0) * (1 - (n.roofline or 0.0)) for n in own.values())
        text = (
            f"{len(own)} kernels are so short that their launches set their time: {_part(_sum(own.values()), total)}."
        )
        advice = "A larger batch gives each one more work (--shape); independent ones can run side by side (--streams)."
        yield Finding(text, advice, gain, tuple(own))


# ---------------------------------------------------------------- the network as a whole


def _library_layouts(report: _Row) -> Iterable[Finding]:
    own = [row for row in report.get("layers") or () if row.get("name") == LAYOUT and "share" in row]
    if own:
        us, share = 1e3 * sum(r["median_ms"] for r in own), sum(r["share"] for r in own)
        text = f"The library changes layouts between its kernels: {us / 1e3:.3g} ms, {share:.1%} of the run."
        advice = "Another library may keep one layout: compare --tactics openvino with --tactics onnxruntime."
        yield Finding(text, advice, us)


def _held_back(net: Network, report: _Row) -> Iterable[Finding]:
    """Operators that precision auto keeps in a slower precision, for accuracy."""
    by_name = net.by_onnx_node()
    slow: dict[str, tuple[float, list[int]]] = {}
    for row in (report.get("auto") or {}).get("nodes", ()):
        us = row.get("us") or {}
        own = us.get(row["precision"])
        if own is not None and own > min(us.values()):
            gain, nodes = slow.get(row["precision"], (0.0, []))
            nodes += [k for n in row["nodes"] for k in by_name.get(n, ())]
            slow[row["precision"]] = (gain + own - min(us.values()), nodes)
    for precision, (gain, nodes) in slow.items():
        n = len(set(nodes))
        text = f"{counted(n, 'operator stays', 'operators stay')} in {precision} to keep the accuracy: {gain:.1f} µs."
        yield Finding(text, "A larger --max-drop lets more of them run in fewer bits.", gain, tuple(sorted(set(nodes))))


def _whole(report: _Row) -> Iterable[Finding]:
    """Findings about whole runs: another precision, another runtime, copies around the run."""
    beside = (report.get("build") or report).get("beside_fp32")
    if beside is not None and beside["slower"]:
        gain = 1e3 * (beside["own"]["median_ms"] - beside["fp32"]["median_ms"])
        text = slower_text(beside).removeprefix("warning: ")
        yield Finding(f"{text[:1].upper()}{text[1:]}.", "Build it with --precision fp32 on this machine.", gain)
    rows = {r["name"]: r for r in report.get("rows", ())}
    for v in report.get("versus", ()):
        if v["verdict"] == "slower":
            own, other = rows[report["subject"]]["median_ms"], rows[v["against"]]["median_ms"]
            text = f"{v['against']} is {times(1 / v['speedup'])} as fast: it takes {milliseconds(other)} ms."
            advice = "Look at the operators that take most of the time in the network below."
            yield Finding(text, advice, 1e3 * (own - other))
    gpu = report.get("gpu") or {}
    if "h2d_ms" in gpu:
        copies = gpu["h2d_ms"]["median"] + gpu["d2h_ms"]["median"]
        if copies > 0.1 * gpu["gpu_compute_ms"]["median"]:
            text = f"Copies to and from the GPU take {copies:.3g} ms, its own work {gpu['gpu_compute_ms']['median']:.3g} ms."
            yield Finding(text, "Keep arrays on the GPU between calls: context.bind.", 1e3 * copies)


def _refused(net: Network, report: _Row) -> Iterable[Finding]:
    """Refused rewrites, by the part of the run that their operators take. The gain of a rewrite that was not made is not known."""
    by_name = net.by_onnx_node()
    groups: dict[tuple[str, str], list[_Row]] = {}
    for p in (report.get("build") or report).get("passes") or ():
        for entry in p["refused"]:
            groups.setdefault((p["name"], entry["rule"]), []).append(entry)
    told = []
    for (name, rule), entries in groups.items():
        nodes = sorted({k for e in entries for n in e["nodes"] for k in by_name.get(n, ())})
        share = sum(net.nodes[k].share or 0.0 for k in nodes)
        if share > LEAST:
            reason = Counter(e["reason"] for e in entries).most_common(1)[0][0]
            number = counted(len(entries), "rewrite")
            text = f"{number} by {name}/{rule} refused, at operators that take {share:.1%} of the run."
            more = "The reason of most" if len({e["reason"] for e in entries}) > 1 else "The reason"
            told.append(Finding(text, f"{more}: {reason}.", None, tuple(nodes), share))
    return sorted(told, key=lambda f: -(f.share or 0.0))[:REFUSALS]


def _not_measured() -> Finding:
    text = "The times of steps are predicted by the cost model, not measured."
    return Finding(text, "On the machine with the GPU: optdnn retune ENGINE, then optdnn bench ENGINE --html FILE.")


def slower_steps(rows: Sequence[_Row], net: Network) -> list[Finding]:
    """Findings about two engines: the steps that take longer in B, each with its operators. ``rows``: name, a and b (µs; None:
    not there)."""
    by_name: dict[str, list[int]] = {}
    for k, node in net.operators():
        by_name.setdefault(node.name, []).append(k)
    found = []
    for row in rows:
        a, b = row["a"], row["b"]
        if a is not None and b is not None and b > a:
            text = f"{row['name']} takes {b:.4g} µs in B and {a:.4g} µs in A."
            advice = "Select it to see its tactic in B; the table of tactics shows what A ran."
            found.append(Finding(text, advice, b - a, tuple(by_name.get(row["name"], ()))))
    return sorted(found, key=lambda f: -(f.gain_us or 0.0))
