"""``optdnn explain``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from optdnn.cli.common import give_json, is_engine, reading_record, stdout, table
from optdnn.cli.options import Command, engine_argument, json_option
from optdnn.errors import UsageError, did_you_mean
from optdnn.report.explanation import SHOWN, Explanations
from optdnn.report.words import counted, first_of

if TYPE_CHECKING:
    from optdnn.runtime.program import Program


@click.command("explain", cls=Command)
@engine_argument
@click.argument("node", default="*")
@click.option("--tactics", is_flag=True, help="Also the tactics that cannot run the node, with their reasons.")
@json_option
def command(engine: Path, node: str, tactics: bool, json_file: Path | None) -> None:
    """Show how an ENGINE runs a NODE of its ONNX model, and why.

    Shows the step that runs it, its rewrites and the refused ones, its precision with the reason, and its tactic with those that
    it beat. NODE is the name of an ONNX node; * and ? match anything. If more than 8 nodes match, they are only listed.
    Without NODE, all nodes match.
    """
    from optdnn.runtime.file.format import read

    if not is_engine(engine):
        raise UsageError(f"{engine} is not an engine", hint="optdnn build MODEL, then optdnn explain MODEL.engine NODE")
    program = read(engine, verify=False)
    with reading_record(engine):
        _tell(engine, program, node, json_file, tactics=tactics)


def _tell(engine: Path, program: Program, node: str, json_file: Path | None, *, tactics: bool) -> None:
    from optdnn.runtime.engine import saved_report

    names = _matches(program, node)
    known = Explanations(program, saved_report(engine))
    facts = [known.of(name) for name in names]
    if give_json(facts, json_file):
        return
    if len(facts) > SHOWN:
        _list(facts, node)
        return
    for k, fact in enumerate(facts):
        if k:
            stdout.print()
        _show(fact, tactics=tactics)


def _matches(program: Program, pattern: str) -> list[str]:
    """The ONNX nodes that match a name or pattern. Raises UsageError if there are none."""
    names = dict.fromkeys(n for s in program.steps for n in s.src)
    for p in program.meta.get("passes", ()):
        for entry in (*p["fired"], *p["refused"]):
            names |= dict.fromkeys(entry["nodes"])
    found = [n for n in names if n == pattern] or [n for n in names if fnmatchcase(n, pattern)]
    if not found:
        meant = did_you_mean(pattern.strip("*"), names, 3)
        raise UsageError(
            f"the engine knows no ONNX node {pattern!r}" + (f"; {meant}" if meant else ""),
            hint="names are those of the model that it was built from; * matches anything",
        )
    return found


# ---------------------------------------------------------------- on the terminal


def _list(facts: Sequence[Mapping[str, Any]], pattern: str) -> None:
    """One line for each of many nodes."""
    stdout.print(f"{pattern!r} fits {len(facts)} nodes; name one of them, or at most {SHOWN} by a narrower pattern\n")
    rows = [
        [
            f["node"],
            ", ".join(str(s["step"]) for s in f["steps"]) or "none",
            len(f["made"]),
            len(f["refused"]),
            f["precision"].get("node", f["precision"]["engine"]),
        ]
        for f in facts
    ]
    stdout.print(
        table(None, ["ONNX node", "step", "rewrites", "refused", "precision"], rows, right=[1, 2, 3], clip=[0])
    )


def _show(fact: Mapping[str, Any], *, tactics: bool) -> None:
    stdout.print(fact["node"])
    if fact["steps"]:
        for s in fact["steps"]:
            others = f", with {first_of(s['with'], 4, s['nodes'] - 1)}" if s["with"] else ""
            stdout.print(f"  runs in step {s['step']} ({s['executor']}){others}")
    else:
        stdout.print("  runs in no step: passes removed it (see below), or folded it into constants")
    for entry in fact["made"]:
        others = f" with {first_of(entry['with'], 4)}" if entry["with"] else ""
        stdout.print(f"  {entry['pass']}/{entry['rule']}{others}")
    for entry in fact["refused"]:
        stdout.print(f"  refused: {entry['pass']}/{entry['rule']}: {entry['reason']}")
    precision = fact["precision"]
    if "node" in precision:
        stdout.print(f"  precision {precision['node']}: {precision['reason']}")
        _show_account(precision.get("account", {}))
    else:
        stdout.print(f"  precision: the engine's, {precision['engine']}")
    for d in precision["differs"]:
        stdout.print(f"  asked for {d['asked']}, runs in {d['runs']}: {d.get('reason', '')}")
    for r in precision["remarks"]:
        stdout.print(f"  {r['what']}")
    for t in fact["tactics"]:
        _show_tactic(t, refused=tactics)
    for u in fact["unusable"]:
        stdout.print(f"  not usable: {u['candidate']}: {u['why']}")
    for o in fact["on_cpu"]:
        stdout.print(f"  on the CPU: {o['why']}")
    if fact["whole"]:
        _show_whole(fact["whole"])


def _show_account(account: Mapping[str, Any]) -> None:
    sensitivity = account.get("sensitivity", {})
    times, tactics = account.get("us", {}), account.get("tactics", {})
    rows = []
    for p in dict.fromkeys([*times, *sensitivity]):
        s = sensitivity.get(p, {})
        rows.append(
            [
                p,
                f"{times[p]:.1f}" if p in times else "–",
                tactics.get(p, ""),
                _figure(s.get("error"), s),
                _figure(s.get("noise"), s),
                _figure(s.get("drop"), s),
                s.get("hazard", ""),
            ]
        )
    if rows:
        columns = ["  precision", "µs", "by", "own error", "noise at outputs", "drop alone", ""]
        stdout.print(table(None, columns, [[f"  {r[0]}", *r[1:]] for r in rows], right=[1, 3, 4, 5]))


def _figure(value: float | None, row: Mapping[str, Any]) -> str:
    return ("not finite" if row else "0") if value is None else f"{value:.2g}"


def _show_tactic(t: Mapping[str, Any], *, refused: bool) -> None:
    config = f" {t['config']}" if t.get("config") else ""
    what = (
        "dropped, another launch computes it"
        if t.get("dropped")
        else counted(t.get("launches", 0), "launch", "launches")
    )
    stdout.print(f"  tactic {t['tactic']}{config}: {what}")
    others = t.get("refused", ())
    if others and not refused:
        stdout.print(f"  {counted(len(others), 'other tactic')} cannot run it (--tactics: why)")
    for r in others if refused else ():
        stdout.print(f"  not {r['tactic']}: {r['reason']}")


def _show_whole(whole: Mapping[str, Any]) -> None:
    tactic = whole["tactic"]
    stdout.print(f"  tactic {tactic['name']} for the network as a whole")
    for r in whole["rivals"]:
        if r.get("tactic") != tactic["name"]:
            said = f"refused: {r['refused']}" if r.get("refused") else f"{r['median_ms']:.3f} ms"
            stdout.print(f"    it beat {r['tactic']}: {said}")
        elif r.get("median_ms") is not None:
            stdout.print(f"    {r['median_ms']:.3f} ms")
