"""Builds a network by optdnn for a target and runs it on all of its feeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

import optdnn
from optdnn.config import BuildOptions
from random_nets.draw import Array, Network
from random_nets.oracle import Feeds, Results


@dataclass(frozen=True)
class Setting:
    """A target, a precision, and the providers of tactics."""

    target: str
    precision: str = "fp32"
    tactics: str = ""

    @property
    def gpu(self) -> bool:
        return self.target.partition(":")[0] in ("simulate", "cuda")

    def __str__(self) -> str:
        return " ".join(filter(None, (self.target, self.precision, self.tactics)))


class UnsteadyError(Exception):
    """A repeated run gave other bits."""


def options(setting: Setting, net: Network) -> dict[str, Any]:
    """The options of ``optdnn.build``. "int8": Q/DQ networks as they are (floats in fp32 or fp16 alternately), and other
    networks quantized by calibration with their own inputs."""
    given: dict[str, Any] = {"target": setting.target, "precision": setting.precision}
    if setting.precision == "int8":
        if holds_quantization(net.model):
            odd = len(net.model.graph.node) % 2
            given["precision"] = "fp16" if setting.gpu and odd else "fp32"
        else:
            given["calib"] = [_resized(f, net.feeds[0]) for f in net.feeds]
    if setting.gpu:
        given["tactics"] = setting.tactics or "heuristic"
        if net.sizes:
            given["shapes"] = _profiles(net) if "calib" in given else _ranges(net)
    elif setting.target == "cpu":
        given.update(tactics=setting.tactics or "auto", threads=1)
    return given


def judged_as(setting: Setting, net: Network) -> str:
    """The precision that determines the tolerance of the results."""
    if setting.precision == "int8" and holds_quantization(net.model):
        return str(options(setting, net)["precision"])
    return setting.precision


def holds_quantization(model: onnx.ModelProto) -> bool:
    kinds = {n.op_type for n in model.graph.node}
    return bool(
        kinds & {"QuantizeLinear", "DequantizeLinear", "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger"}
    )


def _ranges(net: Network) -> dict[str, Any]:
    """The range of each input's sizes over all feeds. The first feed is the optimum."""
    ranges: dict[str, Any] = {}
    for name in net.feeds[0]:
        shapes = np.array([f[name].shape for f in net.feeds]).reshape(len(net.feeds), -1)
        if shapes.shape[1]:
            ranges[name] = [tuple(map(int, s)) for s in (shapes.min(0), shapes[0], shapes.max(0))]
    return ranges


def _resized(feed: Feeds, first: Feeds) -> dict[str, Array]:
    """A feed's floats in the sizes of the first feed, at which calibration runs. Integers are those of the first feed, since
    they may be positions."""
    same = all(feed[n].shape == a.shape for n, a in first.items())
    return {n: feed[n] if same else np.resize(feed[n], a.shape) if a.dtype.kind == "f" else a for n, a in first.items()}


def _profiles(net: Network) -> list[dict[str, Any]]:
    """Each feed's sizes as a profile: an engine does not keep its calibration, so it makes no plans for further sizes."""
    return [{n: f[n].shape for n in f if f[n].ndim} for f in net.feeds]


def build(setting: Setting, net: Network) -> optdnn.Engine:
    from optdnn.compiler import build_verbose

    return build_verbose(net.model, BuildOptions(**options(setting, net))).engine


def run(setting: Setting, engine: optdnn.Engine, feeds: Sequence[Feeds], say: Callable[[str], None]) -> list[Results]:
    """The results of each feed, one after the other through one engine. On a GPU every run is repeated (captured, then
    replayed).

    An engine with plans by value may run a feed first by its own program and later by a plan, which rounds differently. It
    returns the results of all feeds, followed by those of all feeds again. Raises UnsteadyError if a repeated run gives other
    bits.
    """

    def once(what: str) -> list[Results]:
        found = []
        for k, feed in enumerate(feeds):
            say(f"run {k}{what}")
            found.append({n: np.array(a) for n, a in engine.run(feed).items()})
        return found

    found = once("")
    if not setting.target.startswith("cuda") and setting.target != "cpu":
        return found
    results = found
    if engine.program.by_value is not None:
        found = once(" by plans")
        results = [*results, *found]
    for k, (before, after) in enumerate(zip(found, once(" again"), strict=True)):
        for n, a in after.items():
            if a.shape != before[n].shape or a.tobytes() != before[n].tobytes():
                raise UnsteadyError(f"{n} in run {k}: {_changed(a, before[n])}")
    return results


def _changed(a: Any, b: Any) -> str:
    if a.shape != b.shape:
        return f"shape {a.shape}, before {b.shape}"
    with np.errstate(all="ignore"):
        return f"{(a != b).mean():.2%} of the elements differ"


def culprits(engine: optdnn.Engine, feeds: Feeds) -> str:
    """The launches of a GPU engine that disagree with their meaning, the worst first."""
    from optdnn.runtime.cuda.runner import CudaRunner
    from optdnn.runtime.cuda.trials.check import check_steps
    from optdnn.runtime.steps.executor import LoadOptions

    if not engine.program.steps:
        return ""
    checked = check_steps(CudaRunner(engine.program, LoadOptions()).context(), feeds)
    worst = sorted((e for e in checked if not e.error < 0.01), key=lambda e: -e.error)[:3]
    return "; ".join(f"{e.kind} by {e.kernel}: {e.error:.1e}" for e in worst) or "each launch does what it means"
