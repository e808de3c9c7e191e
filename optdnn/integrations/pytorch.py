"""From PyTorch: :func:`from_torch` compiles a module, :func:`compile_backend` is ``torch.compile(backend="optdnn")``.

Both use torch's own ONNX exporter; torch itself is not a dependency of optdnn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np

from optdnn.errors import MissingDependency, ModelError, OptdnnError, UsageError
from optdnn.integrations.torch_attention import attention
from optdnn.integrations.torch_graphs import numbers, specialized
from optdnn.integrations.torch_translations import translations
from optdnn.ranges import DimRange, input_shapes
from optdnn.runtime.engine import Engine
from optdnn.temporary import temporary_folder
from optdnn.types import BF16

ENGINES = 32
"""The most engines that a compiled graph keeps, one for each set of shapes; the least recently used is dropped first."""
EXPORTABLE_EXPERTS = "batched_mm"
"""The implementation of experts in transformers that torch exports."""
EXPORTERS = ("auto", "dynamo", "torchscript")


def from_torch(
    module: Any,
    example_inputs: Any = (),
    *,
    kwargs: Mapping[str, Any] | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    shapes: Any = None,
    dynamic_shapes: Any = None,
    opset: int | None = None,
    exporter: str = "auto",
    **build: Any,
) -> Engine:
    """Compile a ``torch.nn.Module``, or the result of ``torch.export.export``, into an engine, through ``torch.onnx.export``.

    ``example_inputs`` is a tensor or a tuple of tensors, and ``kwargs`` are keyword arguments of ``module``:
    tensors among them are inputs after the positional ones, anything else (``use_cache=False``) is fixed. Default names are the
    names of its parameters. ``shapes`` is as for :func:`optdnn.build`: open sizes and ranges are exported as dynamic
    (``dynamic_shapes`` in torch's own form also states which sizes are equal: an attention whose mask has its own batch
    size is found only once sizes are known). ``exporter``: "dynamo" (torch.export; needs onnxscript),
    "torchscript", or "auto" (dynamo if onnxscript is installed). ``build`` are further options of :func:`optdnn.build`.

    Raises MissingDependency without torch, UsageError for a module in training mode and for names that do not exist,
    ModelError if torch cannot export it, and the errors of the build.
    """
    torch = _torch()
    exported = isinstance(module, torch.export.ExportedProgram)
    if exported:
        module = module.module()
    _check_module(torch, module, exported)
    if exporter not in EXPORTERS:
        raise UsageError(f"exporter {exporter!r} is not one of {', '.join(EXPORTERS)}")
    args = tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,)
    keywords = dict(kwargs or {})
    _check_example(torch, args, keywords)
    named = [k for k, v in keywords.items() if isinstance(v, torch.Tensor)]
    names = list(input_names) if input_names is not None else [*_parameters(module, len(args)), *named]
    if len(names) != len(args) + len(named):
        raise UsageError(f"{len(names)} input_names are given for {len(args) + len(named)} example inputs")
    wanted = input_shapes({} if shapes is None else shapes)
    if unknown := sorted(wanted.keys() - set(names)):
        raise UsageError(f"the module has no input {unknown[0]!r}", hint=f"its inputs are {', '.join(names)}")
    open_axes = {
        name: [axis for axis, d in enumerate(dims) if d is None or isinstance(d, DimRange)]
        for name, dims in wanted.items()
    }
    from optdnn.compiler import build as build_engine

    with temporary_folder() as folder:
        path = Path(folder) / "model.onnx"
        _export(torch, module, args, keywords, path, names, output_names, open_axes, dynamic_shapes, opset, exporter)
        return build_engine(path, shapes=wanted, **build)


def _check_module(torch: Any, module: Any, exported: bool) -> None:
    """Raise UsageError for an object that is not a module, and for a module in training mode."""
    if not isinstance(module, torch.nn.Module) or isinstance(module, torch.jit.ScriptModule):
        raise UsageError(
            f"from_torch takes a torch.nn.Module, not {type(module).__name__}", hint=_instead(torch, module)
        )
    if module.training and not exported:  # an exported program has the mode that it was exported in
        raise UsageError(
            "the module is in training mode", hint="call module.eval() first: dropout and statistics differ"
        )


def _check_example(torch: Any, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
    """Raises UsageError for arrays instead of tensors, and for tensors inside of a keyword argument."""
    if (foreign := next((a for a in args if isinstance(a, np.ndarray)), None)) is not None:
        raise UsageError(
            f"an example input is a NumPy array {list(foreign.shape)}", hint="give tensors: torch.from_numpy(array)"
        )
    if nested := next(
        (k for k, v in keywords.items() if isinstance(v, (tuple, list, Mapping)) and _tensors(torch, v)), None
    ):
        raise UsageError(
            f"the keyword argument {nested!r} holds tensors in a {type(keywords[nested]).__name__}",
            hint="wrap the module in your own, with a forward that takes each of them",
        )


def _torch() -> Any:
    try:
        import torch  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        missing = MissingDependency("torch", "", "to compile a PyTorch module")
        missing.hint = "pip install torch onnxscript"
        raise missing from error
    return torch


def _instead(torch: Any, given: Any) -> str:
    """A hint for an object that is not a module of Python code."""
    if isinstance(given, torch.jit.ScriptModule):
        return "give the module that was traced or scripted"
    if callable(given):
        return "give a module whose forward calls it"
    return "make the module, and load its weights with load_state_dict"


def _parameters(module: Any, count: int) -> list[str]:
    """The names of the first ``count`` positional parameters of ``forward``."""
    names: list[str] = []
    for p in signature(module.forward).parameters.values():
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            names.append(p.name)
        elif p.kind is p.VAR_POSITIONAL:
            names += [f"{p.name}_{i}" for i in range(count - len(names))]
    return names[:count]


def _tensors(torch: Any, value: Any) -> bool:
    """Whether a value contains a tensor."""
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, torch.Tensor) or (
        isinstance(value, (tuple, list)) and any(_tensors(torch, v) for v in value)
    )


def _positional(
    torch: Any, module: Any, args: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...]]:
    """A module that takes the tensors among the keyword arguments by position, with the others fixed, so that it can be traced."""
    named = {k: v for k, v in keywords.items() if isinstance(v, torch.Tensor)}
    fixed = {k: v for k, v in keywords.items() if k not in named}

    class Called(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, *tensors: Any) -> Any:
            return self.module(*tensors[: len(args)], **dict(zip(named, tensors[len(args) :], strict=True)), **fixed)

    return Called().eval(), (*args, *named.values())


@contextmanager
def _exportable_experts(torch: Any, module: Any) -> Iterator[None]:
    """Inside, mixtures of experts of transformers are computed in a form that torch exports: their default is a kernel of torch."""
    parts = module.modules() if isinstance(module, torch.nn.Module) else ()
    models = [part for part in parts if hasattr(part, "set_experts_implementation")]
    known = [(part, getattr(part.config, "_experts_implementation", None)) for part in models]
    switched = [(part, before) for part, before in known if before not in (None, EXPORTABLE_EXPERTS)]
    for part, _ in switched:
        part.set_experts_implementation(EXPORTABLE_EXPERTS)
    try:
        yield
    finally:
        for part, before in switched:
            part.set_experts_implementation(before)


def _export(
    torch: Any,
    module: Any,
    args: tuple[Any, ...],
    keywords: Mapping[str, Any],
    path: Path,
    names: Sequence[str],
    output_names: Sequence[str] | None,
    open_axes: Mapping[str, Sequence[int]],
    dynamic_shapes: Any,
    opset: int | None,
    exporter: str,
) -> None:
    """Write the module as ONNX. Raises ModelError with the exporter's message."""
    dynamo = exporter == "dynamo" or (exporter == "auto" and find_spec("onnxscript") is not None)
    given = module, args, keywords
    common: dict[str, Any] = {"input_names": list(names), "opset_version": opset}
    if output_names is not None:
        common["output_names"] = list(output_names)
    try:
        with torch.no_grad(), _exportable_experts(torch, module):
            if dynamo:
                if dynamic_shapes is None and any(open_axes.values()):
                    auto = torch.export.Dim.AUTO
                    each = tuple(dict.fromkeys(open_axes.get(n, ()), auto) for n in names)
                    dynamic_shapes = each
                    if keywords:  # torch.export has no dynamic sizes for arguments that forward gathers in **
                        module, args = _positional(torch, module, args, keywords)
                        keywords, dynamic_shapes = {}, {"tensors": each}
                options = {"kwargs": dict(keywords) or None, "dynamic_shapes": dynamic_shapes, **common}
                _by_dynamo(torch, module, args, path, options)
            else:
                if dynamic_shapes is not None:
                    raise UsageError(
                        "dynamic_shapes are for the dynamo exporter", hint="give shapes= with ranges instead"
                    )
                axes = {n: {a: f"{n}_{a}" for a in axes} for n, axes in open_axes.items() if axes}
                if keywords:
                    module, args = _positional(torch, module, args, keywords)
                _register_more(torch)
                torch.onnx.export(module, args, str(path), dynamo=False, dynamic_axes=axes or None, **common)
    except OptdnnError:
        raise
    except Exception as error:  # the exporters raise their own classes
        while error.__cause__ is not None:  # the cause, without the exporter's steps
            error = error.__cause__  # type: ignore[assignment]
        lines = [line for line in str(error).splitlines() if line.strip()]
        told = lines[0] if lines else type(error).__name__
        _check_that_it_runs(torch, *given)
        hint = "try the other exporter: exporter='torchscript' or 'dynamo'"
        if "data-dependent" in told:
            hint = (
                "write a branch on the values of tensors with torch.where or torch.cond; "
                "exporter='torchscript' keeps the branch that the example inputs take"
            )
        elif "grouped_mm" in told:
            hint = "compute the experts by another implementation: model.set_experts_implementation('batched_mm')"
        raise ModelError(f"torch cannot export {type(module).__name__} to ONNX: {told}", hint=hint) from error


def _check_that_it_runs(torch: Any, module: Any, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
    """Raise UsageError if the module itself fails on the example inputs. A program of torch.export is not called."""
    if not isinstance(module, torch.nn.Module):
        return
    try:
        with torch.no_grad():
            module(*args, **keywords)
    except Exception as error:  # the user's code
        raise UsageError(
            f"{type(module).__name__} does not run on the example inputs: {error}",
            hint="give what its forward takes: from_torch(module, x), from_torch(module, (x, y)), or kwargs={'x': x}",
        ) from error


def _by_dynamo(torch: Any, module: Any, args: tuple[Any, ...], path: Path, options: Mapping[str, Any]) -> None:
    """The export by torch.export. If torch cannot write an attention of the module, it is written as products and a softmax.

    onnxscript's optimizer is not used: the build's own passes do its work, in a fifth of its time on a large network."""
    common = {"dynamo": True, "external_data": True, "verbose": False, "optimize": False, **options}
    try:
        torch.onnx.export(module, args, str(path), custom_translation_table=translations(torch), **common)
    except Exception as error:
        if not _of_attention(error):
            raise
        table = translations(torch) | {torch.ops.aten.scaled_dot_product_attention.default: attention}
        torch.onnx.export(module, args, str(path), custom_translation_table=table, **common)


def _of_attention(error: BaseException | None) -> bool:
    """Whether torch's translator failed at an attention: it supports only four axes."""
    texts = []
    while error is not None:
        texts.append(str(error))
        error = error.__cause__
    return any("scaled_dot_product_attention" in text for text in texts)


@cache
def _register_more(torch: Any) -> None:
    """Teach torch's older exporter the operators in masks of language models: differences, and sums of booleans."""
    from torch.onnx import symbolic_helper, symbolic_opset11

    constant: Any = symbolic_helper._get_const

    def diff(g: Any, x: Any, times: Any, dim: Any, before: Any = None, after: Any = None) -> Any:
        axis = constant(dim, "i", "dim")
        parts = [part for part in (before, x, after) if part is not None and not symbolic_helper._is_none(part)]
        found = parts[0] if len(parts) == 1 else g.op("Concat", *parts, axis_i=axis)
        for _ in range(constant(times, "i", "n")):
            ends = (
                symbolic_helper._slice_helper(g, found, axes=[axis], starts=[a], ends=[b])
                for a, b in ((1, 2**63 - 1), (0, -1))
            )
            found = g.op("Sub", *ends)
        return found

    def cumsum(g: Any, x: Any, dim: Any, dtype: Any = None) -> Any:
        if symbolic_helper._is_bool(x):
            x = g.op("Cast", x, to_i=int(torch.onnx.TensorProtoDataType.INT64))
        return symbolic_opset11.cumsum(g, x, dim, dtype)

    torch.onnx.register_custom_op_symbolic("aten::diff", diff, 11)
    torch.onnx.register_custom_op_symbolic("aten::cumsum", cumsum, 11)


# ---------------------------------------------------------------- torch.compile


def compile_backend(graph: Any, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """A backend for ``torch.compile``: ``torch.compile(module, backend="optdnn", options={"target": "cpu"})``.

    For inference: parameters become constants (changing one in place makes the next call compile again), and gradients do not
    flow, so calls under autograd with tensors that need gradients are refused. ``options`` are those of
    :func:`optdnn.build`. Engines are built on first calls, one for each set of input shapes, even with ``dynamic=True``; the
    numbers that dynamo then passes become constants of an engine.
    """
    options = {**options.pop("options", {}), **options}
    return _Compiled(_torch(), graph, options)


class _Compiled:
    """One graph of dynamo's, with an engine per version of its constants and set of shapes."""

    def __init__(self, torch: Any, graph: Any, options: Mapping[str, Any]):
        self._torch, self._graph, self._options = torch, graph, dict(options)
        self._lock = threading.Lock()
        self._engines: dict[Any, tuple[Engine, list[int]]] = {}
        self._held: dict[int, int] = {}

    def __call__(self, *args: Any) -> Any:
        torch = self._torch
        if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            raise UsageError(
                "the backend optdnn is for inference, and a gradient was requested",
                hint="call the module under torch.inference_mode() or torch.no_grad()",
            )
        values = numbers(torch, self._graph, args)
        key = tuple(values[i] if i in values else (tuple(a.shape), a.dtype, a.device.type) for i, a in enumerate(args))
        constants = self._constants(args)
        versions = {id(c): _version(c) for c in constants}
        with self._lock:
            if versions != self._held:
                self._engines.clear()
                self._held = versions
            made = self._engines.pop(key, None)
            if made is None:
                made = self._build(args, values)
                while len(self._engines) >= ENGINES:
                    self._engines.pop(next(iter(self._engines)))
            self._engines[key] = engine, free = made
        feeds = {s.name: args[i].detach().contiguous() for s, i in zip(engine.inputs, free, strict=True)}
        return [self._tensor(a) for a in engine.run(feeds).values()]

    def _constants(self, args: Sequence[Any]) -> list[Any]:
        torch = self._torch
        own = [*self._graph.parameters(), *self._graph.buffers()]
        return own + [a for a in args if isinstance(a, torch.nn.Parameter)]

    def _build(self, args: Sequence[Any], values: Mapping[int, Any]) -> tuple[Engine, list[int]]:
        torch = self._torch
        fixed = [i in values or isinstance(a, torch.nn.Parameter) for i, a in enumerate(args)]
        free = [i for i, f in enumerate(fixed) if not f]
        graph = specialized(torch, self._graph, values)

        class Inference(torch.nn.Module):  # type: ignore[name-defined, misc, unused-ignore]
            """The graph with its parameters in place: only values that change from call to call are inputs."""

            def __init__(self) -> None:
                super().__init__()
                self.graph = graph
                for i, a in enumerate(args):
                    if fixed[i] and i not in values:
                        self.register_buffer(f"constant_{i}", a.detach())

            def forward(self, *given: Any) -> Any:
                rest = iter(given)
                full = [
                    next(rest) if not fixed[i] else getattr(self, f"constant_{i}", values.get(i))
                    for i in range(len(args))
                ]
                return self.graph(*full)

        module = Inference().eval()
        names = [f"input_{k}" for k in range(len(free))]
        engine = from_torch(module, tuple(args[i].detach() for i in free), input_names=names, **self._options)
        if len(engine.inputs) != len(free):  # an input that nothing reads is dropped by the exporter
            kept = {s.name for s in engine.inputs}
            free = [i for i, n in zip(free, names, strict=True) if n in kept]
        return engine, free

    def _tensor(self, array: Any) -> Any:
        torch = self._torch
        if isinstance(array, np.ndarray):
            if array.dtype == BF16:  # torch reads no NumPy arrays of this type
                return torch.from_numpy(array.view(np.uint16).view(np.int16)).view(torch.bfloat16)
            return torch.from_numpy(array)
        return torch.from_dlpack(array)


def _version(tensor: Any) -> int:
    try:
        return int(tensor._version)
    except RuntimeError:  # tensors made in inference mode are not versioned, and cannot be changed outside of it
        return 0
