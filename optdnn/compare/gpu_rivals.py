"""The rivals of a comparison on a GPU: the network on our kernels only or on the libraries' only, ONNX Runtime, a PyTorch
module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from optdnn.compiler import build_verbose
from optdnn.config import BuildOptions
from optdnn.errors import MissingDependency, UsageError
from optdnn.runtime.cuda.libraries.find import present
from optdnn.runtime.cuda.measuring.rivals import TORCH_COMPILE, TORCH_EAGER, cuda_provider
from optdnn.runtime.racing.candidates import Candidate
from optdnn.target_name import TargetName

RESTRICTED = {"own": ("own",), "cudnn": ("cudnn", "cublaslt")}
"""Rival -> the providers of its engine's kernels (our own kernels replace those that a library lacks)."""
ONNXRUNTIME_CUDA = "onnxruntime-cuda"
GPU_RIVALS = (*RESTRICTED, ONNXRUNTIME_CUDA)
TORCH_RIVALS = {"torch": TORCH_EAGER, "torch-compile": TORCH_COMPILE}


def is_gpu(target: str) -> bool:
    """Whether a target is a GPU target."""
    return TargetName.parse(target).family == "cuda"


def installed_gpu() -> list[str]:
    """The names of the rivals that can take part here."""
    found = ["own", *(["cudnn"] if any(map(present, RESTRICTED["cudnn"])) else [])]
    try:
        cuda_provider()
    except MissingDependency:
        return found
    return [*found, ONNXRUNTIME_CUDA]


def check_gpu_rival(name: str, target: str) -> None:
    """Refuse a rival of :data:`GPU_RIVALS` that cannot take part. Raises UsageError, MissingDependency."""
    if not is_gpu(target):
        raise UsageError(f"{name} is a rival on a GPU; the engine is for {target}", hint="--target cuda")
    if name == ONNXRUNTIME_CUDA:
        cuda_provider()
    elif name == "cudnn" and not any(map(present, RESTRICTED[name])):
        raise MissingDependency("nvidia-cudnn-frontend", "cuda-libs", "to compare with the libraries alone")


def restricted(name: str, model: Path, options: BuildOptions, folder: Path, say: Callable[[str], None]) -> Candidate:
    """The network's engine on the kernels of only some providers, otherwise built like the subject."""
    say(f"build with tactics {','.join(RESTRICTED[name])}")
    made = build_verbose(model, replace(options, tactics=",".join(RESTRICTED[name])), say)
    path = folder / f"{name}.engine"
    made.engine.save(path)
    return Candidate(name, "engine", str(path))


def torch_candidates(factory: str, precision: str, names: Sequence[str]) -> list[Candidate]:
    """The module that ``PKG.MODULE:FACTORY`` makes, in the ways of :data:`TORCH_RIVALS` that ``names`` lists."""
    return [Candidate(name, TORCH_RIVALS[name], factory, precision.partition("+")[0]) for name in names]
