"""optdnn: an inference-optimizing model compiler. ONNX in, a verified engine out.

    engine = optdnn.build("model.onnx", target="cpu")
    engine.save("model.engine")
    engine = optdnn.load("model.engine")
    y = engine.run({"x": array})

Names are imported on first use, so that ``import optdnn`` is quick and loading an engine needs neither
onnx nor networkx.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# In the source tree, passes, runtime, cli and models are next to this folder, not in it. A Python that is started in the
# clone's root finds this folder before any installed copy.
_here = os.path.abspath(__path__[0])
if not os.path.isdir(os.path.join(_here, "runtime")):
    __path__.append(os.path.dirname(_here))

if TYPE_CHECKING:
    from optdnn.answer_spec import AnswerSpec
    from optdnn.compare.verification import Verification, verify
    from optdnn.compiler import build
    from optdnn.custom import CudaKernel, CudaLaunch, CustomOp, custom_op
    from optdnn.errors import (
        EngineError,
        EngineStale,
        GpuFault,
        InputError,
        InternalError,
        MissingDependency,
        ModelError,
        NotMet,
        OptdnnError,
        OutputError,
        RankError,
        RunError,
        ShapeError,
        UnsupportedError,
        UsageError,
    )
    from optdnn.generation.generator import Generator
    from optdnn.image_spec import ImageSpec, PictureInput
    from optdnn.integrations.onnxruntime import InferenceSession, SessionOptions, get_available_providers
    from optdnn.integrations.pytorch import from_torch
    from optdnn.integrations.ray import Predictor
    from optdnn.ranges import DimRange
    from optdnn.runtime.contexts.stepwise import Context
    from optdnn.runtime.engine import Engine, load
    from optdnn.runtime.file.signing import sign
    from optdnn.runtime.pictures.stream import PictureAnswer, picture_answers
    from optdnn.tuning.retune import retune
    from optdnn.types import TensorSpec

_ERRORS = (
    "EngineError EngineStale GpuFault InputError InternalError MissingDependency ModelError NotMet OptdnnError OutputError "
    "RankError RunError ShapeError UnsupportedError UsageError"
)
_WHERE = {
    "build": "optdnn.compiler",
    "load": "optdnn.loading",
    "Engine": "optdnn.runtime.engine",
    "Context": "optdnn.runtime.contexts.stepwise",
    "DimRange": "optdnn.ranges",
    "AnswerSpec": "optdnn.answer_spec",
    "Generator": "optdnn.generation.generator",
    **dict.fromkeys(("ImageSpec", "PictureInput"), "optdnn.image_spec"),
    **dict.fromkeys(("PictureAnswer", "picture_answers"), "optdnn.runtime.pictures.stream"),
    "retune": "optdnn.tuning.retune",
    "sign": "optdnn.runtime.file.signing",
    **dict.fromkeys(("CudaKernel", "CudaLaunch", "CustomOp", "custom_op"), "optdnn.custom"),
    "from_torch": "optdnn.integrations.pytorch",
    "Predictor": "optdnn.integrations.ray",
    **dict.fromkeys(
        ("InferenceSession", "SessionOptions", "get_available_providers"), "optdnn.integrations.onnxruntime"
    ),
    "TensorSpec": "optdnn.types",
    **dict.fromkeys(("Verification", "verify"), "optdnn.compare.verification"),
    **dict.fromkeys(_ERRORS.split(), "optdnn.errors"),
}
"""Public name -> the module that has it."""

__all__ = [  # noqa: PLE0604, RUF100
    "AnswerSpec",
    "Context",
    "CudaKernel",
    "CudaLaunch",
    "CustomOp",
    "DimRange",
    "Engine",
    "EngineError",
    "EngineStale",
    "Generator",
    "GpuFault",
    "ImageSpec",
    "InferenceSession",
    "InputError",
    "InternalError",
    "MissingDependency",
    "ModelError",
    "NotMet",
    "OptdnnError",
    "OutputError",
    "PictureAnswer",
    "PictureInput",
    "Predictor",
    "RankError",
    "RunError",
    "SessionOptions",
    "ShapeError",
    "TensorSpec",
    "UnsupportedError",
    "UsageError",
    "Verification",
    "build",
    "custom_op",
    "from_torch",
    "get_available_providers",
    "load",
    "picture_answers",
    "retune",
    "sign",
    "verify",
]


def __getattr__(name: str) -> Any:
    try:
        module = _WHERE[name]
    except KeyError:
        raise AttributeError(f"module 'optdnn' has no attribute {name!r}") from None
    from optdnn.quick_import import quick_import

    value = getattr(quick_import(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted((*__all__, "__version__"))
