"""How an engine runs the nodes of its ONNX model, and why: the facts of ``optdnn explain`` and of reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from optdnn.passes.support.precision import pin_of
from optdnn.runtime.program import Program

SHOWN = 8
"""Most names of other nodes that an explanation lists of one step."""

_ByNode = dict[str, list[dict[str, Any]]]


class Explanations:
    """The facts of every node, from an engine's program and the ``report`` of its build (empty where there is none).

    All facts are indexed by node once, so that the facts of all nodes of a large network take little time.
    """

    def __init__(self, program: Program, report: Mapping[str, Any]):
        meta = program.meta
        precision = meta.get("precision", {})
        self.program, self.report = program, report
        self._steps: dict[str, list[int]] = {}
        for k, step in enumerate(program.steps):
            for name in dict.fromkeys(step.src):
                self._steps.setdefault(name, []).append(k)
        self._made = _entries(meta.get("passes", ()), "fired")
        self._refused = _entries(meta.get("passes", ()), "refused")
        self._auto = _by_node(meta.get("auto", {}).get("nodes", ()), _nodes)
        self._differs = _by_node(precision.get("differs", ()), _nodes)
        self._remarks = _by_node([r for kind in ("hazards", "risks") for r in precision.get(kind, ())], _nodes)
        self._tactics = _by_node(_rows(meta.get("tactics")), lambda t: (*t.get("nodes", ()), *t.get("with", ())))
        self._tried = _by_node(_rows(report.get("tuning", {}).get("problems")), _nodes)
        self._lost = _by_node(_rows(meta.get("first_run", {}).get("lost")), _nodes)
        self._on_cpu = _by_node(meta.get("host", {}).get("operators", ()), _nodes)
        nodes = precision.get("nodes")
        self._runs: dict[str, list[str]] | None = None if nodes is None else {}
        for p, names in (nodes or {}).items():
            for name in dict.fromkeys(names):
                self._runs.setdefault(name, []).append(p)  # type: ignore[union-attr]

    def of(self, name: str) -> dict[str, Any]:
        """Everything that the engine, and the report of its build, know of one ONNX node."""
        steps = self.program.steps
        return {
            "node": name,
            "steps": [
                {
                    "step": k,
                    "executor": steps[k].executor,
                    "with": [n for n in steps[k].src if n != name][:SHOWN],
                    "nodes": len(steps[k].src),
                }
                for k in self._steps.get(name, ())
            ],
            "made": self.made(name),
            "refused": self.refused(name),
            "precision": self.of_precision(name),
            "tactics": self.of_tactics(name),
            "unusable": self.unusable(name),
            "whole": self.whole(),
            "on_cpu": self._on_cpu.get(name, []),
        }

    def made(self, name: str) -> list[dict[str, Any]]:
        """The rewrites that a node took part in."""
        return [_beside(entry, name) for entry in self._made.get(name, ())]

    def refused(self, name: str) -> list[dict[str, Any]]:
        """The rewrites that were refused, each with its reason."""
        return [_beside(entry, name) for entry in self._refused.get(name, ())]

    def of_precision(self, name: str) -> dict[str, Any]:
        """The precision that a node runs in, and why; ``account``: the row of the search of precision auto."""
        auto = next(iter(self._auto.get(name, ())), None)
        account = None if auto is None else {"node": auto["precision"], "reason": auto["reason"], "account": auto}
        own = account or self._precision(name)
        return {
            "engine": self.program.precision,
            **own,
            "differs": self._differs.get(name, []),
            "remarks": self._remarks.get(name, []),
        }

    def of_tactics(self, name: str) -> list[dict[str, Any]]:
        """The decisions on the tactics of a node."""
        return self._tactics.get(name, [])

    def tried(self, name: str) -> list[dict[str, Any]]:
        """The rows of tuning whose candidates were measured at a node."""
        return self._tried.get(name, [])

    def unusable(self, name: str) -> list[dict[str, str]]:
        """The candidates that hung, crashed, wrote elsewhere or were wrong when the build tried them, each with why."""
        found = {c: why for p in self._tried.get(name, ()) for c, why in p.get("failed", {}).items()}
        found |= {r["candidate"]: r["why"] for r in self._lost.get(name, ())}
        return [{"candidate": c, "why": why} for c, why in found.items()]

    def whole(self) -> dict[str, Any] | None:
        """The tactic that runs the network as a whole (cpu), and its rivals, if the report is available."""
        meta = self.program.meta
        if "tactic" not in meta:
            return None
        return {"tactic": meta["tactic"], "rivals": list(_rows(self.report.get("tactics")))}

    def _precision(self, name: str) -> dict[str, Any]:
        """The precision that a node runs in, and why; empty if the engine does not record one for each node."""
        if self._runs is None:
            return {}
        runs = self._runs.get(name, [])
        if not runs:
            return {"node": "its neighbors'", "reason": "it has no computation"}
        plan = self.program.meta["precision"].get("plan", {})
        pin = pin_of(plan.get("nodes", {}), (name,))
        asked = plan["nodes"][pin] if pin is not None else plan.get("default", "")
        if runs == [asked]:
            reason = "pinned" if pin is not None else "as asked of the whole network"
        else:
            chosen = self.program.meta.get("mixture", {}).get("nodes", {})
            reason = chosen.get(name) or f"asked for {asked}" + (", pinned" if pin is not None else "")
        return {"node": " and ".join(runs), "reason": reason}


def _nodes(row: Mapping[str, Any]) -> Iterable[str]:
    return tuple(row["nodes"])


def _by_node(rows: Iterable[Any], names: Callable[[Any], Iterable[str]]) -> _ByNode:
    """Node -> its rows, each once."""
    found: _ByNode = {}
    for row in rows:
        for name in dict.fromkeys(names(row)):
            found.setdefault(name, []).append(row)
    return found


def _entries(passes: Sequence[Mapping[str, Any]], what: str) -> _ByNode:
    return _by_node([{"pass": p["name"], **entry} for p in passes for entry in p[what]], _nodes)


def _beside(entry: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {**entry, "with": [n for n in entry["nodes"] if n != name]}


def _rows(found: Any) -> Sequence[Mapping[str, Any]]:
    return [r for r in found if isinstance(r, Mapping)] if isinstance(found, Sequence) else []
