"""What a user waits for, measured through the command line and the public API: builds, retuning, loading, calls, comparisons.

    python benchmarks/gpu/waits.py --out waits.json                     # everything: about three minutes
    python benchmarks/gpu/waits.py --parts build,load,call --out w.json

``build``: ResNet-50 with full autotune (or ``--budget`` seconds of it), cold caches, then warm ones (the same bytes?). ``load``:
``optdnn.load`` to the first result, in a fresh process, three times, and by stages. ``call``: what Python adds to the GPU's
time, with bound buffers and with GPU arrays.
``retune``: an engine that was built with the GPU hidden, then ``optdnn retune``. ``compare``: ``optdnn compare`` against our
kernels, the libraries, the PyTorch module, eager and compiled. A part that fails is a part with its error.
"""

from __future__ import annotations

import argparse
import json
import os
import pstats
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from targets import HERE, facts

CALLS = 400
OPTIMIZED = ["--target", "cuda", "--precision", "fp16", "--io-dtype", "fp16"]


def optdnn_command(*words: str, limit: float = 240, **environment: str) -> dict[str, Any]:
    """``optdnn WORDS``: seconds, exit code and text."""
    python = os.pathsep.join(p for p in (os.environ.get("PYTHONPATH"), str(HERE)) if p)
    start = time.perf_counter()
    words_run = ["timeout", f"{limit:g}", sys.executable, "-m", "optdnn.cli.main", *words]
    done = subprocess.run(
        words_run, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": python, **environment}
    )
    found = {"command": "optdnn " + " ".join(Path(w).name if w.startswith("/") else w for w in words)}
    return {
        **found, "seconds": round(time.perf_counter() - start, 2), "code": done.returncode, "out": done.stdout,
        "err": done.stderr[-1500:],
    }  # fmt: skip


def model(name: str, folder: Path) -> Path:
    """A network of the zoo as a file."""
    import onnx

    from optdnn.models import zoo

    path = folder / f"{name}.onnx"
    if not path.exists():
        onnx.save(zoo.build(name, batch=1), path)
    return path


# ---------------------------------------------------------------- the parts


def build(folder: Path) -> dict[str, Any]:
    """Cold, then warm; what was tried."""
    path, cache = model("resnet50", folder), str(folder / "cache")
    words = ("build", str(path), *OPTIMIZED, "--timing-cache", str(folder / "times.json"))
    words += ("--budget", os.environ["WAITS_BUDGET"]) if "WAITS_BUDGET" in os.environ else ()
    row: dict[str, Any] = {}
    for when in ("cold", "warm"):
        done = optdnn_command(*words, "-o", str(folder / f"{when}.engine"), OPTDNN_CACHE=cache)
        row[when] = {k: done[k] for k in ("command", "seconds", "code")} | (
            {"err": done["err"]} if done["code"] else {}
        )
        if done["code"]:
            return row
        report = json.loads((folder / f"{when}.engine.report.json").read_text())
        row[when] |= {"stages_s": report["seconds"], "tuning": summary(report.get("tuning"))}
    row["the_same_bytes"] = (folder / "cold.engine").read_bytes() == (folder / "warm.engine").read_bytes()
    return row


def summary(tuning: Any) -> dict[str, Any]:
    """Of a tuning: its course, and the tactics that were tried, failed and chosen, by problem."""
    if not tuning:
        return {}
    tried, failed, chosen = Counter[str](), Counter[str](), Counter[str]()
    for problem in tuning["problems"]:
        tried.update(name.split()[0] for name in problem["us"])
        failed.update(name.split()[0] for name in problem.get("failed", {}))
        chosen[problem["chosen"].split()[0]] += 1
    facts = {k: v for k, v in tuning.items() if k != "problems"}
    return {**facts, "problems": len(tuning["problems"]), "timed": tried, "failed": failed, "chosen": chosen}


LOAD = """
import sys, time
import numpy as np
start = time.perf_counter()
import optdnn
imported = time.perf_counter()
feeds = dict(np.load(sys.argv[2]))
if len(sys.argv) > 3:
    import cProfile
    profile = cProfile.Profile()
    profile.enable()
begin = time.perf_counter()
engine = optdnn.load(sys.argv[1])
loaded = time.perf_counter()
y = engine.run(feeds)
done = time.perf_counter()
if len(sys.argv) > 3:
    profile.disable()
    profile.dump_stats(sys.argv[3])
print(imported - start, loaded - begin, done - begin, all(np.isfinite(v).all() for v in y.values()))
"""
LOAD_STAGES = (
    ("read and verify the file", "format.py", "read"),
    ("imports", "<frozen importlib._bootstrap>", "_find_and_load"),
    ("wait for CUDA", "device.py", "open"),
    ("load kernels", "device.py", "__init__"),
    ("upload", "memory.py", "upload"),
    ("a context", "runner.py", "context"),
    ("capture and instantiate the graph", "graphs.py", "__init__"),
    ("the first run", "engine.py", "run"),
)
"""What a profile of the main thread says of a load: a name for it, file and function; one may hold another."""


def engine_of(folder: Path) -> Path:
    """ResNet-50's engine: the tuned one where it was built, else by the cost model."""
    path = folder / "cold.engine"
    if not path.exists():
        words = ("build", str(model("resnet50", folder)), *OPTIMIZED, "--tactics", "heuristic", "-o", str(path))
        if (done := optdnn_command(*words))["code"]:
            raise RuntimeError(done["err"])
    return path


def load(folder: Path) -> dict[str, Any]:
    """Seconds from ``optdnn.load`` to the first result as NumPy arrays, CUDA's own start included; each in a fresh process."""
    import numpy as np

    from optdnn.models import zoo

    path = engine_of(folder)
    feeds = {k: v.astype(np.float16) for k, v in zoo.example_inputs(zoo.build("resnet50", batch=1), seed=1).items()}
    np.savez(folder / "feeds.npz", **feeds)  # type: ignore[arg-type]
    found = []
    for k in range(4):
        words = [sys.executable, "-c", LOAD, str(path), str(folder / "feeds.npz")]
        words += [str(folder / "load.profile")] if k == 3 else []  # the profile slows it: it does not count
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            return {"error": done.stderr[-600:]}
        imported, loaded, first, finite = done.stdout.split()
        times = {"import_s": imported, "loaded_s": loaded, "load_to_result_s": first}
        found.append({**{name: round(float(t), 3) for name, t in times.items()}, "finite": finite})
    *runs, profiled = found
    stages = stages_of(folder / "load.profile")
    return {
        "runs": runs,
        "median_s": statistics.median(r["load_to_result_s"] for r in runs),
        "profiled": {**profiled, **stages},
    }


def stages_of(profile: Path) -> dict[str, float]:
    """Seconds of the stages of a load, of a profile."""
    found: dict[str, float] = {}
    for (file, _, function), (_, _, _, seconds, _) in pstats.Stats(str(profile)).stats.items():  # type: ignore[attr-defined]
        for name, wanted, what in LOAD_STAGES:
            if function == what and Path(file).name == wanted:
                found[name] = max(found.get(name, 0.0), round(seconds, 3))
    return found


def call(folder: Path) -> dict[str, Any]:
    """In microseconds, medians: the GPU's time; the host's part of a call; a call and the wait for its end; over the GPU's time."""
    import cupy
    import numpy as np

    import optdnn

    engine = optdnn.load(engine_of(folder))
    given = {s.name: cupy.asarray(np.random.default_rng(0).random(s.shape).astype(s.dtype)) for s in engine.inputs}
    context: Any = engine.context()
    stream = cupy.cuda.Stream(non_blocking=True)
    bound = context.bind(given)
    bound.run(stream)
    stream.synchronize()
    events = [cupy.cuda.Event() for _ in range(2)]

    def on_gpu() -> float:
        events[0].record(stream)
        bound.run(stream)
        events[1].record(stream)
        events[1].synchronize()
        return float(cupy.cuda.get_elapsed_time(*events)) * 1e3

    gpu = statistics.median(on_gpu() for _ in range(CALLS))
    row: dict[str, Any] = {"gpu_us": round(gpu, 2)}
    row["bound"] = timed(lambda: bound.run(stream), stream, gpu)
    null = cupy.cuda.Stream.null  # where a run without a stream goes
    row["context_with_gpu_arrays"] = timed(lambda: context.run(given), null, gpu)
    row["engine_with_gpu_arrays"] = timed(lambda: engine.run(given), null, gpu)
    return row


def timed(once: Callable[[], object], stream: Any, gpu: float) -> dict[str, float]:
    """``call_us``: until the call returns; ``done_us``: until the GPU is done; ``over_gpu_us``: of that, more than its time."""
    calls, whole = [], []
    for k in range(CALLS + 20):
        start = time.perf_counter_ns()
        once()
        returned = time.perf_counter_ns()
        stream.synchronize()
        if k >= 20:
            calls.append((returned - start) / 1e3)
            whole.append((time.perf_counter_ns() - start) / 1e3)
    done = statistics.median(whole)
    found = {"call_us": statistics.median(calls), "done_us": done, "over_gpu_us": done - gpu}
    return {k: round(v, 2) for k, v in found.items()}


def retune(folder: Path) -> dict[str, Any]:
    """Built with the GPU hidden, then tuned in place, libraries among the candidates."""
    path, hidden = folder / "hidden.engine", {"CUDA_VISIBLE_DEVICES": ""}
    words = (
        "build",
        str(model("mobilenet_v2", folder)),
        "--target",
        "cuda:sm_90a",
        "--precision",
        "fp16",
        "-o",
        str(path),
    )
    built = optdnn_command(*words, **hidden)
    row: dict[str, Any] = {"build": {k: built[k] for k in ("command", "seconds", "code")}}
    before = path.stat().st_mtime_ns if path.exists() else 0
    done = optdnn_command("retune", str(path), "--budget", "25", "--json")
    row |= {k: done[k] for k in ("command", "seconds", "code")} | ({"err": done["err"]} if done["code"] else {})
    if not done["code"]:
        found = json.loads(done["out"])
        row |= {k: found[k] for k in ("before_ms", "after_ms", "replaced")} | {"tuning": summary(found["tuning"])}
        row["file_changed"] = path.stat().st_mtime_ns != before
    row["runs"] = optdnn_command("run", str(path))["code"] == 0
    return row


def compare(folder: Path) -> list[dict[str, Any]]:
    """As a user would; the absent ONNX Runtime provider is asked for, too, alone."""
    rows = []
    short = ("--rounds", "4", "--duration", "0.4", "--json", "-")
    for name, words in (
        ("mobilenet_v2", ("--tactics", "heuristic", "--against", "onnxruntime-cuda")),
        ("lstm", ("--tactics", "heuristic", "--against", "own", "--torch", "torch_modules:lstm", "--torch-compile")),
        ("mobilenet_v2", ("--budget", "4", "--against", "own,cudnn", "--torch", "torch_modules:mobilenet_v2")),
    ):
        done = optdnn_command("compare", str(model(name, folder)), *OPTIMIZED, *words, *short, limit=90)
        row = {k: done[k] for k in ("command", "seconds", "code", "err")}
        if done["code"] == 0:
            report = json.loads(done["out"])
            keys = ("name", "median_ms", "p99_ms", "speedup", "max_rel_err", "error")
            row |= {"rows": [{k: r[k] for k in keys} for r in report["rows"]], "versions": report["versions"]}
        rows.append(row)
        print(f"  {json.dumps(row)[:1500]}", flush=True)
    return rows


PARTS: dict[str, Callable[[Path], Any]] = {
    "build": build, "load": load, "call": call, "retune": retune, "compare": compare,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="a copy of the timing cache that the build made")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, default=Path("waits.json"))
    parser.add_argument("--budget", help="seconds of tuning, for builds that are not about tuning")
    options = parser.parse_args()
    if options.budget:
        os.environ["WAITS_BUDGET"] = options.budget
    report: dict[str, Any] = facts()
    with tempfile.TemporaryDirectory() as folder:
        for name in options.parts.split(","):
            start = time.perf_counter()
            try:
                report[name] = PARTS[name](Path(folder))
            except Exception as error:
                report[name] = {"error": f"{type(error).__name__}: {error}"[:800]}
            print(f"{name} ({time.perf_counter() - start:.1f} s): {json.dumps(report[name])[:2500]}", flush=True)
            options.out.write_text(json.dumps(report, indent=1) + "\n")
        if options.keep and (times := Path(folder) / "times.json").exists():
            shutil.copy(times, options.keep)


if __name__ == "__main__":
    main()
