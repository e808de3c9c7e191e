"""The common parts of an engine's plans: its model at no particular sizes, constants, blobs and kernels."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from optdnn.config import BuildOptions
from optdnn.importers.model import Model
from optdnn.importers.onnx import import_model
from optdnn.importers.split_weights import put_together
from optdnn.ir.bound import bound, has_bodies
from optdnn.ir.constant_cache import ConstantCache, Content
from optdnn.ir.graph import Graph
from optdnn.lowering.cubins import CubinKey, cubins_of
from optdnn.optimize import optimize
from optdnn.passes.base import PassReport
from optdnn.passes.masked_rows import MaskedRows
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.runtime.file.format import digests as sha256
from optdnn.runtime.program import Buffer, Program, Step
from optdnn.runtime.program import Source as HeldSource
from optdnn.target_name import TargetName
from optdnn.types import Array, TensorSpec


@dataclass
class Base:
    """What plans are made from: the model and, where possible, its graph with symbolic sizes.

    Rewrites that hold for all sizes are already made in that graph: constants are folded, norms and activations are fused.
    Attention is not: at given sizes its mask may be a constant, which masks nothing or is causal.
    """

    model: Model
    graph: Graph | None
    passes: list[PassReport]

    @classmethod
    def of(
        cls,
        model: Model,
        inputs: Iterable[TensorSpec],
        options: BuildOptions,
        kept: ConstantCache,
    ) -> Base:
        """``inputs``: those of the engine, dimensions that vary as text; the graph's constants are added to ``kept``."""
        plan = PrecisionPlan.of_option(options.precision, options.precision_map)
        # Pins go by the nodes that an operator came from, which depend on what was folded when; calibration is of whole graphs.
        calibrated = options.calib is not None and plan.uses_ranges(TargetName.parse(options.target).on_gpu)
        if (
            options.opt_level < 2
            or options.stop_after is not None
            or options.precision_map
            or plan.quantizes
            or calibrated
        ):
            return cls(model, None, [])
        shapes = {s.name: tuple(d if isinstance(d, int) else None for d in s.shape) for s in inputs}
        graph = import_model(model, shapes=shapes, custom_ops=options.custom_ops)
        if has_bodies(graph):
            return cls(model, None, [])
        passes = optimize(graph, replace(options, dump=None), options.target, kept=kept, stop_before=MaskedRows.name)
        kept.of(graph)
        return cls(model, graph, passes)

    def at(self, shapes: Mapping[str, tuple[int, ...]], options: BuildOptions) -> tuple[Graph, BuildOptions]:
        """The graph at these sizes, and the options that are left to be carried out."""
        if self.graph is None:
            return import_model(self.model, shapes=shapes, custom_ops=options.custom_ops), options
        return bound(self.graph, shapes), replace(options, io_dtype="model")


class Blobs:
    """A list of blobs without repetitions, which programs are moved onto. ``kept`` knows arrays by their content."""

    def __init__(self, kept: ConstantCache, arrays: Iterable[Array] = ()):
        self.arrays: list[Array] = []
        self._kept = kept
        self._numbers: dict[Content, int] = {}
        for array in arrays:  # they keep their numbers
            self._numbers.setdefault(kept.same(array)[0], len(self.arrays))
            self.arrays.append(array)

    def copy(self, kept: ConstantCache) -> Blobs:
        """Another list with these, to be added to without this one."""
        found = Blobs(kept)
        found.arrays, found._numbers = list(self.arrays), dict(self._numbers)
        return found

    def add(self, array: Array) -> int:
        """The number of the blob with this content, at the end of the list where it is new."""
        content, same = self._kept.same(np.ascontiguousarray(array).reshape(array.shape))
        if content not in self._numbers:
            self._numbers[content] = len(self.arrays)
            self.arrays.append(same)
        return self._numbers[content]

    def take(self, program: Program) -> Program:
        """The program over this list."""
        numbers = [self.add(a) for a in program.blobs]

        def buffer(b: Buffer) -> Buffer:
            return b if b.blob is None else replace(b, blob=numbers[b.blob])

        return replace(
            program,
            buffers=tuple(map(buffer, program.buffers)),
            kernels=tuple(k if k.cubin is None else replace(k, cubin=numbers[k.cubin]) for k in program.kernels),
            steps=tuple(_moved(program.steps, numbers)),
            blobs=self.arrays,
        )


@dataclass
class Common:
    """The common parts of an engine's plans: its model, ready for import; constants, and arrays made of them; blobs."""

    model: Model
    kept: ConstantCache
    blobs: Blobs
    cubins: dict[CubinKey, Array]
    nvrtc: str | None
    _base: Base | None = None

    @classmethod
    def of(cls, program: Program, source: HeldSource) -> Common:
        """The common part of an engine's plans; made once."""
        if program not in _COMMON:
            kept = ConstantCache()
            digests = {id(array): digest for array, digest in program.digests}
            missing = [a for a in program.blobs if id(a) not in digests]
            made = sha256([memoryview(np.ascontiguousarray(a).reshape(-1).view(np.uint8).data) for a in missing])
            digests |= {id(a): bytes.fromhex(d) for a, d in zip(missing, made, strict=True)}
            for array in program.blobs:
                kept.hold(array, digests[id(array)])
            weights = {name: program.blobs[number] for name, number in source.weights.items()}
            model = put_together(program.blobs[source.model].tobytes(), weights, "the engine's model")
            plans = plans_of(program)
            compiler = next((str(v) for plan in plans if (v := plan.meta.get("nvrtc"))), None)
            _COMMON.setdefault(program, cls(model, kept, Blobs(kept, program.blobs), cubins_of(plans), compiler))
        return _COMMON[program]

    def base(self, inputs: Iterable[TensorSpec], options: BuildOptions) -> Base:
        """The source of plans for further sizes, made once."""
        if self._base is None:
            self._base = Base.of(self.model, inputs, options, self.kept)
        return self._base


_COMMON: weakref.WeakKeyDictionary[Program, Common] = weakref.WeakKeyDictionary()


def plans_of(program: Program) -> tuple[Program, ...]:
    """All plans that an engine holds, its own program first."""
    return (program, *(program.dynamic.plans if program.dynamic is not None else ()))


def _moved(steps: Iterable[Step], numbers: Sequence[int]) -> Iterable[Step]:
    """Steps of CPU libraries name blobs in their parameters."""
    for s in steps:
        if s.executor in ("onnxruntime", "openvino"):
            weights = {name: numbers[n] for name, n in s.params["weights"].items()}
            s = replace(s, params={**s.params, "model": numbers[s.params["model"]], "weights": weights})
        yield s
