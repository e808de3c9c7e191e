"""``optdnn inspect``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from optdnn.cli.bench_tables import show_cliffs
from optdnn.cli.common import give_json, is_engine, print_host, reading_record, stdout, table
from optdnn.cli.options import FILE, Command, json_option, option
from optdnn.cli.precision import show_auto
from optdnn.cli.words import precision_text
from optdnn.report.words import counted

if TYPE_CHECKING:
    from optdnn.runtime.program import Program


SHOWN = 200
"""Characters of a metadata field that are shown."""


@click.command("inspect", cls=Command)
@click.argument("file", metavar="MODEL|ENGINE", type=FILE)
@option("--nodes", is_flag=True, help="List a model's nodes by name, as --pin and explain take them.")
@json_option
def command(file: Path, nodes: bool, json_file: Path | None) -> None:
    """Show what is in a model (operators, shapes) or in an engine (options, passes with their refusals, precisions, steps)."""
    if not is_engine(file):
        facts = _model_facts(file, nodes=nodes)
        if not give_json(facts, json_file):
            _show(facts)
        return
    with reading_record(file):
        facts = _engine_facts(file)
        if not give_json(facts, json_file):
            _show(facts)


def _engine_facts(file: Path) -> dict[str, Any]:
    from optdnn.runtime.cuda.measuring.expected import expected_cliffs
    from optdnn.runtime.file.format import read

    program = read(file)
    d = program.dynamic
    return {
        "kind": "engine",
        "file": str(file),
        "bytes": file.stat().st_size,
        "target": program.target,
        "precision": program.precision,
        "precision_text": precision_text(program.precision, program.meta),
        "requires": list(program.requires),
        "inputs": [str(s) for s in (d.inputs if d else [s for s, _ in program.inputs])],
        "outputs": [str(s) for s in (d.outputs if d else [s for s, _ in program.outputs])],
        **(
            {"profiles": [", ".join(f"{n}={r}" for n, r in p.items()) for p in program.profiles]}
            if program.profiles
            else {}
        ),
        **({"plans_by_value_of": list(program.by_value.inputs)} if program.by_value is not None else {}),
        **({"plans": [*map(_plan, (program, *d.plans))], "later_plans": later_plans(program)} if d else {}),
        "steps": [_step(program, k) for k in range(len(program.steps))],
        "cliffs": expected_cliffs(program),
        "weights_bytes": sum(b.nbytes for b in program.blobs),
        "arena_bytes": d.arena_bytes if d else program.arena_bytes,
        **{k: v for k, v in program.meta.items() if k not in ("graph", "network", "held_model")},
        "retunable": "graph" in program.meta,
    }


def _plan(plan: Program) -> dict[str, Any]:
    """The inputs of a plan, and how its tactics were chosen: by "measurement" or by "the cost model"."""
    return {"inputs": [str(s) for s, _ in plan.inputs], "chosen_by": plan.meta.get("planned", {}).get("by", "unknown")}


def later_plans(program: Program) -> str:
    """How an engine for ranges of sizes gets plans for further sizes, in words."""
    assert program.dynamic is not None
    if program.dynamic.source is None:
        return "none: the engine does not hold its model, and runs only at the sizes of its plans"
    if not program.dynamic.source.options.get("nearest_tactics", True):
        return "when first seen, by the cost model"
    tuned = any(_plan(p)["chosen_by"] == "measurement" for p in (program, *program.dynamic.plans))
    return f"when first seen, with the tactics of the nearest {'tuned ' if tuned else ''}plan or predicted faster ones"


def _step(program: Program, k: int) -> dict[str, Any]:
    """A step: its executor, its operator, and the bytes that it copies between the GPU and the host."""
    step = program.steps[k]
    found: dict[str, Any] = {"executor": step.executor, "nodes": list(step.src)}
    if program.lanes:
        found |= {"lane": program.lanes[k].lane, "after": list(program.lanes[k].after)}
    if step.executor == "copy":
        to = step.params["to"]
        buffer = program.buffers[(step.outputs if to == "host" else step.inputs)[0]]
        return {**found, "op": f"to the {'CPU' if to == 'host' else 'GPU'}", "bytes": buffer.nbytes}
    kind = step.params.get("kind") or step.params.get("op", {}).get("kind")
    tactic = step.params.get("tactic")
    found |= {"tactic": tactic} if isinstance(tactic, str) else {}
    return {**found, "op": kind} if isinstance(kind, str) else found


def _model_facts(file: Path, *, nodes: bool) -> dict[str, Any]:
    from optdnn.importers.draws import with_draws
    from optdnn.importers.onnx import import_model
    from optdnn.ir.graph import STRUCTURAL

    graph = import_model(with_draws(file, 0))
    constants = [op.attrs.value for op in graph.of_kind("Constant")]
    return {
        "kind": "model",
        "file": str(file),
        "bytes": file.stat().st_size,
        "name": graph.name,
        **({"description": dict(graph.description)} if graph.description else {}),
        "inputs": [f"{graph.op(i).outputs[0].name}: {graph.op(i).outputs[0].type}" for i in graph.inputs],
        "outputs": [f"{graph.op(i).outputs[0].name}: {graph.op(i).outputs[0].type}" for i in graph.outputs],
        "operators": graph.kinds(),
        "nodes": len(graph),
        "parameters": int(sum(c.size for c in constants)),
        "critical_path": sum(op.kind not in STRUCTURAL for op in graph.critical_path()),
        **({"names": [[op.kind, op.name] for op in graph.order() if op.src]} if nodes else {}),
    }


def _show(facts: dict[str, Any]) -> None:
    shown = _shown(facts)
    labels = {k: "precision" if k == "precision_text" else k.replace("_", " ") for k in shown}
    simple = [[labels[k], v] for k, v in facts.items() if k in shown and isinstance(v, (str, int, float))]
    stdout.print(table(None, ["", ""], simple))
    _show_description(facts)
    for key in ("inputs", "outputs", "profiles", "plans_by_value_of", "requires"):
        if facts.get(key):
            stdout.print(f"{key.replace('_', ' ')}: {', '.join(facts[key])}")
    if facts.get("plans"):
        rows = [[", ".join(p["inputs"]), p["chosen_by"]] for p in facts["plans"]]
        stdout.print(
            table("\nplans", ["inputs", "tactics chosen by"], [*rows, ["any other in range", facts["later_plans"]]])
        )
    if facts.get("operators"):
        rows = sorted(facts["operators"].items(), key=lambda item: (-item[1], item[0]))
        stdout.print(table("\noperators", ["kind", "count"], rows, right=[1]))
    if facts.get("names"):
        stdout.print(table("\nnodes", ["operator", "name"], facts["names"]))
    if facts.get("passes"):
        _show_passes(facts["passes"])
    if facts.get("auto"):
        show_auto(facts["auto"], nodes=True)
    if facts.get("steps"):
        rows = [
            [i, s["executor"], s.get("op", ""), s.get("tactic", ""), s.get("bytes", ""), len(s["nodes"])]
            for i, s in enumerate(facts["steps"])
        ]
        columns = ["step", "executor", "operator", "tactic", "bytes copied", "ONNX nodes"]
        if any("lane" in s for s in facts["steps"]):
            columns += ["lane", "waits for"]
            rows = [
                [*row, s["lane"], ", ".join(map(str, s["after"]))] for row, s in zip(rows, facts["steps"], strict=True)
            ]
        stdout.print(table("\nsteps", columns, rows, right=[0, 4, 5, 6]))
    if facts.get("cliffs"):
        show_cliffs(facts["cliffs"])
    if facts.get("streams"):
        s = facts["streams"]
        predicted = f", {s['predicted_us']} us predicted, {s['one_lane_us']} in one" if "predicted_us" in s else ""
        why = f"; {s['why']}" if "why" in s else ""
        stdout.print(f"steps side by side: {counted(s['lanes'], 'lane')}{predicted}{why}")
    if facts.get("first_run"):
        told = facts["first_run"]
        reasons = [f"{form}: {why}" for form, why in told.get("refused", {}).items()]
        reasons += [f"not by {lost['candidate']}: {lost['why']}" for lost in told.get("lost", ())]
        stdout.print(f"on the GPU of its build it runs {told['form']}: {'; '.join(reasons)}")
    if facts.get("host"):
        print_host(facts["host"], facts["target"])


def _show_description(facts: Mapping[str, Any]) -> None:
    """What the model says about itself, a line for each field."""
    said = dict(facts.get("description") or facts.get("model", {}).get("description", {}))
    own = said.pop("custom_metadata_map", {})
    for name, value in [*((k.replace("_", " "), v) for k, v in said.items()), *own.items()]:
        text = " ".join(str(value).split())
        stdout.print(f"{name}: {text if len(text) <= SHOWN else text[:SHOWN] + ' …'}")


def _shown(facts: Mapping[str, Any]) -> set[str]:
    """The facts of this file to show: facts about GPUs only for a GPU's engine, and the precision only once."""
    on_gpu = str(facts.get("target", "")).startswith(("cuda", "simulate"))
    return set(facts) - {"precision"} - (set() if on_gpu else {"retunable", "arena_bytes"})


def _show_passes(passes: Sequence[Mapping[str, Any]]) -> None:
    """The rewrites of each pass in words, the idle passes in one line, and every refusal."""
    from optdnn.passes.support.words import in_words

    rows = [
        [
            p["name"],
            f"{p['nodes_before']} → {p['nodes_after']}",
            len(p["refused"]),
            "; ".join(in_words(f["rule"] for f in p["fired"])),
        ]
        for p in passes
        if p["fired"] or p["refused"]
    ]
    stdout.print(table("\npasses", ["pass", "operators", "refused", "made"], rows, right=[1, 2]))
    busy = {p["name"] for p in passes if p["fired"] or p["refused"]}
    idle = dict.fromkeys(p["name"] for p in passes if p["name"] not in busy)
    if idle:
        stdout.print(f"found nothing to do: {', '.join(idle)}")
    refused = [[p["name"], r["rule"], " + ".join(r["nodes"]), r["reason"]] for p in passes for r in p["refused"]]
    if refused:
        stdout.print(table("\nrefused", ["pass", "rule", "nodes", "because"], refused))
