"""From a workload to a model, inputs, an engine and a PyTorch module.

Sources: ``zoo`` (optdnn.models.zoo), ``trained`` (optdnn.models.trained), ``light`` (the onnx wheel's), ``shared`` (a folder
with ``fill.py`` and ``graphs/``: :func:`shared_folder`), ``operator`` (one ONNX operator), ``products``
(:mod:`benchmarks.products`), ``decoders`` (:mod:`benchmarks.decoders`), and PyTorch modules with seeded
weights: ``torchvision``, ``timm``, ``transformers``, ``diffusers``, ``torchaudio`` and ``torch``.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

import optdnn
from benchmarks import decoders, products
from benchmarks.rows import ROOT
from benchmarks.workloads import Network, Workload
from optdnn.errors import UsageError

Feeds = dict[str, Any]
TORCH = ("torchvision", "timm", "transformers", "diffusers", "torchaudio", "torch")
"""Sources of PyTorch modules."""
SHARED = "OPTDNN_SHARED"
"""The environment variable that names the folder of the source ``shared``; children of the harness inherit it."""


def tests_on_path() -> None:
    """Make a folder of the tests importable: these folders are not packages, but benchmarks share code with them."""
    for part in ("tests", "tests/ops", "tests/networks", "tests/kernels"):
        if str(ROOT / part) not in sys.path:
            sys.path.insert(0, str(ROOT / part))


# ---------------------------------------------------------------- ONNX models


def fill() -> Any:
    """``fill.py`` of the folder: ``fill(path)`` gives a model, ``feeds(model, seed, sizes)`` its inputs."""
    tests_on_path()
    from support.agreement import fill_module

    return fill_module(shared_folder())


def shared_folder() -> Path:
    """The folder with ``fill.py`` and ``graphs/NAME.onnx``. Raises UsageError if it is not given."""
    text = os.environ.get(SHARED)
    if not text or not (Path(text) / "graphs").is_dir():
        raise UsageError("workloads of 'shared' need --shared FOLDER", hint="it holds fill.py and graphs/, unpacked")
    return Path(text)


def shared_names() -> list[str]:
    """Networks of the folder, largest first, so that no large one runs alone at the end."""
    return [p.stem for p in sorted((shared_folder() / "graphs").glob("*.onnx"), key=lambda p: -p.stat().st_size)]


def onnx_of(workload: Workload) -> onnx.ModelProto:
    """The ONNX model of a workload that is not a PyTorch module, its batch fixed."""
    source, name = workload.source, workload.short
    if source == "zoo":
        from optdnn.models import zoo

        return zoo.build(name, batch=workload.batch, **dict(workload.settings))
    if source == "trained":
        from optdnn.models import trained

        return _fixed(onnx.load(trained.load(name).path), workload.batch)
    if source == "light":
        tests_on_path()
        from support.light import light

        return light(f"light_{name}")
    if source == "shared":
        return _fixed(fill().fill(str(shared_folder() / "graphs" / f"{name}.onnx")), workload.batch)
    if source == "operator":
        return operator_model(workload.made, workload.batch)
    if source == "products":
        return products.model(workload)
    if source == "decoders":
        return decoders.model(workload)
    raise UsageError(f"{source!r} is no source of ONNX models")


def _fixed(model: onnx.ModelProto, batch: int) -> onnx.ModelProto:
    """Fix the batch, the symbolic first dimension of each input, in the file itself: rivals get fixed shapes, too.

    The length of a sequence stays symbolic."""
    constants = {t.name for t in model.graph.initializer}
    inputs = [v for v in model.graph.input if v.name not in constants]
    names = {d.dim_param for v in inputs for d in v.type.tensor_type.shape.dim[:1] if d.dim_param}
    changed = False
    for value in inputs:
        for axis, d in enumerate(value.type.tensor_type.shape.dim):
            if not d.HasField("dim_value") and (axis == 0 or d.dim_param in names or not d.dim_param):
                d.dim_value, changed = batch, True
    if changed:
        del model.graph.value_info[:]
        for output in model.graph.output:
            output.type.tensor_type.ClearField("shape")
    return model


def operator_model(made: Network, batch: int) -> onnx.ModelProto:
    """One ONNX operator with seeded weights. ``options``: attributes; ``weights``: shapes of its constants; ``constants``:
    their values by name (integers are int64, other numbers fp32)."""
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal(s, np.float32) * np.float32(np.prod(s[1:]) ** -0.5) for s in made.weights]
    values = [np.array(v, np.float32 if isinstance(v[0], float) else np.int64) for v in made.constants.values()]
    inputs = [
        helper.make_tensor_value_info(f"x{k}", onnx.TensorProto.FLOAT, (batch, *sizes))
        for k, (_, *sizes) in enumerate(made.inputs)
    ]
    tensors = [numpy_helper.from_array(a, f"w{k}") for k, a in enumerate([*weights, *values])]
    absent = [""] if made.make == "Resize" else []  # its region of interest
    names = [*(v.name for v in inputs), *absent, *(t.name for t in tensors)]
    outputs = ["y", "indices"] if made.make == "TopK" else ["y"]
    node = helper.make_node(made.make, names, outputs, name=made.make, **made.options)
    results = [helper.make_empty_tensor_value_info(n) for n in outputs]
    graph = helper.make_graph([node], made.make, inputs, results, tensors)
    opset = 25 if made.make == "Attention" else 21  # windows begin with 25
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    return onnx.shape_inference.infer_shapes(model)


LENGTHS = "1..128..384"
"""The range of lengths of :func:`ranged`: minimum, optimum, maximum."""


def ranged(workload: Workload) -> tuple[onnx.ModelProto, dict[str, list[str]]]:
    """A network of the zoo over sequences, its length symbolic, and the dimensions of its inputs, :data:`LENGTHS` among
    them."""
    from optdnn.models import zoo

    model = zoo.build(workload.short, batch=workload.batch, sequence_length="seq")
    dims = {v.name: [d.dim_param or str(d.dim_value) for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    return model, {name: [LENGTHS if d == "seq" else d for d in of] for name, of in dims.items()}


# ---------------------------------------------------------------- inputs


def feeds_of(workload: Workload, model: Any = None, *, seed: int = 1) -> Feeds:
    """Seeded inputs by name. PyTorch modules name theirs ``x0``, ``x1``, …"""
    if workload.source in TORCH:
        return {f"x{k}": t.numpy() for k, t in enumerate(tensors_of(workload, seed))}
    if workload.source == "zoo":
        from optdnn.models import zoo

        return zoo.example_inputs(model, seed=seed)
    if workload.source == "shared":
        return dict(fill().feeds(model, seed))
    if workload.source == "decoders":
        return decoders.feeds(workload, seed)
    rng = np.random.default_rng(seed)
    constants = {t.name for t in model.graph.initializer}
    return {
        v.name: rng.standard_normal([d.dim_value for d in v.type.tensor_type.shape.dim]).astype(np.float32)
        for v in model.graph.input
        if v.name not in constants
    }


def calibration(feeds: Mapping[str, Any]) -> Feeds:
    """Inputs of the same kind, for calibration."""
    rng = np.random.default_rng(5)
    return {
        k: (v + rng.standard_normal(v.shape).astype(v.dtype) * 0.1).astype(v.dtype) if v.dtype.kind == "f" else v
        for k, v in feeds.items()
    }


def tensors_of(workload: Workload, seed: int) -> tuple[Any, ...]:
    """Seeded inputs of a PyTorch module. Kinds: ``normal`` (sizes), ``tokens`` (length), ``step`` (a fixed scalar), ``steps``
    (a fixed number for each of the batch), ``lengths`` (the full length for each of the batch)."""
    import torch

    found, generator = [], torch.Generator().manual_seed(seed)
    for kind, *sizes in inputs_of(workload):
        if kind == "normal":
            found.append(torch.randn(workload.batch, *sizes, generator=generator))
        elif kind == "tokens":
            found.append(torch.randint(5, 1000, (workload.batch, *sizes), generator=generator))
        elif kind == "step":
            found.append(torch.tensor(sizes[0]))
        elif kind in ("steps", "lengths"):
            found.append(torch.full((workload.batch,), sizes[0]))
        else:
            raise UsageError(f"{kind!r} is no kind of input")
    return tuple(found)


def inputs_of(workload: Workload) -> Sequence[Sequence[Any]]:
    """The kinds of a PyTorch module's inputs: its own, or a picture. Pictures have the workload's size, if it names one."""
    side = workload.side
    return [(*kind[:2], side, side) if side and len(kind) == 4 else kind for kind in _own_inputs(workload)]


def _own_inputs(workload: Workload) -> Sequence[Sequence[Any]]:
    if made := workload.made.inputs:
        return made
    if workload.source == "timm":
        import timm

        found = timm.get_pretrained_cfg(workload.short)
        if found is None:
            raise UsageError(
                f"timm {timm.__version__} has no network {workload.short!r}", hint="timm.list_models() lists them"
            )
        return (("normal", *found.input_size),)
    return (("normal", 3, 224, 224),)


# ---------------------------------------------------------------- PyTorch modules


def module_of(workload: Workload) -> Any:
    """The PyTorch module in evaluation mode, fp32, on the host; the same in every process."""
    import torch

    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    if workload.source == "zoo":
        from benchmarks.torch_modules import factory

        state = {t.name: numpy_helper.to_array(t) for t in onnx_of(workload).graph.initializer}
        return factory(workload.short, state)
    module = first(_made(workload), workload.made.call)
    norms = [part for part in module.modules() if isinstance(part, torch.nn.modules.batchnorm._BatchNorm)]
    if norms:  # as after training: signals keep their magnitude through the layers
        module.eval()
        for part in norms:
            part.momentum, part.training = 1.0, True
        module(*tensors_of(replace(workload, batch=2), 3))
    return module.eval()


def _made(workload: Workload) -> Any:
    """The library's own module, with its initial weights."""
    made, name = workload.made, workload.short
    if workload.source == "torchvision":
        from torchvision.models import get_model

        segments = {"weights_backbone": None} if name.startswith(("deeplabv3", "fcn", "lraspp")) else {}
        return get_model(name, weights=None, **segments, **made.options)
    if workload.source == "timm":
        import timm

        sized = {k: v for k, v in workload.settings if k == "img_size"}
        return timm.create_model(name, pretrained=False, **made.options, **sized)
    if workload.source == "torch":
        from benchmarks import networks

        return getattr(networks, made.make)(**made.options)
    library = importlib.import_module({"torchaudio": "torchaudio.models"}.get(workload.source, workload.source))
    found: Any = library
    for part in (
        (made.make or name).removesuffix(".decode").split(".")
    ):  # modules, what makes the network, and its parts
        found = getattr(found, part)
        if inspect.isclass(found) or inspect.isfunction(found):
            options = made.options
            found = found(found.config_class(**options)) if workload.source == "transformers" else found(**options)
    return first(found, {}, "decode") if made.make.endswith(".decode") else found


def first(inner: Any, fixed: Mapping[str, Any], method: str = "forward") -> Any:
    """The first tensor of what a module's method gives, where it gives a dictionary or a tuple; ``fixed``: arguments of each
    call."""
    import torch

    class First(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            found = (self.inner if method == "forward" else getattr(self.inner, method))(*inputs, **fixed)
            if isinstance(found, torch.Tensor):
                return found
            return found[0] if isinstance(found, tuple) else next(iter(found.values()))  # type: ignore[no-any-return]

    return First()


# ---------------------------------------------------------------- engines


def engine_of(workload: Workload, feeds: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """The workload's engine at its precision. ``options`` are those of :func:`optdnn.build`; calibration data for 8 bits is
    made up unless it is given."""
    options = {"precision": workload.precision, **options}
    if workload.source in TORCH:
        import torch

        torch.set_num_threads(1)
        inputs = tensors_of(workload, 1)
        names = [f"x{k}" for k in range(len(inputs))]
        if "8" in options["precision"]:
            options.setdefault("calib", [calibration(feeds_of(workload))])
        return optdnn.from_torch(module_of(workload), inputs, input_names=names, **options)
    model = onnx_of(workload)
    found = feeds or feeds_of(workload, model)
    if "8" in options["precision"]:
        options.setdefault("calib", [calibration(found)])
    return optdnn.build(model, shapes={k: np.shape(v) for k, v in found.items()}, **options)


def save_engine(workload: Workload, folder: Path, **options: Any) -> None:
    """Build the workload's engine, and save it and its inputs in a folder: ``engine`` and ``feeds.npz``."""
    feeds = feeds_of(workload, None if workload.source in TORCH else onnx_of(workload))
    engine_of(workload, feeds, **options).save(folder / "engine")
    np.savez(folder / "feeds.npz", **feeds)


def kinds_on_cpu(engine: Any) -> list[str]:
    """The kinds of operators that a GPU's engine runs on the CPU."""
    return sorted({o["kind"] for o in engine.meta.get("host", {}).get("operators", [])})


@contextmanager
def forbidden(tactic: str) -> Iterator[None]:
    """In this context, builds for GPUs do not use the tactic ("": they may use all)."""
    from unittest.mock import patch

    from optdnn.lowering import table

    kept = {kind: tuple(t for t in tactics if t.name != tactic) for kind, tactics in table.TACTICS.items()}
    with patch.dict(table.TACTICS, kept):
        yield
