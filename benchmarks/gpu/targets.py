"""The networks that optdnn is held to on a GPU: ours, the libraries alone and PyTorch, side by side.

    python benchmarks/gpu/targets.py --out targets.json                          # every row, by the cost model
    python benchmarks/gpu/targets.py --tune 12 --timing-cache times.json --engines ours,untuned,libraries --out targets.json
    python benchmarks/gpu/targets.py --only bert_base:32 --compile --out c.json  # torch.compile too: see compiled.py for all rows
    python benchmarks/gpu/targets.py --growth resnet50 --growth bert_base --out growth.json

Engines are built from the zoo's ONNX in parallel; those that tune take turns on the GPU, with each other and with what measures.
One process measures, a row at a time as engines are ready: first whether it is right (against the module in fp32), then its GPU
time: replays of a CUDA graph on arrays that lie on the GPU, each between two events, in turns with the others of its row. What
fails is a row with its error. Times measured in tuning are added to the file of ``--timing-cache``: with those it takes a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Row:
    """A network of the zoo at a size, with the milliseconds to reach, and what they were measured beside."""

    model: str
    batch: int
    precision: str = "fp16"
    reach: float | None = None
    moonshot: float | None = None
    settings: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        extra = "".join(f":{v}" for v in self.settings.values())
        return f"{self.model}:{self.batch}{extra}" + ("" if self.precision == "fp16" else f":{self.precision}")


BERT = {"sequence_length": 128}
ROWS = (
    Row("resnet50", 1, reach=0.22, moonshot=0.13),
    Row("resnet50", 8, reach=0.40, moonshot=0.28),
    Row("resnet50", 32, reach=1.0, moonshot=0.7),
    Row("resnet50", 128, reach=3.1, moonshot=2.2),
    Row("resnet50", 128, "int8+fp16", reach=2.1, moonshot=1.4),
    Row("mobilenet_v2", 1, reach=0.15, moonshot=0.10),
    Row("mobilenet_v2", 128, reach=1.6, moonshot=1.1),
    Row("efficientnet_b0", 1, reach=0.25, moonshot=0.16),
    Row("efficientnet_b0", 128, reach=2.6, moonshot=1.8),
    Row("densenet121", 1, reach=0.45, moonshot=0.30),
    Row("vgg16", 1, reach=0.20, moonshot=0.12),
    Row("vit_b_16", 1, reach=0.35, moonshot=0.25),
    Row("vit_b_16", 32, reach=2.2, moonshot=1.7),
    Row("bert_base", 1, reach=0.33, moonshot=0.22, settings=BERT),
    Row("bert_base", 32, reach=1.9, moonshot=1.4, settings=BERT),
    Row("bert_base", 32, "fp8+fp16", reach=1.4, moonshot=1.0, settings=BERT),  # faster than fp16
    Row("lstm", 1, reach=0.40, moonshot=0.25),
    Row("lstm", 32, reach=0.55, moonshot=0.35),
)
GROWTH = {
    "resnet50": [Row("resnet50", n) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)],
    "bert_base": [
        Row("bert_base", 1, settings={"sequence_length": n, "max_positions": 2048})
        for n in (32, 64, 128, 256, 512, 1024, 2048)
    ],
}
ENGINES = {"ours": "auto", "untuned": "auto", "own": "own", "libraries": "cudnn,cublaslt"}
"""Candidate -> whose kernels its engine may run on. "untuned" is never tuned: beside the others, where these are."""
LIBRARIES = ("_cudnn", "_cublaslt")
"""How the names of tactics end that call a library."""
SHARE = {"untuned": 0.0, "libraries": 0.2}
"""How much of the time for tuning a candidate gets, if not all: the libraries' few algorithms were measured for "ours" before."""


# ---------------------------------------------------------------- preparing: no GPU needed, unless tactics are measured


def prepare(
    row: Row, arch: str, folder: Path, engines: Sequence[str], timing_cache: str | None, tune: float
) -> dict[str, Any]:
    """Build and save the row's engines, inputs and weights; ``tune``: seconds for the first of the engines."""
    import numpy as np
    from onnx import numpy_helper

    import optdnn
    from optdnn.models import zoo

    model = zoo.build(row.model, batch=row.batch, **row.settings)
    for seed, what in ((1, "in"), (2, "other")):
        np.savez(folder / f"{row.name}.{what}.npz", **zoo.example_inputs(model, seed=seed))  # type: ignore[arg-type]
    weights = folder / f"{state_name(row)}.npz"
    if not weights.exists():
        part = folder / f"{state_name(row)}.{os.getpid()}.npz"
        np.savez(part, **{t.name: numpy_helper.to_array(t) for t in model.graph.initializer})  # type: ignore[arg-type]
        part.rename(weights)
    found: dict[str, Any] = {}
    for name in engines:
        start = time.perf_counter()
        seconds = tune * SHARE.get(name, 1.0)
        if name == "libraries" and row.precision != "fp16":
            continue  # they have no tactics of 8 bits here
        try:
            asked = ENGINES[name]
            if not seconds:  # by the cost model, which knows our own kernels; of the libraries', what they rank first
                asked = "heuristic" if asked == "auto" else f"heuristic,{asked}"
            options: dict[str, Any] = {"tactics": asked, "budget": seconds or None}
            if "8" in row.precision:
                options |= {"calib": [zoo.example_inputs(model, seed=3)], "calib_cache": folder / f"{row.name}.ranges"}
            if timing_cache:
                options["timing_cache"] = timing_cache
            engine = optdnn.build(model, target=arch, precision=row.precision, io_dtype="fp16", **options)
            engine.save(folder / f"{row.name}.{name}.engine")
            p = engine.program
            found[name] = {
                "build_s": round(time.perf_counter() - start, 2),
                "steps": len(p.steps),
                "kernels": len(p.kernels),
                "arena_bytes": p.arena_bytes,
                "library_steps": sum(s.params.get("tactic", "").split(" ")[0].endswith(LIBRARIES) for s in p.steps),
            }
            tuning: Any = engine.report.get("tuning") if engine.report else None
            if tuning:
                found[name]["tuning"] = {k: tuning.get(k) for k in ("cached", "seconds", "stopped", "providers")}
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"[:600]}
    return found


def state_name(row: Row) -> str:
    """Rows of one name have the same weights."""
    kept = {k: v for k, v in row.settings.items() if k != "sequence_length"}
    return "-".join([row.model, *map(str, kept.values()), "weights"])


# ---------------------------------------------------------------- the command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="rows whose name begins so, e.g. bert_base:32")
    parser.add_argument("--growth", action="append", default=[], choices=list(GROWTH), help="these series instead")
    parser.add_argument("--engines", default="ours,libraries", help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--compile", action="store_true", help="torch.compile too: minutes for each row")
    parser.add_argument("--no-torch", action="store_true", help="neither eager nor compiled")
    parser.add_argument("--budget", type=float, default=240, help="seconds, after which no further row is begun")
    parser.add_argument("--row-budget", type=float, default=60, help="seconds that measuring one row may take")
    parser.add_argument("--turn", type=float, default=0.06, help="seconds of one turn of one candidate")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--flush-l2", action="store_true", help="empty L2 before each run")
    parser.add_argument("--arch", default="cuda:sm_90a")
    parser.add_argument("--timing-cache")
    parser.add_argument(
        "--tune", type=float, default=0, metavar="S", help="tune each engine for so many seconds (default: not)"
    )
    parser.add_argument("--workers", type=int, default=max(2, (os.cpu_count() or 2) * 5 // 8))
    parser.add_argument("--out", type=Path, default=Path("targets.json"))
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        row = Row(**json.loads(options.child))
        engines = options.engines.split(",")
        found = prepare(row, options.arch, options.folder, engines, options.timing_cache, options.tune)
        print("ROW " + json.dumps(found))
        return
    rows = [r for name in options.growth for r in GROWTH[name]] or list(ROWS)
    if options.only:
        rows = [r for r in rows if any(r.name.startswith(o) for o in options.only)]
    begin = time.perf_counter()
    options.deadline, options.gpus = begin + options.budget, gpus()
    report: dict[str, Any] = {**facts(), "l2": "flushed" if options.flush_l2 else "warm", "tune_s": options.tune}
    done: dict[Row, dict[str, Any]] = {}
    measurer = Measurer()
    measurer.start()

    def keep(row: Row, found: dict[str, Any]) -> None:
        done[row] = {"name": row.name, **asdict(row), **found}
        print(f"{time.perf_counter() - begin:6.1f} s  {line(done[row])}", flush=True)
        report["rows"] = [done[r] for r in rows if r in done]
        report["seconds"] = round(time.perf_counter() - begin, 1)
        options.out.write_text(json.dumps(report, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(options.workers) as pool:
        folder = Path(name)
        made = {
            pool.submit(child, row, folder, options): row for row in sorted(rows, key=lambda r: r.precision == "fp16")
        }
        with suppress(TimeoutError):
            for future in as_completed(made, timeout=options.budget):
                if time.perf_counter() < options.deadline:
                    keep(made[future], measured(made[future], future, folder, measurer, options))
        for future, row in made.items():
            future.cancel()
            if row not in done:
                keep(row, {"error": f"not begun within {options.budget:g} s"})
    measurer.close()


def measured(
    row: Row, future: Future[dict[str, Any]], folder: Path, measurer: Measurer, options: argparse.Namespace
) -> dict[str, Any]:
    """The row's results; never raises."""
    try:
        built = future.result()
        usable = [e for e, facts in built.items() if "error" not in facts]
        order = {
            "row": asdict(row),
            "folder": str(folder),
            "engines": usable,
            "torch": [] if options.no_torch else ["eager", *(["compile"] if options.compile else [])],
            "turn": options.turn,
            "rounds": options.rounds,
            "flush_l2": options.flush_l2,
        }
        waiting = options.tune * len(ROWS)  # for those that tune
        answer = measurer.ask(order, 900 if options.compile else options.row_budget + waiting)
        for name, facts in built.items():
            answer.setdefault("candidates", {})[name] = {**answer.get("candidates", {}).get(name, {}), **facts}
        for file in folder.glob(f"{row.name}.*"):
            file.unlink()
        ours = answer["candidates"].get("ours", {}).get("median_ms")
        if ours is not None and row.reach is not None:
            answer["met"] = ours <= row.reach and "error" not in answer["candidates"]["ours"]
        return answer
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:600]}


merging = threading.Lock()
"""Held by who adds to the file of measured times."""


def child(row: Row, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """:func:`prepare` in a process of its own, until the deadline."""
    command = [sys.executable, __file__, "--child", json.dumps(asdict(row)), "--folder", str(folder)]
    command += ["--arch", options.arch, "--engines", options.engines, "--tune", str(options.tune)]
    times = folder / f"{row.name}.times"
    if options.timing_cache:  # each its own, since several write at once
        if Path(options.timing_cache).exists():
            shutil.copy(options.timing_cache, times)
        command += ["--timing-cache", str(times)]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "2" if row.precision == "fp16" else "8")
    if len(options.gpus) > 1:  # the first one measures; where others are, they tune
        others = options.gpus[1:]
        threads["CUDA_VISIBLE_DEVICES"] = others[sum(map(ord, row.name)) % len(others)]
    limit = max(1.0, options.deadline - time.perf_counter())
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit, env={**os.environ, **threads}, check=False
        )
    finally:  # what was measured until the deadline is of use, too
        with merging:
            if times.exists():
                merge(times, Path(options.timing_cache))
    last = [text for text in done.stdout.splitlines() if text.startswith("ROW ")]
    if not last:
        raise RuntimeError(f"building failed: {(done.stderr or done.stdout)[-500:]}")
    found: dict[str, Any] = json.loads(last[-1][4:])
    return found


def merge(source: Path, target: Path) -> None:
    """Add the measured times of one timing cache to another."""
    from optdnn.tactics.timing_cache import TimingCache

    found = TimingCache.open(source)
    found.path, found.changed = target, True
    found.save()


class Measurer:
    """The process that holds the GPU; a fresh one after each that failed."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self._up = False

    def start(self) -> None:
        """Begin to load what it needs, unless it has."""
        if self.process is None:
            self._up = False
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "measure_row.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )

    def ask(self, order: dict[str, Any], limit: float) -> dict[str, Any]:
        """Measure one row. Raises RuntimeError where the process ends, or takes longer than ``limit`` seconds (to start: 120)."""
        self.start()
        if not self._up:
            self._line("UP", 120)
            self._up = True
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._line("ANSWER ", limit)[7:])
        if answer.pop("fatal", False):
            self.close()
        return answer

    def _line(self, beginning: str, limit: float) -> str:
        """Its next line that begins so; the process ends where it does not come in time."""
        process = self.process
        assert process is not None
        with ThreadPoolExecutor(1) as pool:
            try:
                text = pool.submit(self._next, beginning).result(timeout=limit)
            except TimeoutError:
                text = ""
                process.kill()
        if not text:
            code, self.process = process.wait(), None
            raise RuntimeError(f"the measuring process ended with code {code} (limit {limit:g} s)")
        return text

    def _next(self, beginning: str) -> str:
        assert self.process is not None
        assert self.process.stdout is not None
        return next((text for text in self.process.stdout if text.startswith(beginning)), "")

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def line(row: dict[str, Any]) -> str:
    """A row in one line of text."""
    found = row.get("candidates", {})
    parts = [
        f"{name} {c['median_ms']:.4f}" if "median_ms" in c else f"{name}: {c.get('error', '?')[:90]}"
        for name, c in found.items()
    ]
    errors = [f"{name} err {c['error_rel']:.1e}" for name, c in found.items() if c.get("error_rel") is not None]
    reach = f"  (reach {row['reach']})" if row.get("reach") else ""
    failed = f"  ERROR {row['error'][:300]}" if row.get("error") else ""
    return f"{row['name']:24s}{reach}  {', '.join(parts)}  [{', '.join(errors)}]{failed}"


def gpus() -> list[str]:
    """The GPUs of this machine, as CUDA_VISIBLE_DEVICES names them."""
    try:
        done = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False)
    except OSError:
        return []
    return re.findall(r"UUID: (GPU-[0-9a-f-]+)", done.stdout)


def _short(word: str) -> str:
    """A word of a command without the folders of this machine."""
    return Path(word).name if word.startswith("/") else word


def facts() -> dict[str, Any]:
    """Where and how it was measured."""
    found = {}
    for package in ("torch", "torchvision", "transformers", "cupy-cuda13x", "nvidia-cudnn-cu13", "nvidia-cublas",
                    "nvidia-cudnn-frontend", "nvidia-cuda-nvrtc", "cuda-bindings", "onnxruntime", "numpy"):  # fmt: skip
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    smi = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        gpu = subprocess.run(smi, capture_output=True, text=True, check=False).stdout.splitlines()[0].split(", ")
    except (OSError, IndexError):
        gpu = ["?", "?"]
    commit = os.environ.get("OPTDNN_COMMIT") or subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=HERE, check=False
    ).stdout.strip()  # fmt: skip
    path = Path(sys.argv[0]).resolve()
    script = f"gpu/{path.name}" if path.parent == HERE else path.name
    return {
        "command": " ".join(["python", f"benchmarks/{script}", *map(_short, sys.argv[1:])]),
        "commit": commit,
        "date": time.strftime("%F"),
        "gpu": gpu[0],
        "driver": gpu[-1],
        "python": platform.python_version(),
        "versions": found,
    }


if __name__ == "__main__":
    main()
