"""optdnn as an ONNX backend (``onnx.backend.base``): ``prepare``, ``run_model``, ``run_node``, ``supports_device``.

Devices: ``REFERENCE`` evaluates the imported graph in NumPy, without any pass: the operators' definition. ``CPU`` builds an
engine for the cpu target, ``CUDA`` one for this machine's GPU, ``SIMULATE`` runs a GPU's program in NumPy. Engines for GPUs have
fixed sizes: one is built at the first run with each set of sizes, and with each set of values of shape inputs (axes, shapes,
pads). Operators without a kernel run on the CPU.

    import onnx, optdnn.integrations.onnx_backend
    rep = optdnn.integrations.onnx_backend.prepare(onnx.load("model.onnx"), device="CPU")
    y, = rep.run([x])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.helper
from onnx.backend.base import Backend, BackendRep, namedtupledict

from optdnn.errors import InputError, OptdnnError, UnsupportedError, UsageError
from optdnn.importers.model import NEWEST_OPSET
from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph
from optdnn.runtime.engine import Engine
from optdnn.types import Array

DEVICES = ("CPU", "REFERENCE", "CUDA", "SIMULATE")
ENGINES = 16
"""The most GPU engines that a prepared model keeps; the oldest one is dropped first."""

Run = Callable[[Mapping[str, Array]], Mapping[str, Array]]


class PreparedModel(BackendRep):
    """A model that is ready to run. ``inputs`` and ``outputs`` are names in ONNX's order."""

    def __init__(self, inputs: Sequence[str], outputs: Sequence[str], run: Run):
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self._run = run
        self._tuple = namedtupledict("Outputs", self.outputs)

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Run once. ``inputs``: a mapping of names, a sequence in the order of the inputs, or a single array.

        Returns a named tuple that can also be indexed by output name. Raises InputError for inputs that do not fit.
        """
        if isinstance(inputs, Mapping):
            feeds = dict(inputs)
        else:
            given = [inputs] if isinstance(inputs, np.ndarray) else list(inputs)
            if len(given) != len(self.inputs):
                raise InputError(f"{len(given)} inputs are given, the model has {len(self.inputs)}")
            feeds = dict(zip(self.inputs, given, strict=True))
        results = self._run({name: np.asarray(array) for name, array in feeds.items()})
        outputs: tuple[Any, ...] = self._tuple(*(results[name] for name in self.outputs))
        return outputs


class GpuRun:
    """Runs a model with GPU engines, each for the sizes it was built for."""

    def __init__(self, model: onnx.ModelProto, target: str, options: Mapping[str, Any]):
        graph = import_model(model)
        self.engines: dict[tuple[Any, ...], Engine] = {}
        self.inputs, self.outputs = _ports(graph)
        self._model, self._target, self._options = model, target, dict(options)

    def __call__(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        return self.engine(feeds).run(feeds)

    def engine(self, feeds: Mapping[str, Array]) -> Engine:
        """The engine for these inputs, built on first use."""
        from optdnn.compiler import build

        shapes = {n: a.shape for n, a in feeds.items()}
        key = tuple(shapes.items())
        if key not in self.engines:
            while len(self.engines) >= ENGINES:
                self.engines.pop(next(iter(self.engines)))
            self.engines[key] = build(self._model, target=self._target, **{"shapes": shapes, **self._options})
        return self.engines[key]


class OptdnnBackend(Backend):
    """The backend; its methods are also functions of this module."""

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """True for ``CPU``, ``REFERENCE`` and ``SIMULATE`` (device 0), and for ``CUDA`` if there is a usable GPU."""
        kind, _, number = device.partition(":")
        return kind in DEVICES and number in ("", "0") and (kind != "CUDA" or _gpu())

    @classmethod
    def is_compatible(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
        """True when every operator of the model is supported. Raises ModelError when it is not valid."""
        try:
            import_model(model)
        except UnsupportedError:
            return False
        return cls.supports_device(device)

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> PreparedModel:
        """Import (REFERENCE) or build the model; for a GPU, the engines follow with the first runs.

        Further keywords are options of :func:`optdnn.build`; with any of them REFERENCE is a build for the reference target.
        Raises UsageError for another device, and the errors of the import or the build.
        """
        if not cls.supports_device(device):
            raise UsageError(f"there is no device {device!r}", hint=f"the devices are {', '.join(DEVICES)}")
        if device.startswith("REFERENCE") and not kwargs:
            graph = import_model(model)
            return PreparedModel(*_ports(graph), lambda feeds: evaluate(graph, feeds))
        target = device.partition(":")[0].lower()
        if target in ("cuda", "simulate"):
            run = GpuRun(model, target, kwargs)
            return PreparedModel(run.inputs, run.outputs, run)
        from optdnn.compiler import build

        engine = build(model, target=target, **kwargs)
        return PreparedModel([s.name for s in engine.inputs], [s.name for s in engine.outputs], engine.run)

    @classmethod
    def run_model(cls, model: onnx.ModelProto, inputs: Any, device: str = "CPU", **kwargs: Any) -> tuple[Any, ...]:
        """Prepare and run once."""
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(
        cls, node: onnx.NodeProto, inputs: Any, device: str = "CPU", outputs_info: Any = None, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Run one node on arrays: its operands in order (absent ones left out).

        ``opset_version``: the opset of the node (default: the newest).
        """
        opset = int(kwargs.pop("opset_version", NEWEST_OPSET))
        names = list(dict.fromkeys(x for x in node.input if x))
        arrays = [inputs] if isinstance(inputs, np.ndarray) else list(inputs)
        if len(arrays) != len(names):
            raise InputError(f"{len(arrays)} inputs are given, the node reads {len(names)}")
        values = [
            onnx.helper.make_tensor_value_info(
                n, onnx.helper.np_dtype_to_tensor_dtype(np.asarray(a).dtype), np.shape(a)
            )
            for n, a in zip(names, arrays, strict=True)
        ]
        graph = onnx.helper.make_graph([node], "node", values, [onnx.ValueInfoProto(name=n) for n in node.output if n])
        imports = [onnx.helper.make_opsetid("", opset)]
        if node.domain not in ("", "ai.onnx"):
            imports.append(onnx.helper.make_opsetid(node.domain, 1))
        model = onnx.helper.make_model(graph, opset_imports=imports)
        return cls.run_model(model, arrays, device, **kwargs)


def _ports(graph: Graph) -> tuple[list[str], list[str]]:
    """The names of a graph's inputs and outputs."""
    inputs, outputs = ([graph.op(i).outputs[0].name for i in ids] for ids in (graph.inputs, graph.outputs))
    return inputs, outputs


def _gpu() -> bool:
    from optdnn.runtime.cuda.device import gpu_count

    try:
        return gpu_count() > 0
    except OptdnnError:
        return False


prepare = OptdnnBackend.prepare
run_model = OptdnnBackend.run_model
run_node = OptdnnBackend.run_node
supports_device = OptdnnBackend.supports_device
is_compatible = OptdnnBackend.is_compatible
