"""``optdnn demo``: the whole job on networks that are at hand, for a first look."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np

from optdnn.cli.common import print_json, progress, stdout, table
from optdnn.errors import NotMet, UnsupportedError

MAX_ERROR = 1e-4
"""Largest difference from ONNX Runtime in ResNet-50's outputs, over the largest output, that counts as right."""
ROUNDS = 8
BATCH = 32
"""Pictures per call where latencies are taken: one alone takes microseconds, most of them Python's."""
Say = Callable[[str], None]


@click.command("demo")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of each candidate (all usable cores).")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def command(threads: int | None, as_json: bool) -> None:
    """Build, save, load and run the shipped networks, and hold them against ONNX Runtime: a first look.

    Small networks that were really trained are judged by their accuracy on held-out data, a ResNet-50 by its outputs. Exit
    code 7 where an accuracy or an error is not what it should be.
    """
    from optdnn import __version__
    from optdnn.comparison import check_rivals
    from optdnn.models import trained
    from optdnn.runtime.machine import machine, usable_cores, versions

    check_rivals(["onnxruntime"], has_model=True)
    threads = threads or usable_cores()
    facts: dict[str, Any] = {"networks": [], "threads": threads, "machine": machine(), "versions": versions()}
    if not as_json:
        stdout.print(f"optdnn {__version__} on {facts['machine']['cpu']}, {threads} threads each\n")
        stdout.print(
            f"1. Small networks, really trained: accuracy on held-out pictures of digits, latency of {BATCH} at once\n"
        )
    with tempfile.TemporaryDirectory(prefix="optdnn-demo-") as folder, progress("demo") as say:
        for name in trained.NAMES:
            facts["networks"].append(_trained(name, Path(folder), threads, say))
        if not as_json:
            _show_trained(facts["networks"])
            stdout.print("\n2. ResNet-50: 3 x 224 x 224 pictures, seeded weights, BatchNormalization still separate\n")
        facts["resnet50"] = _resnet(Path(folder), threads, say)
    if as_json:
        print_json(facts)
    else:
        _show_resnet(facts["resnet50"])
        _show_next()
    _judge(facts)


# ---------------------------------------------------------------- the work


def _trained(name: str, folder: Path, threads: int, say: Say) -> dict[str, Any]:
    """Build, save, load and run one trained network; its accuracy and latency."""
    import optdnn
    from optdnn.comparison import build_subject, compare
    from optdnn.config import BuildOptions
    from optdnn.models import trained

    path, x, y, accuracy = trained.load(name)
    say(name)
    try:
        subject = build_subject(
            path, BuildOptions(target="cpu", threads=threads), folder, lambda text: say(f"{name}: {text}")
        )
    except UnsupportedError as error:
        kinds = sorted({n.op_type for n in error.nodes})
        return {"name": name, "unsupported": kinds or [error.message.splitlines()[0]]}
    engine = optdnn.load(subject.engine, threads=threads)
    (given,) = engine.inputs
    (logits,) = engine.run({given.name: x}).values()
    right = int((logits.argmax(axis=1) == y).sum())
    outcome = compare(
        subject,
        ["onnxruntime"],
        given={given.name: x[:BATCH]},
        error_reference="onnxruntime",
        threads=threads,
        rounds=ROUNDS,
        duration=0.4,
        say=lambda text: say(f"{name}: {text}"),
    ).to_plain()
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


def _resnet(folder: Path, threads: int, say: Say) -> dict[str, Any]:
    """Build, save, load and run a ResNet-50 from ONNX; its outputs and latency beside ONNX Runtime's."""
    import onnx

    import optdnn
    from optdnn.comparison import build_subject, compare
    from optdnn.config import BuildOptions
    from optdnn.models import zoo

    say("ResNet-50: make the model")
    proto = zoo.build("resnet50", batch=1)
    feeds = zoo.example_inputs(proto)
    onnx.save(proto, folder / "resnet50.onnx")
    say("ResNet-50")
    options = BuildOptions(target="cpu", threads=threads)
    subject = build_subject(folder / "resnet50.onnx", options, folder, lambda text: say(f"ResNet-50: {text}"))
    loaded = optdnn.load(subject.engine, threads=threads)
    (logits,) = loaded.run(feeds).values()
    outcome = compare(
        subject,
        ["onnxruntime"],
        given=feeds,
        error_reference="onnxruntime",
        threads=threads,
        rounds=ROUNDS,
        duration=2.0,
        say=lambda text: say(f"ResNet-50: {text}"),
    ).to_plain()
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


# ---------------------------------------------------------------- what is said


def _show_trained(networks: list[dict[str, Any]]) -> None:
    rows = [
        [
            n["name"],
            f"{n['right']} of {n['pictures']} ({n['accuracy']:.2%})",
            f"{n['recorded_accuracy']:.2%}",
            f"{n['operators_before']} → {n['operators_after']}",
            _ms(n["median_ms"]),
            _ms(n["onnxruntime_median_ms"]),
            _speedup(n["versus"]),
        ]
        for n in networks
        if "unsupported" not in n
    ]
    columns = ["network", "right", "when trained", "operators", "optdnn ms", "onnxruntime ms", "speedup"]
    stdout.print(table(None, columns, rows, right=range(1, 6)))
    for n in networks:
        if "unsupported" in n:
            stdout.print(f"{n['name']}: its {', '.join(n['unsupported'])} come in a later release")


def _show_resnet(r: Mapping[str, Any]) -> None:
    made = ", ".join(f"{p['pass']} {p['made']}" for p in r["passes"] if p["made"])
    refused = sum(p["refused"] for p in r["passes"])
    tried = ", ".join(f"{t['tactic']} {_ms(t.get('median_ms'))} ms" for t in r["tactics"] if "median_ms" in t)
    folded = r["bn_before"] - r["bn_after"]
    stdout.print(f"built in {r['build_seconds']:.1f} s, saved ({r['engine_bytes'] / 2**20:.0f} MiB), loaded, run")
    stdout.print(
        f"operators: {r['nodes']} → {r['operators_after']}; {folded} of {r['bn_before']} BatchNormalizations folded"
    )
    stdout.print(f"rewrites: {made}; {refused} candidates refused, each with its reason in the engine")
    stdout.print(f"tactics tried: {tried}; kept {r['tactic']}")
    stdout.print(
        f"latency: optdnn {_ms(r['median_ms'])} ms, ONNX Runtime {_ms(r['onnxruntime_median_ms'])} ms: {_speedup(r['versus'])}"
    )
    if r["max_rel_err"] is not None and r["input_difference"] is not None:
        stdout.print(
            f"outputs: within {r['max_rel_err']:.1e} of ONNX Runtime's, relative to the largest "
            f"(another picture changes them by {r['input_difference']:.1g})"
        )


def _show_next() -> None:
    stdout.print("\nNext, with a model of your own:\n")
    stdout.print("    optdnn build your.onnx                         # makes your.engine")
    stdout.print("    optdnn run your.engine                         # on random inputs, or --input NAME=FILE.npy")
    stdout.print("    optdnn compare your.onnx --html report.html    # speed and accuracy beside other runtimes")


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _speedup(versus: Mapping[str, Any] | None) -> str:
    if versus is None:
        return "not measured"
    low, high = versus["range"]
    if versus["verdict"] == "unstable":
        return f"too unstable to rank ({low:.2f} to {high:.2f}×)"
    return f"{versus['speedup']:.2f}× ({low:.2f} to {high:.2f})"


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
        missed.append(f"resnet50: another picture changes the outputs by {difference:.1g} alone")
    if missed:
        raise NotMet("\n  ".join(["the demo did not go as it should:", *missed]))
