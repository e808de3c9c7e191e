"""``optdnn.InferenceSession``: an engine with onnxruntime's interface, for programs written for onnxruntime.

    session = optdnn.InferenceSession("model.onnx", providers=["CUDAExecutionProvider", "CPUExecutionProvider"])
    logits, = session.run(None, {session.get_inputs()[0].name: x})

onnxruntime's providers are targets here: the first one that this machine has is used, with a warning about those that
were skipped. Options of onnxruntime without a meaning here are accepted; an option whose effect would be missing is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from optdnn.errors import InputError, UsageError, did_you_mean, warn
from optdnn.integrations.io_binding import IOBinding, tensor_type
from optdnn.runtime.contexts.asynchronous import Callback, Runs
from optdnn.runtime.engine import Engine
from optdnn.runtime.file.format import MAGIC, is_engine
from optdnn.target_name import TargetName
from optdnn.types import Array, DType, TensorSpec

PROVIDERS: dict[str, dict[str, Any]] = {
    "TensorrtExecutionProvider": {"target": "cuda"},
    "NvTensorRTRTXExecutionProvider": {"target": "cuda"},
    "CUDAExecutionProvider": {"target": "cuda"},
    "OpenVINOExecutionProvider": {"target": "cpu", "tactics": "openvino"},
    "CPUExecutionProvider": {"target": "cpu"},
}
"""onnxruntime's provider -> options of a build."""
_PRECISIONS = {"trt_fp16_enable": "fp16", "trt_bf16_enable": "bf16"}
_WITHOUT_EFFECT = frozenset((
    "device_id", "arena_extend_strategy", "gpu_mem_limit", "cudnn_conv_algo_search",
    "cudnn_conv_use_max_workspace", "do_copy_in_default_stream", "enable_cuda_graph", "tunable_op_enable",
    "trt_engine_cache_enable", "trt_engine_cache_path", "trt_timing_cache_enable", "trt_max_workspace_size",
    "trt_builder_optimization_level", "device_type",
))  # fmt: skip
"""Provider options about onnxruntime's internals, without an equivalent in an engine."""
_LEVELS = {0: 0, 1: 1, 2: 2, 3: 3, 99: 3}
"""GraphOptimizationLevel -> opt_level."""


@dataclass(slots=True)  # a misspelt option raises AttributeError, as onnxruntime's class does
class SessionOptions:
    """The options of onnxruntime's class of this name that an engine has; onnxruntime's own objects are accepted as well."""

    intra_op_num_threads: int = 0
    inter_op_num_threads: int = 0
    graph_optimization_level: Any = 99
    optimized_model_filepath: str = ""
    enable_profiling: bool = False
    log_severity_level: int = 2
    log_verbosity_level: int = 0
    enable_mem_pattern: bool = True
    enable_mem_reuse: bool = True
    enable_cpu_mem_arena: bool = True
    execution_mode: Any = None
    execution_order: Any = None
    logid: str = ""
    profile_file_prefix: str = "onnxruntime_profile_"
    use_per_session_threads: bool = True
    use_deterministic_compute: bool = False
    free_dimensions: dict[str, int] = field(default_factory=dict)

    def add_free_dimension_override_by_name(self, name: str, size: int) -> None:
        """Give the symbolic dimension ``name`` a size."""
        self.free_dimensions[name] = int(size)

    def add_session_config_entry(self, key: str, value: str) -> None:
        """onnxruntime's own configuration, which is ignored."""

    def register_custom_ops_library(self, path: str) -> None:
        """Refused: an engine cannot call the operators of such a library."""
        raise UsageError(
            f"an engine cannot run the operators of onnxruntime's library {path}",
            hint="write them with optdnn.custom_op: InferenceSession(path, custom_ops=[...])",
        )

    def add_initializer(self, name: str, value: Any) -> None:
        """Refused: the weights are in the model."""
        raise UsageError(
            f"the initializer {name!r} cannot be replaced in a session",
            hint="put the weights into the model, or session.engine.refit(...)",
        )


@dataclass(frozen=True)
class NodeArg:
    """An input or output: ``type`` as "tensor(float)", ``shape`` with names for symbolic dimensions."""

    name: str
    type: str
    shape: list[int | str]


@dataclass(frozen=True)
class ModelMetadata:
    """The facts of a model, with the fields of onnxruntime's class of this name."""

    graph_name: str
    producer_name: str = "optdnn"
    description: str = ""
    domain: str = ""
    graph_description: str = ""
    version: int = 0
    custom_metadata_map: Mapping[str, str] = field(default_factory=dict)


class InferenceSession:
    """A model (path or bytes), or an engine file, ready to run. Safe to share between threads.

    ``build`` are further options of :func:`optdnn.build` (precision, shapes, …). Raises the errors of building and loading, and
    UsageError if this machine has none of the providers.
    """

    def __init__(
        self,
        path_or_bytes: str | os.PathLike[str] | bytes,
        sess_options: Any = None,
        providers: Sequence[str | tuple[str, Mapping[str, Any]]] | None = None,
        provider_options: Sequence[Mapping[str, Any]] | None = None,
        **build: Any,
    ):
        options = sess_options if sess_options is not None else SessionOptions()
        if not hasattr(options, "intra_op_num_threads"):
            raise UsageError(
                f"sess_options must be optdnn.SessionOptions or ONNX Runtime's, not {type(options).__name__}"
            )
        self._options = options
        self._runs = Runs()
        if _is_engine(path_or_bytes):
            if build:
                raise UsageError(f"an engine is built already; {', '.join(build)} cannot be given to its session")
            from optdnn.loading import load

            self._engine = load(path_or_bytes, threads=options.intra_op_num_threads or None)  # type: ignore[arg-type]
            self._providers = [_provider_of(self._engine.target)]
            self._metadata = _metadata_held(self._engine.meta.get("model"))
        else:
            name, chosen = _choose(_listed(providers, provider_options))
            chosen = {**chosen, **_of_options(options), **build}
            self._engine = _built(path_or_bytes, getattr(options, "free_dimensions", {}), chosen)
            self._providers = [name]
            self._metadata = _metadata_of(path_or_bytes)

    @property
    def engine(self) -> Engine:
        """The engine that the session runs."""
        return self._engine

    def get_inputs(self) -> list[NodeArg]:
        return [_arg(s) for s in self._engine.inputs]

    def get_outputs(self) -> list[NodeArg]:
        return [_arg(s) for s in self._engine.outputs]

    def get_overridable_initializers(self) -> list[NodeArg]:
        """None: an initializer that is also an input is a constant here."""
        return []

    def get_providers(self) -> list[str]:
        return list(self._providers)

    def get_session_options(self) -> Any:
        return self._options

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """No options for each provider: the build has used them."""
        return {name: {} for name in self._providers}

    def get_modelmeta(self) -> ModelMetadata:
        """The model's metadata. An engine file records those of the model that it was built from."""
        return self._metadata

    def disable_fallback(self) -> None:
        """Does nothing: there is no fallback to another provider."""

    def enable_fallback(self) -> None:
        """Does nothing: there is no fallback to another provider."""

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: Any = None
    ) -> list[Array]:
        """The named outputs (all, for None), in the order of the names. Raises InputError for a name that is not an output."""
        wanted = self._wanted(output_names)
        if not isinstance(input_feed, Mapping):
            raise InputError(f"input_feed must map names to arrays, not {type(input_feed).__name__}")
        types = {s.name: s.dtype for s in self._engine.inputs}
        results = self._engine.run({n: _fed(a, types.get(n)) for n, a in input_feed.items()})
        return [results[n] for n in wanted]

    def run_with_ort_values(
        self, output_names: Sequence[str] | None, input_dict_ort_values: Mapping[str, Any], run_options: Any = None
    ) -> list[Any]:
        """:meth:`run` with onnxruntime's OrtValues as inputs and as results, in host memory. Raises InputError for other arrays."""
        for name, value in input_dict_ort_values.items():
            if not hasattr(value, "ortvalue_from_numpy"):
                raise InputError(
                    f"input {name!r} is {type(value).__name__}, not an OrtValue", hint="session.run takes arrays"
                )
        results = self.run(output_names, input_dict_ort_values, run_options)
        given = next(iter(input_dict_ort_values.values()), None)
        kind: Any = import_module("onnxruntime").OrtValue if given is None else type(given)
        return [kind.ortvalue_from_numpy(a) for a in results]

    def run_async(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        callback: Callback,
        user_data: object = None,
        run_options: Any = None,
    ) -> None:
        """:meth:`run` in a separate thread, which then calls ``callback(results, user_data, error)``: with the list of outputs
        and "", or with None and the error's text. Raises InputError immediately for a name that is not an output."""
        self._wanted(output_names)
        self._runs.start(lambda: self.run(output_names, input_feed, run_options), callback, user_data)

    def _wanted(self, output_names: Sequence[str] | None) -> list[str]:
        known = [s.name for s in self._engine.outputs]
        if isinstance(output_names, str):
            raise InputError(f"output_names must be a list of names, not the text {output_names!r}")
        wanted = known if not output_names else list(output_names)
        if unknown := [n for n in wanted if n not in known]:
            raise InputError(
                f"there is no output {unknown[0]!r}; the model gives {', '.join(known)}",
                hint=did_you_mean(str(unknown[0]), known),
            )
        return wanted

    def io_binding(self) -> IOBinding:
        """A binding of inputs and outputs to memory of the host or of the GPU."""
        return IOBinding(self._engine)

    def run_with_iobinding(self, binding: IOBinding, run_options: Any = None) -> None:
        """Run on the arrays of a binding, and wait for the results."""
        if not isinstance(binding, IOBinding):
            raise UsageError(
                f"the binding is a {type(binding).__name__}, not one of this session",
                hint="make it with session.io_binding()",
            )
        binding.run()


def get_available_providers() -> list[str]:
    """The providers whose targets run on this machine, the fastest first."""
    return [name for name in PROVIDERS if _why_not(PROVIDERS[name]) is None]


def _metadata_of(model: str | os.PathLike[str] | bytes) -> ModelMetadata:
    """The facts of an ONNX model, in any form that onnxruntime accepts."""
    from optdnn.importers.model import description, open_model

    proto = open_model(model).proto  # type: ignore[arg-type]
    return ModelMetadata(proto.graph.name, **{"producer_name": "", **description(proto)})


def _metadata_held(held: Any) -> ModelMetadata:
    """The facts of the model that an engine records. Fields of another type, which no build writes, are left out."""
    table = held if isinstance(held, Mapping) else {}
    said = table.get("description")
    said = said if isinstance(said, Mapping) else {}
    usual = {f.name: f.default for f in fields(ModelMetadata) if f.name not in ("graph_name", "custom_metadata_map")}
    known = {name: said[name] for name, value in usual.items() if type(said.get(name)) is type(value)}
    own = said.get("custom_metadata_map")
    texts = {str(k): str(v) for k, v in own.items()} if isinstance(own, Mapping) else {}
    return ModelMetadata(str(table.get("name", "")), **{"producer_name": "", **known}, custom_metadata_map=texts)


def _fed(value: Any, dtype: DType | None) -> Any:
    """An input as the engine takes it: plain lists and numbers get the input's element type, as in onnxruntime."""
    if type(value).__name__ == "OrtValue":
        return value.numpy()
    if not isinstance(value, (list, int, float)):
        return value
    try:
        return np.asarray(value, dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"a list cannot be read as an array of {dtype}: {error}") from None


def _is_engine(given: Any) -> bool:
    if not isinstance(given, (str, os.PathLike, bytes, bytearray, memoryview)):
        raise UsageError(f"a session takes a path or the bytes of a model, not {type(given).__name__}")
    if isinstance(given, (bytes, bytearray, memoryview)):
        if bytes(given[: len(MAGIC)]) == MAGIC:
            raise UsageError("an engine is loaded from its file, not from bytes", hint="give its path")
        return False
    try:
        return is_engine(given)
    except OSError:
        return False  # the build's error will explain


def _listed(providers: Any, options: Any) -> list[tuple[str, Mapping[str, Any]]]:
    given = [providers] if isinstance(providers, str) else list(providers or ["CPUExecutionProvider"])
    pairs = [(p, {}) if isinstance(p, str) else p for p in given]
    for pair in pairs:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[1], Mapping)):
            raise UsageError(f"a provider is a name, or a pair of a name and its options, not {pair!r}")
    if options:
        if len(options) != len(pairs):
            raise UsageError(f"{len(options)} provider_options are given for {len(pairs)} providers")
        pairs = [(name, {**own, **more}) for (name, own), more in zip(pairs, options, strict=True)]
    unknown = [name for name, _ in pairs if name not in PROVIDERS]
    if len(unknown) == len(pairs):
        raise UsageError(
            f"optdnn has nothing like the provider {unknown[0]!r}", hint=f"it knows {', '.join(PROVIDERS)}"
        )
    return pairs


def _choose(pairs: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[str, dict[str, Any]]:
    """The first provider that this machine has, and its build options."""
    passed_over = []
    for name, own in pairs:
        why = _why_not(PROVIDERS[name]) if name in PROVIDERS else "optdnn has nothing like it"
        if why is not None:
            passed_over.append(f"{name}: {why}")
            continue
        if passed_over:
            warn(f"{name} is used; not available here: {'; '.join(passed_over)}")
        chosen = dict(PROVIDERS[name])
        for key, value in own.items():
            if key in _PRECISIONS:
                if str(value) in ("True", "1", "true"):
                    chosen["precision"] = _PRECISIONS[key]
            elif key not in _WITHOUT_EFFECT or (key == "device_id" and int(value) != 0):
                raise UsageError(f"optdnn does not know the option {key}={value!r} of {name}")
        return name, chosen
    raise UsageError(f"none of the providers is available here: {'; '.join(passed_over)}")


def _why_not(means: Mapping[str, Any]) -> str | None:
    """Why a target cannot be used on this machine."""
    if means["target"] == "cuda":
        from optdnn.runtime.cuda.usable import why_not

        return why_not()
    libraries = [str(means["tactics"])] if "tactics" in means else ["openvino", "onnxruntime"]
    if all(find_spec(name) is None for name in libraries):
        return f"{' or '.join(libraries)} not installed: pip install 'optdnn[cpu]'"
    return None


def _of_options(options: Any) -> dict[str, Any]:
    """Build options from session options (ours, or onnxruntime's)."""
    level = getattr(options, "graph_optimization_level", 99)
    number = getattr(level, "value", level)
    if number not in _LEVELS:
        raise UsageError(f"graph_optimization_level {level!r} is not one of onnxruntime's")
    if getattr(options, "enable_profiling", False):
        raise UsageError(
            "optdnn.InferenceSession writes no profile",
            hint="use session.engine.context().profile, or optdnn bench --profile",
        )
    found: dict[str, Any] = {"opt_level": _LEVELS[number]}
    if threads := int(getattr(options, "intra_op_num_threads", 0)):
        found["threads"] = threads
    if path := getattr(options, "optimized_model_filepath", ""):
        found["emit_onnx"] = path
    return found


def _built(model: Any, sizes: Mapping[str, int], options: dict[str, Any]) -> Engine:
    from optdnn.compiler import build

    if sizes:
        options["shapes"] = {**_shapes(model, sizes), **dict(options.get("shapes", {}))}
    return build(Path(model) if isinstance(model, str) else model, **options)


def _shapes(model: Any, sizes: Mapping[str, int]) -> dict[str, tuple[int | None, ...]]:
    """The shapes of the inputs, with some symbols or expressions of the model replaced.

    Raises UsageError for a name that is not a dimension.
    """
    from optdnn.dim import Dim
    from optdnn.dim_text import parse_dim
    from optdnn.importers.draws import with_draws
    from optdnn.importers.onnx import import_model

    graph = import_model(with_draws(model, 0))  # only its inputs are used
    ports = [graph.op(i).outputs[0] for i in graph.inputs]
    dims = {d for p in ports for d in p.type.shape or () if isinstance(d, Dim)}
    symbols = graph.symbols()
    named = {name: symbols[name] if name in symbols else parse_dim(name) for name in sizes}
    if unknown := sorted(name for name, d in named.items() if d not in dims):
        raise UsageError(f"no input has a dimension {unknown[0]!r}", hint=f"there are {', '.join(symbols)}")
    size = {named[name]: n for name, n in sizes.items()}
    return {
        p.name: tuple(size.get(d) if isinstance(d, Dim) else d for d in p.type.dims)
        for p in ports
        if p.type.shape is not None
    }


def _provider_of(target: str) -> str:
    return "CUDAExecutionProvider" if TargetName.parse(target).family == "cuda" else "CPUExecutionProvider"


def _arg(spec: TensorSpec) -> NodeArg:
    return NodeArg(spec.name, tensor_type(spec.dtype), list(spec.shape))
