"""``optdnn demo``: the whole workflow on shipped networks, for a first look."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import numpy as np

from optdnn.cli import demo_text as text
from optdnn.cli.common import give_json, now, progress
from optdnn.cli.options import Command, Integer, json_option, option, output_option
from optdnn.errors import NotMet, UnsupportedError
from optdnn.temporary import temporary_folder
from optdnn.types import Array

MAX_ERROR = 1e-4
"""Largest difference from ONNX Runtime's outputs, over the largest output, that counts as right."""
ROUNDS = 10
SECONDS, RESNET_SECONDS = 0.8, 3.0
"""How long each candidate is measured, over all rounds: turns of 80 ms, and of a dozen calls of ResNet-50."""
BATCH = 32
"""Pictures per call where latencies are taken: one alone takes microseconds, most of them Python's."""
REPORT = Path("optdnn-demo.html")
Say = Callable[[str], None]


@click.command("demo", cls=Command)
@option("--threads", type=Integer(min=1), metavar="N", help="Threads of each candidate.  [default: all usable cores]")
@output_option(f"The HTML report of the comparison (extra report).  [default: {REPORT}, in this folder]")
@json_option
def command(threads: int | None, output: Path | None, json_file: Path | None) -> None:
    """Build, save, load and run the shipped networks, and compare them with ONNX Runtime: a first look.

    Small trained networks are judged by their accuracy on held-out data, a ResNet-50 by its outputs. The exit code is 7 if
    an accuracy is too low or an error too large.
    """
    from optdnn import __version__
    from optdnn.compare.rivals import check_rivals
    from optdnn.models import trained
    from optdnn.report import check_outputs
    from optdnn.runtime.measuring.machine import machine, usable_cores, versions

    check_rivals(["onnxruntime"], has_model=True)
    can_report = find_spec("jinja2") is not None
    told = str(json_file) != "-"
    report = output or (REPORT if told and can_report else None)
    check_outputs({"html": report})
    threads = threads or usable_cores()
    facts: dict[str, Any] = {"networks": [], "threads": threads, "machine": machine(), "versions": versions()}
    if told:
        text.show_begin(facts, __version__, BATCH)
    with temporary_folder("optdnn-demo-") as folder, progress("demo") as say:
        for name in trained.NAMES:
            facts["networks"].append(_trained(name, Path(folder), threads, say))
        if told:
            text.show_trained(facts["networks"])
        facts["resnet50"] = _resnet(Path(folder), threads, say, report)
    if not give_json(facts, json_file):
        text.show_resnet(facts["resnet50"])
        text.show_chart([*facts["networks"], facts["resnet50"]])
        text.show_next(None if report is None else str(report), can_report)
    _judge(facts)


# ---------------------------------------------------------------- the work


def _raced(
    path: Path,
    title: str,
    feeds: Mapping[str, Array],
    batch: Mapping[str, Array],
    threads: int,
    seconds: float,
    folder: Path,
    say: Say,
) -> tuple[Array, dict[str, Any]]:
    """Build, save and load a network: its one output on ``feeds``, and the comparison with ONNX Runtime on ``batch``."""
    import optdnn
    from optdnn.compare.comparison import compare
    from optdnn.compare.subject import build_subject
    from optdnn.config import BuildOptions

    def tell(line: str) -> None:
        say(f"{title}: {line}")

    say(title)
    subject = build_subject(path, BuildOptions(target="cpu", threads=threads), folder, tell)
    (logits,) = optdnn.load(subject.engine, threads=threads).run(feeds).values()
    outcome = compare(
        subject,
        ["onnxruntime"],
        given=batch,
        error_reference="onnxruntime",
        threads=threads,
        rounds=ROUNDS,
        duration=seconds,
        say=tell,
    )
    return logits, outcome.to_plain()


def _trained(name: str, folder: Path, threads: int, say: Say) -> dict[str, Any]:
    """One trained network: its accuracy and latency."""
    from optdnn.models import trained

    path, x, y, accuracy = trained.load(name)
    try:
        logits, outcome = _raced(path, name, {"x": x}, {"x": x[:BATCH]}, threads, SECONDS, folder, say)
    except UnsupportedError as error:
        kinds = sorted({n.op_type for n in error.nodes})
        return {"name": name, "unsupported": kinds or [error.message.splitlines()[0]]}
    right = int((logits.argmax(axis=1) == y).sum())
    return {
        "name": name,
        "pictures": y.size,
        "right": right,
        "accuracy": right / y.size,
        "recorded_accuracy": accuracy,
        "operators_before": _count(outcome["build"]["passes"][0]["kinds_before"]),
        "operators_after": _count(outcome["build"]["operators"]),
        **_figures(outcome),
    }


def _resnet(folder: Path, threads: int, say: Say, report: Path | None) -> dict[str, Any]:
    """A ResNet-50 from ONNX: its outputs and latency compared with ONNX Runtime's, also in an HTML ``report``."""
    import onnx

    from optdnn.models import zoo
    from optdnn.report import write_reports

    say("ResNet-50: make the model")
    proto = zoo.build("resnet50", batch=1)
    feeds = zoo.example_inputs(proto)
    path = folder / "resnet50.onnx"
    onnx.save(proto, path)
    logits, outcome = _raced(path, "ResNet-50", feeds, feeds, threads, RESNET_SECONDS, folder, say)
    write_reports(outcome | {"command": "optdnn demo", "time": now()}, {"html": report})
    passes = outcome["build"]["passes"]
    return {
        "name": "resnet50",
        "nodes": _count(passes[0]["kinds_before"]),
        "operators_after": _count(outcome["build"]["operators"]),
        "bn_before": passes[0]["kinds_before"].get("BatchNormalization", 0),
        "bn_after": outcome["build"]["operators"].get("BatchNormalization", 0),
        "passes": [{"pass": p["name"], "made": len(p["fired"]), "refused": len(p["refused"])} for p in passes],
        "tactics": outcome["build"]["tactics"],
        "tactic": outcome["build"]["tactic"]["name"],
        "engine_bytes": outcome["engine_bytes"],
        "build_seconds": sum(outcome["build"]["seconds"].values()),
        "top_class": int(np.argmax(logits)),
        "input_difference": outcome["input_difference"],
        **_figures(outcome),
    }


def _count(kinds: Mapping[str, int]) -> int:
    return sum(kinds.values())


def _figures(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """Latencies and errors of the two, and their speedup."""
    ours, other = outcome["rows"]
    return {
        "median_ms": ours["median_ms"],
        "onnxruntime_median_ms": other["median_ms"],
        "max_rel_err": ours["max_rel_err"],
        "versus": outcome["versus"][0] if outcome["versus"] else None,
        "error": ours["error"] or other["error"],
    }


def _judge(facts: Mapping[str, Any]) -> None:
    """Raise NotMet where something is not as it should be."""
    missed = []
    for n in facts["networks"]:
        if "unsupported" in n:
            continue
        if n["right"] < round(n["recorded_accuracy"] * n["pictures"]) - max(1, n["pictures"] // 2000):  # a tie
            missed.append(
                f"{n['name']} gets {n['right']} of {n['pictures']} right, less than {n['recorded_accuracy']:.2%}"
            )
    for n in (*facts["networks"], facts["resnet50"]):
        error = n.get("max_rel_err")
        if "unsupported" not in n and (error is None or error > MAX_ERROR):
            missed.append(f"{n['name']}: outputs differ from ONNX Runtime's by {error}, allowed is {MAX_ERROR:g}")
        if n.get("error"):
            missed.append(f"{n['name']}: {n['error']}")
    difference = facts["resnet50"]["input_difference"]
    if difference is not None and difference < 100 * MAX_ERROR:
        missed.append(f"resnet50: another picture changes the outputs by only {difference:.1g}")
    if missed:
        raise NotMet("\n  ".join(["the demo did not go as it should:", *missed]))
