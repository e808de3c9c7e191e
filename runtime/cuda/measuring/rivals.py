"""Candidates of a comparison on a GPU: engines, the user's PyTorch module, ONNX Runtime's CUDA provider.

All are timed alike: inputs are on the GPU, and a run is a replay of a CUDA graph between two events (for ONNX Runtime, by the
host's clock, because its graph has no events of ours). NumPy arrays are copied only for the results.
"""

from __future__ import annotations

import inspect
import os
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from optdnn.errors import MissingDependency, UsageError
from optdnn.runtime.cpu.library import library_module
from optdnn.runtime.cuda.launches.graphs import Stream
from optdnn.runtime.cuda.measuring.measure import sample_replays
from optdnn.runtime.racing.candidates import Candidate, Opened
from optdnn.types import BF16, Array, is_float

TORCH_EAGER, TORCH_COMPILE, ONNXRUNTIME = (
    f"{__name__}:{name}" for name in ("open_torch_eager", "open_torch_compile", "open_onnxruntime")
)
"""Kinds of candidates: see :class:`optdnn.runtime.racing.candidates.Candidate`."""
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


# ---------------------------------------------------------------- PyTorch


def open_torch_eager(candidate: Candidate, threads: int) -> Opened:
    """The module unchanged, channels last, in a CUDA graph."""
    return _open_torch(candidate, compiled=False)


def open_torch_compile(candidate: Candidate, threads: int) -> Opened:
    """The module under torch.compile (max-autotune, weights frozen), channels last, in a CUDA graph. It compiles for minutes."""
    return _open_torch(candidate, compiled=True)


def _open_torch(candidate: Candidate, *, compiled: bool) -> Opened:
    try:
        torch: Any = import_module("torch")
    except ImportError:
        raise MissingDependency("torch", "train", "to compare with a PyTorch module") from None
    if not torch.cuda.is_available():
        raise UsageError("PyTorch sees no GPU")
    if candidate.precision not in _DTYPES:
        raise UsageError(f"a PyTorch module is not run at {candidate.precision}; give fp32, bf16 or fp16")
    dtype = getattr(torch, _DTYPES[candidate.precision])
    # fp32 is fp32 for all candidates, not tf32.
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    module = factory(candidate.path)()
    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"{candidate.path} gives a {type(module).__name__}, not a torch.nn.Module")
    module = module.eval().cuda().to(dtype).to(memory_format=torch.channels_last)
    for part in module.modules():
        if hasattr(part, "flatten_parameters"):  # recurrent layers: otherwise cuDNN gathers their weights in every run
            part.flatten_parameters()
    how = "torch.compile, max-autotune" if compiled else "eager"
    run: Any = module
    if compiled:
        import_module("torch._inductor.config").freezing = True  # type: ignore[attr-defined]
        run = torch.compile(module, mode="max-autotune-no-cudagraphs")
    graphs = _TorchGraphs(torch, module, run, dtype)
    facts = {"library": "torch", "version": str(torch.__version__), "precision": candidate.precision, "how": how}
    facts |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    return Opened(graphs.run, (), facts, sampler=graphs.sampler)


def factory(path: str) -> Any:
    """The object ``PKG.MODULE:FACTORY``. The current folder is searched last. Raises UsageError."""
    name, colon, attribute = path.partition(":")
    if not colon:
        raise UsageError(f"--torch {path!r} is not PKG.MODULE:FACTORY")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        value = import_module(name)
        for part in attribute.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"--torch {path!r} cannot be imported: {error}") from error
    if not callable(value):
        raise UsageError(f"--torch {path!r} is not callable")
    return value


class _TorchGraphs:
    """A module captured on the last inputs."""

    def __init__(self, torch: Any, module: Any, run: Any, dtype: Any):
        self.torch, self._run, self._dtype = torch, run, dtype
        names = list(inspect.signature(module.forward).parameters)
        self._names = frozenset(names)
        self.stream: Stream | None = None
        self._graph: Any = None
        self._outputs: list[Any] = []
        self._shapes: Any = None
        self._inputs: list[Any] = []

    def _given(self, feeds: Mapping[str, Array]) -> list[Any]:
        torch = self.torch
        tensors = []
        for a in feeds.values():
            plain = a.astype(np.float32) if a.dtype == BF16 else a
            t = torch.from_numpy(np.ascontiguousarray(plain)).cuda()
            t = t.to(self._dtype) if is_float(a.dtype) else t
            tensors.append(t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t)
        return tensors

    def _call(self, feeds: Mapping[str, Array]) -> list[Any]:
        """Call by the names of the ONNX inputs if the module has all of them, otherwise by position."""
        named = dict(zip(feeds, self._inputs, strict=True))
        result = self._run(**named) if set(feeds) <= self._names else self._run(*self._inputs)
        return list(_tensors(self.torch, result))

    def _capture(self, feeds: Mapping[str, Array]) -> None:
        torch = self.torch
        self._inputs = self._given(feeds)
        self.stream = self.stream or Stream()
        outside = torch.cuda.ExternalStream(self.stream.handle)
        outside.wait_stream(torch.cuda.current_stream())
        with torch.no_grad():
            with torch.cuda.stream(outside):
                for _ in range(3):
                    self._call(feeds)
            outside.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=outside):
                self._outputs = self._call(feeds)
        self._outside = outside
        self._shapes = {k: (a.shape, a.dtype) for k, a in feeds.items()}

    def _replay(self) -> None:
        with self.torch.cuda.stream(self._outside):
            self._graph.replay()

    def run(self, feeds: Mapping[str, Array]) -> Sequence[Array]:
        """NumPy in and out; the graph is captured on the first call, and again for other shapes."""
        if self._shapes != {k: (a.shape, a.dtype) for k, a in feeds.items()}:
            self._capture(feeds)
        else:
            for mine, given in zip(self._inputs, self._given(feeds), strict=True):
                mine.copy_(given)
            self.torch.cuda.synchronize()
        self._replay()
        self.torch.cuda.synchronize()
        wide = self.torch.bfloat16
        return [(t.float() if t.dtype == wide else t).detach().cpu().numpy() for t in self._outputs]

    def sampler(self, feeds: Mapping[str, Array]) -> Any:
        self.run(feeds)
        assert self.stream is not None
        return partial(sample_replays, self._replay_there, self.stream)

    def _replay_there(self) -> None:
        """:meth:`_replay`, but the stream stays the current one: the time of setting it back would be measured, too."""
        self.torch.cuda.set_stream(self._outside)
        self._graph.replay()


def _tensors(torch: Any, result: Any) -> Iterator[Any]:
    """The tensors in a module's result, in the order of its tuples and mappings (Hugging Face's outputs are mappings)."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, Mapping):
        for value in result.values():
            yield from _tensors(torch, value)
    elif isinstance(result, (list, tuple)):
        for value in result:
            yield from _tensors(torch, value)


# ---------------------------------------------------------------- ONNX Runtime


def cuda_provider() -> Any:
    """ONNX Runtime, if its CUDA provider is available. Raises MissingDependency."""
    try:
        ort: Any = library_module("onnxruntime")
    except MissingDependency:
        raise MissingDependency("onnxruntime-gpu", "", "to compare with it") from None
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        raise MissingDependency("onnxruntime-gpu", "", "to compare with its CUDA provider")
    return ort


def open_onnxruntime(candidate: Candidate, threads: int) -> Opened:
    """ONNX Runtime's CUDA provider in a CUDA graph, with inputs and outputs bound on the GPU; in the model's own types."""
    ort = cuda_provider()
    if candidate.precision != "fp32":
        raise UsageError(f"onnxruntime runs a model in its own types; it is not asked for {candidate.precision}")
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    provider = ("CUDAExecutionProvider", {"enable_cuda_graph": "1", "use_tf32": "0"})
    session = ort.InferenceSession(candidate.path, options, providers=[provider, "CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    bound: dict[str, Any] = {}

    def bind(feeds: Mapping[str, Array]) -> Any:
        binding = session.io_binding()
        for name, a in feeds.items():
            value = bound.get(name)
            if value is None or list(value.shape()) != list(a.shape):
                value = bound[name] = ort.OrtValue.ortvalue_from_numpy(a, "cuda", 0)
            else:
                value.update_inplace(a)
            binding.bind_ortvalue_input(name, value)
        for name in names:
            binding.bind_output(name, "cuda", 0)
        return binding

    def run(feeds: Mapping[str, Array]) -> Sequence[Array]:
        binding = bind(feeds)
        session.run_with_iobinding(binding)
        return [np.asarray(a) for a in binding.copy_outputs_to_cpu()]

    def sampler(feeds: Mapping[str, Array]) -> Any:
        from optdnn.runtime.measuring.latency import sample

        binding = bind(feeds)

        def once() -> None:
            session.run_with_iobinding(binding)
            binding.synchronize_outputs()

        def taken(seconds: float | None, most: int | None, warmup: int) -> array[int]:
            return sample(once, warmup=warmup, duration=None if most else seconds, iterations=most)

        return taken

    facts = {
        "library": "onnxruntime",
        "version": ort.__version__,
        "precision": "fp32",
        "provider": "CUDA, in a CUDA graph",
    }
    return Opened(run, names, facts, sampler=sampler, clock="host")
