"""The input of an engine that takes pictures, and its outputs that return answers, from the engine's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optdnn.answer_spec import AnswerSpec
from optdnn.errors import EngineError, UsageError
from optdnn.image_spec import ImageSpec
from optdnn.ranges import Profile
from optdnn.runtime.engine import Engine
from optdnn.runtime.pictures.files import Size
from optdnn.runtime.program import Program
from optdnn.types import TensorSpec

BATCH = 8
"""Pictures per batch if an engine accepts any number."""


@dataclass(frozen=True)
class PicturePort:
    """The only input of an engine, which takes pictures. ``answers``: output name -> its postprocessing."""

    tensor: TensorSpec
    spec: ImageSpec
    answers: Mapping[str, AnswerSpec]
    profiles: tuple[Profile, ...] = ()

    @classmethod
    def of(cls, engine: Engine) -> PicturePort:
        """Raises UsageError for an engine that takes no pictures, or that has other inputs as well."""
        specs, answers = specs_of(engine)
        inputs = engine.inputs
        if len(inputs) != 1 or inputs[0].name not in specs:
            had = ", ".join(map(str, inputs))
            raise UsageError(
                f"pictures are not the engine's only input: its inputs are {had}",
                hint="build it with --preprocess NAME=SPEC for its only input",
            )
        if len(inputs[0].shape) != 4:
            raise EngineError(f"input {inputs[0]} has preprocessing and no four dimensions")
        return cls(inputs[0], specs[inputs[0].name], answers, engine.profiles)

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def batch(self) -> int | None:
        """Pictures per call of the engine; None if it accepts any number."""
        first = self.tensor.shape[0]
        return first if isinstance(first, int) else None

    @property
    def usual_batch(self) -> int:
        """Pictures per batch if the caller gives no number."""
        first = self.tensor.shape[0]
        if isinstance(first, int):
            return first
        return next((p[first].opt for p in self.profiles if first in p), BATCH)

    def size_for(self, own: Size) -> Size:
        """Height and width of the engine's picture for a picture of size ``own``: the same if the engine accepts any size."""
        start = 1 if self.spec.input.layout == "hwc" else 2
        high, wide = (self._side(d, n) for d, n in zip(self.tensor.shape[start : start + 2], own, strict=True))
        return high, wide

    def _side(self, dim: int | str, own: int) -> int:
        if isinstance(dim, int):
            return dim
        ranges = [p[dim] for p in self.profiles if dim in p]
        if not ranges or any(own in r for r in ranges):
            return own
        return min((min(max(own, r.min), r.max) for r in ranges), key=lambda n: abs(n - own))


def specs_of(engine: Engine | Program) -> tuple[dict[str, ImageSpec], dict[str, AnswerSpec]]:
    """The preprocessing of inputs and the postprocessing of outputs, from the metadata of an engine or of its program. Raises
    EngineError."""
    options: Any = engine.meta.get("options", {})
    try:
        specs = {name: ImageSpec.of(_table(plain)) for name, plain in options.get("preprocess", {}).items()}
        answers = {name: AnswerSpec.of(_table(plain)) for name, plain in options.get("postprocess", {}).items()}
    except (UsageError, AttributeError, TypeError) as error:
        raise EngineError(f"the engine's record of its pictures is malformed: {error}") from None
    return specs, answers


def _table(plain: Any) -> Mapping[str, Any]:
    """A spec in an engine's metadata. Raises TypeError for text: it would name a file, which an engine must not read."""
    if not isinstance(plain, Mapping) or not isinstance(plain.get("labels", []), list):
        raise TypeError(f"{plain!r:.60} is not an object with a list of labels")
    return plain
