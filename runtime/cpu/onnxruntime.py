"""ONNX Runtime as a library of the cpu target."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from optdnn.errors import RunError
from optdnn.runtime.cpu.huge_pages import NewMemory
from optdnn.runtime.cpu.library import Settings, library_module, prepare_step
from optdnn.runtime.program import Program, Step
from optdnn.runtime.steps.executor import LoadOptions
from optdnn.temporary import temporary_folder
from optdnn.types import Array

TOKEN = re.compile(r"(_token_\d+)?_kernel_time$")
_KERNEL_TIME = "_kernel_time"
_DISABLED = ("DoubleQDQPairsRemover", "WeightBiasQuantization")
"""Optimizers that change results (1.31): the first merges two roundings into one, with a scale that the model does not have; the
second rounds float weights to int8, and float biases to int32, between DequantizeLinear and QuantizeLinear."""

_FLOAT_PRODUCTS = ("session.qdq_matmulnbits_accuracy_level", "1")
"""Products of floats and dequantized constants are computed in fp32; by default the floats are rounded to 8 bits, too."""
_MISTYPED = "does not match y_zero_point type"
"""An optimizer moves DequantizeLinear of int8 after a Reshape or the like, and gives the QuantizeLinear before it a zero point of
another type (1.31, from opset 21 on). Its own check then refuses the model; without this optimizer the model runs."""


def refuses(precision: str) -> str | None:
    """Why ONNX Runtime cannot run in ``precision``, or None."""
    return None if precision == "fp32" else f"onnxruntime has no {precision} arithmetic on the CPU"


def _session(ort: Any, model: bytes, options: Any) -> Any:
    options.add_session_config_entry(*_FLOAT_PRODUCTS)

    def opened(*disabled: str) -> Any:
        return ort.InferenceSession(
            model, options, providers=["CPUExecutionProvider"], disabled_optimizers=[*_DISABLED, *disabled]
        )

    try:
        return opened()
    except Exception as error:  # the binding raises its own unrelated classes
        if _MISTYPED not in str(error):
            raise
    return opened("QDQPropagationTransformer")


class OnnxRuntimeModel:
    """An ``InferenceSession`` over ONNX bytes whose large weights are given from memory.

    ``model`` declares each of ``weights`` as an initializer with external data; they are passed by name without a
    copy, so the arrays must live as long as the model. Raises RunError with the library's own message if it refuses.
    """

    name = "onnxruntime"
    memory: NewMemory | None = None
    empty: frozenset[str] = frozenset()  # it accepts any input

    def __init__(
        self,
        model: bytes,
        weights: Mapping[str, Array],
        inputs: Sequence[str],
        outputs: Sequence[str],
        settings: Settings,
        *,
        counters: str | None = None,
    ):
        ort = library_module("onnxruntime")
        if (reason := refuses(settings.precision)) is not None:
            raise RunError(reason)
        options = ort.SessionOptions()
        options.intra_op_num_threads = settings.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4  # errors are raised with their message; the log would repeat them
        if counters is not None:
            options.enable_profiling, options.profile_file_prefix = True, counters
        self.kinds: dict[str, str] = {}
        """Operator of each executed node; filled by :meth:`counted`."""
        self._inputs, self._outputs = list(inputs), list(outputs)
        self._settings = settings
        self._facts = {"library": self.name, "version": ort.__version__, **settings.to_plain()}
        # ONNX Runtime reads the arrays in place and does not own them: they must outlive the session.
        self._weights = dict(weights)
        self._model = model
        try:
            if self._weights:
                values = [ort.OrtValue.ortvalue_from_numpy(np.asarray(w)) for w in self._weights.values()]
                options.add_external_initializers(list(self._weights), values)
                self._values = values
            self._session: Any = _session(ort, model, options)
        except Exception as error:  # the binding raises its own unrelated classes
            raise RunError(f"onnxruntime does not take this network: {_first_line(error)}") from None

    aliases = False

    @property
    def facts(self) -> dict[str, Any]:
        """ONNX Runtime computes each operator in the types of its operands; it adds no casts."""
        return dict(self._facts)

    def session(self) -> _OnnxRuntimeSession:
        return _OnnxRuntimeSession(self)

    def layers(self, feeds: Sequence[Array]) -> dict[str, str]:
        """ONNX node name -> the operator that runs for it, from a separate session that is profiled for one run."""
        with temporary_folder("optdnn-profile-") as folder:
            counters = os.path.join(folder, "profile")
            model = OnnxRuntimeModel(
                self._model, self._weights, self._inputs, self._outputs, self._settings, counters=counters
            )
            model.session().run(feeds, [None] * len(self._outputs))
            model.counted()
        return {TOKEN.sub("", name + _KERNEL_TIME): kind for name, kind in model.kinds.items()}

    def counted(self) -> dict[str, list[float]]:
        """Microseconds of each executed node, run by run (for a model with ``counters``: the prefix of the file that is written
        meanwhile, and removed here). Ends the counting."""
        times: dict[str, list[float]] = {}
        for event in _kernel_events(self._session):
            name = event["name"].removesuffix(_KERNEL_TIME)
            times.setdefault(name, []).append(float(event["dur"]))
            self.kinds[name] = str(event["args"].get("op_name", ""))
        return times


def _kernel_events(session: Any) -> list[dict[str, Any]]:
    """The executed nodes in a session's profile. Ends the profile and removes its file."""
    path = Path(session.end_profiling())
    try:
        events = json.loads(path.read_text(encoding="utf-8"))
    finally:
        path.unlink(missing_ok=True)
    return [e for e in events if e.get("cat") == "Node" and str(e["name"]).endswith(_KERNEL_TIME)]


class _OnnxRuntimeSession:
    def __init__(self, model: OnnxRuntimeModel):
        self._model = model
        self._session = model._session
        # The wrapper's run() checks names and owners once more, which costs small networks a tenth of their time; the
        # engine has already checked them. If the inner object is renamed one day, the wrapper works as well.
        self._inner = getattr(model._session, "_sess", model._session)
        self._run = self._inner.run
        self._names, self._outputs = model._inputs, model._outputs
        self._ort = library_module("onnxruntime")
        self._first = True

    def run(self, inputs: Sequence[Array | None], outs: Sequence[Array | None]) -> list[Array]:
        try:
            feeds: dict[str, Array | None] = {}
            for name, array in zip(self._names, inputs):  # noqa: B905 - strict costs a small network a twentieth
                feeds[name] = array
            for out in outs:
                if out is not None:
                    return self._run_bound(feeds, outs)
            results: list[Array] = self._run(self._outputs, feeds, None)
            if self._first:
                self._after_run()
            return results
        except Exception as error:
            raise RunError(f"onnxruntime failed: {_first_line(error)}") from None

    def _after_run(self) -> None:
        self._first = False
        if self._model.memory is not None:
            self._model.memory.after_run()

    def bound(self, inputs: Sequence[Array], outs: Sequence[Array]) -> Callable[[], object]:
        """A call that reads ``inputs`` and writes ``outs``: nonempty arrays with exactly the types and shapes of a call. They
        must outlive it. The call raises the library's own errors."""
        binding = self._session.io_binding()
        for name, a in zip(self._names, inputs, strict=True):
            binding.bind_input(name, "cpu", 0, a.dtype, a.shape, a.ctypes.data)
        for name, a in zip(self._outputs, outs, strict=True):
            binding.bind_output(name, "cpu", 0, a.dtype, a.shape, a.ctypes.data)
        own = self._inner is not self._session
        return functools.partial(self._inner.run_with_iobinding, binding._iobinding if own else binding, None)

    def _run_bound(self, feeds: Mapping[str, Array | None], outs: Sequence[Array | None]) -> list[Array]:
        binding = self._session.io_binding()
        for name, array in feeds.items():
            binding.bind_ortvalue_input(name, self._ort.OrtValue.ortvalue_from_numpy(array))
        for name, out in zip(self._outputs, outs, strict=True):
            if out is None:
                binding.bind_output(name, "cpu")
            else:
                binding.bind_output(name, "cpu", 0, out.dtype, out.shape, out.ctypes.data)
        self._session.run_with_iobinding(binding)
        if self._first:
            self._after_run()
        values = binding.get_outputs()
        return [v.numpy() if out is None else out for v, out in zip(values, outs, strict=True)]


def prepare(step: Step, program: Program, options: LoadOptions) -> OnnxRuntimeModel:
    """Prepare an engine's step; see ``library.prepare_step``."""
    counters = None if options.counters is None else os.path.join(options.counters, f"{id(step)}")
    return cast(OnnxRuntimeModel, prepare_step(partial(OnnxRuntimeModel, counters=counters), step, program, options))


_ENDLESS_LOOP = re.compile(r"Name:'([^']* has run \d+ times; its condition does not end it)'")
"""The name of a node whose purpose is to fail (:mod:`optdnn.lowering.cpu.loops`)."""


def _first_line(error: Exception) -> str:
    if loop := _ENDLESS_LOOP.search(str(error)):
        return loop[1]
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
