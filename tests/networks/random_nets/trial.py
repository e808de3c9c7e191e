"""One trial: draw a network, ask the oracle, build and run, judge."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from optdnn.errors import InputError, InternalError, OptdnnError, RunError
from random_nets import targets
from random_nets.draw import Array, Network
from random_nets.families import network
from random_nets.judge import judged
from random_nets.oracle import NoOracleError, Oracle
from random_nets.targets import Setting, UnsteadyError

GOOD = ("right", "edge", "oracle", "beyond_fp16", "explained", "no_oracle", "refused")
"""Verdicts that are no failure. A refusal is one of our errors with a reason; it is listed, too."""
FAILED = ("wrong", "disputed", "unsteady", "run_error", "foreign", "crashed", "hung", "generator")
"""``run_error``: a RunError of ours on inputs that ONNX Runtime accepts."""

Say = Callable[[str], None]


def trial(net: Network, setting: Setting, say: Say = lambda stage: None) -> dict[str, Any]:
    """The verdict on one network: ``verdict``, ``detail``, seconds per stage. ``say`` gets the name of each stage when it
    begins."""
    row: dict[str, Any] = {"name": net.name, "setting": str(setting)}
    stage, start = "oracle", time.perf_counter()

    def begin(name: str) -> None:
        nonlocal stage, start
        now = time.perf_counter()
        seconds[stage.split()[0]] = round(seconds.get(stage.split()[0], 0.0) + now - start, 3)
        stage, start = name, now
        say(name)

    seconds: dict[str, float] = {}
    say(stage)
    try:
        oracle = Oracle(net.model)
        want = [oracle.run(f) for f in net.feeds]
        begin("build")
        engine = targets.build(setting, net)
        begin("run")
        with np.errstate(all="ignore"):
            got = targets.run(setting, engine, net.feeds, begin)
            begin("judge")
            rounds = len(got) // len(net.feeds)  # two for an engine with plans by value
            calibration = targets.options(setting, net).get("calib", ())
            precision = targets.judged_as(setting, net)
            verdict = judged(oracle, net.feeds * rounds, got, want * rounds, precision, calibration)
        row.update(verdict=verdict.kind, detail=verdict.detail)
        if verdict.kind == "wrong" and setting.target.startswith("cuda") and not net.sizes:
            begin("steps")
            row["detail"] += "; " + targets.culprits(engine, net.feeds[0])
    except NoOracleError as error:
        row.update(verdict="no_oracle", detail=str(error))
    except UnsteadyError as error:
        row.update(verdict="unsteady", detail=str(error))
    except Exception as error:  # any error of the build or the run is a result of the trial
        row.update(verdict=_kind(error), detail=f"{stage}: {_error_text(error)}")
    begin("end")
    row["seconds"] = {k: s for k, s in seconds.items() if s >= 0.001}
    return row


def _kind(error: Exception) -> str:
    if not isinstance(error, OptdnnError) or isinstance(error, InternalError):
        return "foreign"
    return "run_error" if isinstance(error, RunError) and not isinstance(error, InputError) else "refused"


def _error_text(error: BaseException) -> str:
    """The error with the place in the code that raised it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "random_nets" not in f.filename]
    where = f"{'/'.join(Path(frames[-1].filename).parts[-2:])}:{frames[-1].lineno}" if frames else "?"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]} [{where}]"


def filed_trial(path: Path, setting: Setting, say: Say = lambda stage: None) -> dict[str, Any]:
    """The verdict on a network in a file, with its inputs in a second file (:func:`saved`)."""
    return trial(opened(path), setting, say)


def saved(net: Network, path: Path) -> None:
    """Write ``path`` (.onnx) and an .npz with the inputs beside it: "NAME" of the first run, "NAME@k" of later ones."""
    path.write_bytes(net.model.SerializeToString())
    arrays = {n if k == 0 else f"{n}@{k}": a for k, feed in enumerate(net.feeds) for n, a in feed.items()}
    np.savez_compressed(path.with_suffix(".npz"), **arrays)  # type: ignore[arg-type]


def opened(path: Path) -> Network:
    """The network that :func:`saved` wrote."""
    model = onnx.load(path)
    feeds: list[dict[str, Array]] = [{}]
    if path.with_suffix(".npz").exists():
        with np.load(path.with_suffix(".npz")) as arrays:
            for key in arrays.files:
                name, _, k = key.rpartition("@") if "@" in key else (key, "", "0")
                feeds += [{} for _ in range(int(k) + 1 - len(feeds))]
                feeds[int(k)][name] = arrays[key]
    symbols = any(d.dim_param for i in model.graph.input for d in i.type.tensor_type.shape.dim)
    return Network(path.stem, model, tuple(feeds), ({},) * len(feeds) if symbols else ())


def drawn_trial(family: str, seed: int, setting: Setting, say: Say = lambda stage: None) -> dict[str, Any]:
    """The verdict on one seed; "generator" if the network itself is not valid."""
    say("draw")
    try:
        net = network(family, seed)
    except Exception as error:  # defects of the generator count like any other failure
        row = {
            "name": f"{family}-{seed}",
            "setting": str(setting),
            "verdict": "generator",
            "detail": _error_text(error),
        }
    else:
        row = trial(net, setting, say)
    return {"family": family, "seed": seed, **row}
