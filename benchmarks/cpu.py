"""Race optdnn against ONNX Runtime and OpenVINO on the CPU over many networks, through ``optdnn compare``.

    python benchmarks/cpu.py MODEL.onnx… [--shared] [--light] [--precision fp32] --out benchmarks/results/cpu-fp32.json

``--shared`` adds the convolutional graphs of ``../shared`` (weights refilled from a seed), ``--light`` the onnx wheel's
``light_*`` graphs, ``--zoo NAME,NAME`` networks of ``optdnn.models.zoo``; for int8 these are calibrated on sixteen example
inputs (``--precision int8 --zoo resnet50,mobilenet_v2 --out …``). Writes every comparison whole, and a summary: per network the
speedup against each rival and against the faster of the two, and the geometric means. Leave the machine alone while it runs.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from optdnn.models import zoo

SAMPLES = 16
"""Inputs that a network of the zoo is calibrated on."""
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "networks")]

from support.light import LIGHT_MODELS, light  # noqa: E402 (the tests' folder is no package)
from support.shared import shared_network  # noqa: E402
from test_end_to_end import CONVOLUTIONAL  # noqa: E402


def networks(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Path]]:
    """Name and file of each network, made when it is its turn."""
    makers: dict[str, Callable[[], onnx.ModelProto]] = {}
    if args.light:
        makers |= {name: partial(light, name) for name in LIGHT_MODELS}
    if args.shared:
        makers |= {
            n: partial(fixed, n, args.batch, folder) for n in (f"{n}.{e}" for n in CONVOLUTIONAL for e in ("ts", "dyn"))
        }
    for name in args.zoo.split(",") if args.zoo else ():
        model, file = zoo.build(name, batch=args.batch), folder / f"{name}.onnx"
        onnx.save(model, file)
        samples = [zoo.example_inputs(model, seed) for seed in range(SAMPLES)]
        np.savez(file.with_suffix(".npz"), **{k: np.concatenate([s[k] for s in samples]) for k in samples[0]})  # type: ignore[arg-type]
        yield name, file
    for file in map(Path, args.models):
        yield file.stem, file
    for name, make in makers.items():
        if args.only is None or args.only in name:
            file = folder / f"{name}.onnx"
            onnx.save(make(), file)
            yield name, file
            file.unlink()


def fixed(name: str, batch: int, folder: Path) -> onnx.ModelProto:
    """A shared graph with its symbolic dimensions fixed in the file itself, so that the rivals get fixed shapes as well."""
    model = shared_network(name, folder)
    constants = {t.name for t in model.graph.initializer}
    for value in model.graph.input:
        for d in value.type.tensor_type.shape.dim if value.name not in constants else ():
            if not d.HasField("dim_value"):
                d.dim_value = batch
    del model.graph.value_info[:]
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    return model


def compare(name: str, file: Path, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One ``optdnn compare``, as JSON."""
    out = folder / f"{name}.json"
    command = [sys.executable, "-m", "optdnn.cli", "compare", str(file), "--against", args.against]
    command += [
        "--precision",
        args.precision,
        "--threads",
        str(args.threads),
        "--error-reference",
        args.error_reference,
    ]
    if args.precision.startswith("int8"):
        command += ["--calib", str(file.with_suffix(".npz"))]
    command += ["--duration", str(args.duration), "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr}")
    result: dict[str, Any] = json.loads(out.read_text())
    for long in ("passes", "pass_seconds", "operators"):  # every rewrite of every network: not what is measured here
        result.get("build", {}).pop(long, None)
    shown = " ".join(["optdnn", *command[3:]]).replace(str(folder) + "/", "")
    return {"network": name, **result, "command": shown}


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Per network, rival over ours: the median over rounds of the ratio within a round (as ``compare`` has it), so that a
    machine that slows down for a while hits all alike; then geometric means."""
    rows = []
    for r in results:
        rounds = {row["name"]: row["round_medians_ms"] for row in r["rows"]}
        ours = next(row for row in r["rows"] if row["name"].startswith("optdnn"))
        rivals = {
            name: statistics.median(b / a for a, b in zip(ours["round_medians_ms"], theirs, strict=False))
            for name, theirs in rounds.items()
            if name != ours["name"] and theirs
        }
        row = {"network": r["network"], "optdnn_ms": ours["median_ms"], "over": rivals}
        rows.append({**row, "over_faster": min(rivals.values())})
    names = sorted({n for row in rows for n in row["over"]})
    means = {n: geometric(row["over"][n] for row in rows if n in row["over"]) for n in names}
    return {"rows": rows, "geomean": {**means, "faster of them": geometric(row["over_faster"] for row in rows)}}


def geometric(values: Any) -> float:
    return math.exp(statistics.fmean(math.log(v) for v in values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--light", action="store_true")
    parser.add_argument("--zoo", help="names of zoo networks, with commas")
    parser.add_argument("--only", help="only networks whose name contains this")
    parser.add_argument("--against", default="onnxruntime,openvino")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--duration", type=float, default=2.5, help="seconds for each candidate")
    parser.add_argument("--error-reference", default="onnxruntime")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_intermixed_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name, file in networks(args, Path(folder)):
            results.append(compare(name, file, args, Path(folder)))
            row = summary(results[-1:])["rows"][0]
            over = ", ".join(f"{k} {v:.2f}x" for k, v in row["over"].items())
            print(f"{name:40s} {row['optdnn_ms']:9.3f} ms   over {over}", flush=True)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
    ).stdout.strip()
    totals = summary(results)
    facts = {
        "command": "python benchmarks/cpu.py " + " ".join(sys.argv[1:]),
        "commit": commit,
        "date": time.strftime("%F"),
    }
    args.out.write_text(json.dumps({**facts, "summary": totals, "comparisons": results}, indent=1) + "\n")
    print("geometric means:", ", ".join(f"{k} {v:.3f}x" for k, v in totals["geomean"].items()))


if __name__ == "__main__":
    main()
