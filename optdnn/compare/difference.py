"""The differences between two engines, two models, or an engine and a model: ``optdnn diff``.

The plain form is the output of ``--json``: ``a`` and ``b`` describe the files, ``tables`` holds the entries that differ,
``outputs`` and ``race`` the results on the same inputs and the times, ``not_run`` the reason if there are none.
"""

from __future__ import annotations

import filecmp
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optdnn.compare.divergence import finite
from optdnn.compiler import build
from optdnn.config import Progress
from optdnn.errors import OptdnnError
from optdnn.importers.draws import with_draws
from optdnn.importers.onnx import import_model
from optdnn.refitting.record import NETWORK, network_record
from optdnn.runtime.contexts.feeds import random_feeds
from optdnn.runtime.cuda.measuring.expected import expected_steps
from optdnn.runtime.file.format import is_engine, read
from optdnn.runtime.program import Plain, Program
from optdnn.runtime.racing.candidates import Candidate
from optdnn.runtime.racing.race import race
from optdnn.temporary import temporary_folder
from optdnn.types import Array, TensorSpec, raw_bytes

Table = Mapping[str, Any]
TABLES = {
    "facts": "facts",
    "options": "build options",
    "inputs": "inputs and outputs",
    "weights": "weights",
    "elements": "elements of weights (SHA-256)",
    "nodes": "nodes of the network",
    "operators": "operators (of an engine: after the passes)",
    "fusions": "rewrites of the passes",
    "precisions": "precisions",
    "tactics": "tactics",
    "times": "times of steps (µs)",
}
"""Table of a side -> its name in reports."""


@dataclass(frozen=True)
class Side:
    """One file: its tables (:data:`TABLES`), each from an entry's name to plain data; and its inputs."""

    path: Path
    is_engine: bool
    tables: Mapping[str, Table]
    inputs: tuple[TensorSpec, ...]
    program: Program | None = None

    @classmethod
    def read(cls, path: Path, shapes: Mapping[str, Any], random_seed: int = 0) -> Side:
        """The tables of a file. ``shapes`` fix the shapes of a model's inputs; its random operators draw from ``random_seed``.
        Raises EngineError, UsageError, ModelError."""
        return _engine(path) if is_engine(path) else _model(path, shapes, random_seed)


def _random_seed(*paths: Path) -> int:
    """The seed of the random operators: the engine's, if one of the files is an engine with a seed, otherwise 0."""
    engines = (read(path, verify=False) for path in paths if is_engine(path))
    seeds = (program.meta.get("options", {}).get("random_seed") for program in engines)
    return next((seed for seed in seeds if seed is not None), 0)


def _engine(path: Path) -> Side:
    program = read(path)
    meta, d = program.meta, program.dynamic
    inputs = d.inputs if d is not None else tuple(s for s, _ in program.inputs)
    outputs = d.outputs if d is not None else tuple(s for s, _ in program.outputs)
    steps = expected_steps(program)
    facts = {
        "kind": "engine",
        "target": program.target,
        "precision": program.precision,
        "optdnn": meta.get("optdnn"),
        "file bytes": path.stat().st_size,
        "weights bytes": sum(b.nbytes for b in program.blobs),
        "arena bytes": d.arena_bytes if d is not None else program.arena_bytes,
        "steps": len(program.steps),
        "lanes": 1 + max((slot.lane for slot in program.lanes), default=0),
        "plans": 1 + (0 if d is None else len(d.plans)),
        "tactic": meta.get("tactic", {}).get("name"),
        "expected ms": round(sum(s["us"] for s in steps) / 1e3, 4) if steps else None,
        "weights digest": meta.get("model", {}).get("digest"),
    }
    network = meta.get(NETWORK) or {}
    tables = {
        "facts": {k: v for k, v in facts.items() if v is not None},
        "options": _flat(meta.get("options", {})),
        "inputs": {s.name: str(s).removeprefix(f"{s.name}: ") for s in (*inputs, *outputs)},
        "weights": network.get("weights", {}),
        "nodes": network.get("nodes", {}),
        "operators": meta.get("operators", {}),
        "fusions": dict(_fusions(meta.get("passes", ()))),
        "precisions": _precisions(program),
        "tactics": _tactics(meta.get("tactics", ())),
        "times": _times(steps),
    }
    return Side(path, True, tables, inputs, program)


def _model(path: Path, shapes: Mapping[str, Any], random_seed: int) -> Side:
    graph = import_model(with_draws(path, random_seed), shapes=shapes)
    ports = [graph.op(i).outputs[0] for i in (*graph.inputs, *graph.outputs)]
    record = network_record(graph)
    facts = {
        "kind": "model",
        "file bytes": path.stat().st_size,
        "weights bytes": sum(op.attrs.value.nbytes for op in graph.of_kind("Constant")),
    }
    tables = {
        "facts": facts,
        "inputs": {p.name: str(p.type) for p in ports},
        "weights": record["weights"],
        "elements": {op.outputs[0].name: _digest(op.attrs.value) for op in graph.of_kind("Constant")},
        "nodes": record["nodes"],
        "operators": graph.kinds(),
    }
    return Side(path, False, tables, ())


def _digest(array: Array) -> str:
    return hashlib.sha256(raw_bytes(array)).hexdigest()[:16]


def _flat(table: Table, prefix: str = "") -> dict[str, Any]:
    """A nested table with one level: ``{"shapes.x": ...}``."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def _fusions(passes: Iterable[Mapping[str, Any]]) -> Iterable[tuple[str, int]]:
    """(pass, rule and nodes) -> how often the rule fired."""
    rules = ((one["name"], fired) for one in passes for fired in one["fired"])
    return Counter(f"{name}: {fired['rule']}: {' + '.join(fired['nodes'])}" for name, fired in rules).items()


def _precisions(program: Program) -> dict[str, str]:
    """Node -> precision, for an engine with several precisions; otherwise the precision of all nodes."""
    record = program.meta.get("precision", {})
    nodes = record.get("nodes")
    if nodes is None:
        return dict.fromkeys(record.get("runs", {}), "all nodes")
    return {name: precision for precision, names in nodes.items() for name in names}


def _tactics(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Nodes -> tactic and configuration."""
    return {
        f"{row['kind']} {' + '.join(row['nodes'])}": f"{row['tactic']} {row.get('config', row.get('variant', ''))}".rstrip()
        for row in rows
        if not row.get("dropped")
    }


def _times(steps: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Nodes -> microseconds that the plan expects: the sum over all steps of the same nodes."""
    found: dict[str, float] = {}
    for step in steps:
        name = " + ".join(step["src"]) or f"step {step['step']}"
        found[name] = round(found.get(name, 0.0) + step["us"], 4)
    return found


# ---------------------------------------------------------------- the difference


def difference(
    a: Path, b: Path, *, shapes: Mapping[str, Any], seed: int = 0, run: bool = True, duration: float = 1.0,
    say: Progress = lambda text: None,
) -> dict[str, Plain]:  # fmt: skip
    """The differences between two files, as plain data. ``run``: also their outputs on the same random inputs and, for two engines,
    their times (``duration`` seconds each)."""
    random_seed = _random_seed(a, b)
    sides = Side.read(a, shapes, random_seed), Side.read(b, shapes, random_seed)
    changed = {name: table for name in TABLES if (table := _changed(*(s.tables.get(name) for s in sides)))}
    plain: dict[str, Plain] = {
        "a": {"file": str(a), **sides[0].tables["facts"]},
        "b": {"file": str(b), **sides[1].tables["facts"]},
        "tables": changed,
        "same_bytes": filecmp.cmp(a, b, shallow=False),
        "outputs": None,
        "race": None,
        "not_run": None,
    }
    if not run:
        return plain | {"not_run": "not asked for"}
    try:
        found: dict[str, Plain] = finite(plain | _ran(sides, shapes, seed, random_seed, duration, say))
        return found
    except OptdnnError as error:
        return plain | {"not_run": error.message}


def _changed(a: Table | None, b: Table | None) -> list[dict[str, Plain]]:
    """The entries that differ, in the order of the files; none if a side has no such table."""
    if a is None or b is None:
        return []
    rows = ({"name": name, "a": a.get(name), "b": b.get(name)} for name in {**a, **b})
    return [row for row in rows if row["a"] != row["b"]]


def _ran(
    sides: tuple[Side, Side], shapes: Mapping[str, Any], seed: int, random_seed: int, duration: float, say: Progress
) -> dict[str, Plain]:
    """``outputs`` (the distance of B's outputs from A's), and ``race`` (times of two engines).

    ``seed`` is the seed of the inputs, ``random_seed`` the seed of the models' random operators."""
    with temporary_folder() as folder:
        files, inputs, feeds = [], [], {}
        for name, side in zip("ab", sides, strict=True):
            path, specs = side.path, side.inputs
            if not side.is_engine:
                say(f"evaluate {side.path.name} in NumPy")
                path = Path(folder) / f"{name}.engine"
                engine = build(side.path, target="reference", opt_level=0, shapes=shapes, random_seed=random_seed)
                engine.save(path)
                specs = engine.inputs
            files.append(path)
            inputs.append(specs)
        if [(s.name, s.dtype) for s in inputs[0]] != [(s.name, s.dtype) for s in inputs[1]]:
            return {"not_run": "their inputs have other names or types"}
        feeds = _feeds(sides, inputs, seed)
        timing = all(s.is_engine for s in sides)
        outcome = race(
            [Candidate(name, "engine", str(path)) for name, path in zip("ab", files, strict=True)],
            feeds, other_feeds=None, error_reference="a", speedup_reference="a", turn_s=duration / 10, timing=timing, progress=say,
        )  # fmt: skip
    first, second = outcome.rows
    failed = next((f"{n}: {r.error}" for n, r in zip("AB", (first, second), strict=True) if r.error), None)
    if failed is not None:
        return {"not_run": failed}
    found: dict[str, Plain] = {
        "outputs": {"max_abs_err": second.max_abs_err, "max_rel_err": second.max_rel_err, "seed": seed}
    }
    if timing and first.stats is not None and second.stats is not None:
        found["race"] = {
            "a_ms": first.stats.median,
            "b_ms": second.stats.median,
            "speedup": second.speedup,
            "range": list(second.speedup_range or ()),
            "verdict": second.verdict,
        }
    return found


def _feeds(sides: tuple[Side, Side], inputs: list[tuple[TensorSpec, ...]], seed: int) -> dict[str, Array]:
    """The same random inputs for both sides, with the sizes of the side that fixes them, otherwise of the first side."""
    fixed = [all(isinstance(d, int) for s in specs for d in s.shape) for specs in inputs]
    k = fixed.index(True) if True in fixed else 0
    program = sides[k].program
    typical: Any = None if program is None else program.meta.get("sizes")
    return random_feeds(inputs[k], seed=seed, profiles=() if program is None else program.profiles, typical=typical)
