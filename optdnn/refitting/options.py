"""The options of an engine's build, read back from its record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optdnn.config import AUTO, BuildOptions
from optdnn.custom import CustomOp, check_custom
from optdnn.errors import EngineError, UnsupportedError, UsageError
from optdnn.importers.model import Model
from optdnn.precision.mixture import MIXTURE
from optdnn.ranges import InputShapes, input_shapes, parse_dims
from optdnn.refitting.held_model import HELD_MODEL, held_calibration
from optdnn.runtime.pictures.port import specs_of
from optdnn.runtime.program import Program
from optdnn.target_name import TargetName

RECORDED = (
    "precision", "io_dtype", "opt_level", "threads", "tactics", "stop_after", "strict", "values", "sample", "streams",
    "random_seed", "row_invariant", "workspace", "precision_map", "memory_limit", "nearest_tactics", "strict_precision",
)  # fmt: skip
"""Options that are read unchanged from ``meta["options"]``; none of them names a file."""


def options_again(program: Program, calib: Any = None, custom_ops: Sequence[CustomOp] = ()) -> BuildOptions:
    """The options of the build that made ``program``, with ``calib`` as calibration data (None: the ranges in the engine).

    Raises EngineError for a malformed record, UsageError where calibration data are needed or of no use.
    """
    made: Any = program.meta.get("options", {})
    if AUTO in (made.get("precision"), *program.meta):
        raise UsageError(
            "the precisions of this engine were chosen for its weights (precision auto)",
            hint="build it again: optdnn build",
        )
    preprocess, postprocess = specs_of(program)
    kept: dict[str, Any] = {name: made[name] for name in RECORDED if name in made}
    if "calibrator" in made:
        kept |= {"calib": _calibration(program, calib), "calibrator": made["calibrator"], "images": _images(made)}
    elif calib is not None and MIXTURE not in program.meta:  # of int8+fp16, fp16 may have been chosen
        raise UsageError("the engine was built without calibration data", hint="leave --calib out")
    needed = check_custom(program.requires, custom_ops)
    simulated = TargetName.parse(program.target).simulated
    try:
        return BuildOptions(
            target=program.target,
            shapes=_shapes(made.get("shapes", {})),
            preprocess=preprocess,
            postprocess=postprocess,
            custom_ops=needed,
            refit=HELD_MODEL in program.meta,
            no_cubins=not simulated and bool(program.kernels) and all(k.cubin is None for k in program.kernels),
            **kept,
        )
    except (UsageError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(f"the engine's record of its options is malformed: {error}", hint="build it again") from error


def _shapes(plain: Any) -> InputShapes:
    """``shapes`` from its plain form: of one profile a table, of several a list of them."""
    tables = plain if isinstance(plain, list) else [plain]
    return input_shapes([{name: parse_dims(_text(dims)) for name, dims in table.items()} for table in tables])


def _text(dims: Sequence[Any]) -> str:
    return "x".join("?" if d is None else str(d) for d in dims) or "scalar"


def _calibration(program: Program, calib: Any) -> Any:
    if calib is not None:
        return calib
    held = held_calibration(program)
    if held is None:
        raise UsageError(
            "the engine was calibrated, and does not hold the ranges",
            hint="give calibration data: --calib DATA (a build with --refit keeps the ranges)",
        )
    return held


def _images(made: Any) -> str | None:
    """How calibration prepared pictures, as JSON text: a file's name is not read from an engine."""
    text = made.get("images")
    if text is None:
        return None
    if not isinstance(text, str) or not text.lstrip().startswith("{"):
        raise EngineError("the engine's record of its pictures is malformed")
    return text


def check_inputs(model: Model, options: BuildOptions) -> None:
    """Raise UnsupportedError for a model without the inputs whose shapes the build was given."""
    names = [v.name for v in model.proto.graph.input]
    if absent := sorted(options.shapes.keys() - set(names)):
        raise UnsupportedError(
            f"{model.name} is another network than the engine's: it has no input {absent[0]!r}",
            hint=f"its inputs are {', '.join(map(repr, names))}; build an engine of it",
        )
