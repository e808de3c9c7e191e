"""The options of the commands that build, and the :class:`BuildOptions` that they make."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from optdnn.cli.common import warn
from optdnn.cli.options import FILE, SIZE, Integer, Number, config_option, option, words
from optdnn.config import CALIBRATORS, DEVICES_LIMIT, IO_DTYPES, PRECISIONS, SPLITS, BuildOptions
from optdnn.errors import UsageError
from optdnn.ranges import parse_shapes
from optdnn.target_name import TARGETS

F = TypeVar("F", bound=Callable[..., Any])
PRECISION, NETWORK, TUNING = "Precision", "Network", "Target and tuning"
CALIBRATION, AUTO = "Calibration (int8, fp8, auto)", "Precision auto"


NETWORK_OPTIONS = [
    option("--shape", "shape", multiple=True, group=NETWORK, metavar="NAME=1x3x224x224",
           help="Fix an input's shape; ? leaves a dimension symbolic, MIN..OPT..MAX is a range. Repeat for another profile."),
    option("--value", "value", multiple=True, group=NETWORK, metavar="NAME=1,2",
           help="The constant value of an input; sizes follow from it."),
    option("--sample", group=NETWORK, metavar="OUTPUT",
           help="Sample the next token inside the engine, from this output of logits."),
    option("--random-seed", type=Integer(min=0), group=NETWORK, metavar="N",
           help="Accept random operators. They draw from this seed, so every run has the same numbers."),
    option("--preprocess", "preprocess", multiple=True, group=NETWORK, metavar="NAME=SPEC",
           help="Let the engine prepare pictures for this input. SPEC: JSON of an ImageSpec, or a file with it."),
    option("--postprocess", "postprocess", multiple=True, group=NETWORK, metavar="NAME=STEPS",
           help="Steps on an output: softmax+top-k:5,labels=FILE, argmax or boxes:xyxy."),
    option("--io-dtype", default="model", group=NETWORK, metavar="DTYPE", shell_complete=words(*IO_DTYPES),
           help="Element type of inputs and outputs: fp32, fp16, bf16, or the model's own."),
    option("--opt-level", "-O", type=Integer(0, 3), default=3, show_default=True, group=NETWORK,
           help="Passes to run: 0 none, 3 all."),
]  # fmt: skip
TARGET_OPTIONS = [
    option("--target", default="auto", show_default=True, group=TUNING, metavar="TARGET", shell_complete=words(*TARGETS),
           help="auto, cpu, reference, cuda, cuda:ARCH or simulate."),
    option("--tactics", default="auto", show_default=True, group=TUNING, metavar="T",
           help="auto, openvino, onnxruntime; on GPUs a list of heuristic,own,cudnn,cublaslt."),
    option("--threads", type=Integer(min=1), group=TUNING, metavar="N", help="Pin the number of threads."),
    option("--timing-cache", type=click.Path(path_type=Path), group=TUNING, metavar="FILE",
           help="Keep measured times here, so that the next build need not repeat the measurements."),
    option("--budget", type=Number(min=0, min_open=True), group=TUNING, metavar="SECONDS",
           help="Bound tuning on a GPU, and the search of precision auto."),
    option("--strict", is_flag=True, gpu=True, group=TUNING, help="Refuse a network that would need steps on the CPU."),
    option("--streams", default="auto", show_default=True, gpu=True, group=TUNING, metavar="N",
           help="Streams for independent steps (auto: several where that is faster)."),
    option("--devices", type=Integer(1, DEVICES_LIMIT), default=1, show_default=True, group=TUNING, metavar="N",
           help="GPUs that run the engine together, each with a part of the weights."),
    option("--split", default="auto", show_default=True, group=TUNING, metavar="WHAT", shell_complete=words(*SPLITS),
           help="What to split over several GPUs: weights, batch, or the one predicted to be faster (auto)."),
    option("--memory-limit", type=SIZE, gpu=True, group=TUNING, metavar="BYTES",
           help="Refuse an engine that needs more memory on a GPU, such as 512M or 4G."),
    option("--row-invariant", is_flag=True, gpu=True, group=TUNING, help="Give a row the same bits for any batch size."),
    option("--workspace", type=SIZE, gpu=True, group=TUNING, metavar="BYTES",
           help="Bound the scratch memory of kernels, such as 512M or 4G."),
    option("--no-cubins", is_flag=True, gpu=True, group=TUNING, help="Store sources of kernels, but no compiled code."),
    option("--nearest-tactics/--no-nearest-tactics", default=True, gpu=True, group=TUNING,
           help="Later plans may take the tactics of the plan for the nearest size, not only the cost model's."),
]  # fmt: skip
PRECISION_OPTIONS = [
    option("--precision", default="fp32", show_default=True, group=PRECISION, metavar="P",
           shell_complete=words(*PRECISIONS, "auto"),
           help="fp32, tf32, bf16, fp16, int8, fp8, w8, w4, w4a8 (packed weights), int8+fp16 (the faster), or auto (in a bound)."),
    option("--pin", multiple=True, group=PRECISION, metavar="NODES=P",
           help="Another precision for some nodes: --pin 'head*=fp32'. A full name counts first, then the last pattern."),
    option("--strict-precision", is_flag=True, group=PRECISION, help="Fail if a node does not run in the requested precision."),
]  # fmt: skip
CALIBRATION_OPTIONS = [
    option("--calib", group=CALIBRATION, metavar="DATA", data=True, help="Calibration data: .npz, .npy, or a folder of pictures."),
    option("--calibrator", default="mse", show_default=True, group=CALIBRATION, metavar="C", shell_complete=words(*CALIBRATORS),
           help="mse, entropy, percentile or minmax."),
    option("--calib-cache", type=FILE, group=CALIBRATION, metavar="FILE", help="Keep the ranges here (JSON)."),
    option("--images", group=CALIBRATION, metavar="SPEC", help="How pictures are prepared: JSON, or a file with it."),
]  # fmt: skip
AUTOMATIC_OPTIONS = [
    option("--metric", default="top1", show_default=True, group=AUTO, metavar="M",
           help="top1, mse, cosine or PKG.MODULE:F."),
    option("--max-drop", type=Number(min=0), group=AUTO, metavar="X",
           help="The largest loss, in the metric's unit.  [default: 0.5 points for top1]"),
    option("--labels", type=FILE, group=AUTO, metavar="FILE.npy", help="Labels, if --calib does not hold them."),
    option("--candidates", group=AUTO, metavar="P,P",
           help="Precisions that auto may choose besides fp32.  [default: all but tf32 and w4a8]"),
]  # fmt: skip


CHECK_LACKS = frozenset(
    {"--threads", "--timing-cache", "--budget", "--no-cubins", "--nearest-tactics", "--strict-precision"}
)
"""Build options that have no meaning for ``check``: they concern timing, or what the engine file holds."""


def build_options(*, without: Collection[str] = (), automatic: bool = True) -> Callable[[F], F]:
    """Decorator: the options of a command that builds, except ``without``. ``automatic``: also those of precision auto.

    The command gets them as keyword arguments for :func:`make_options`."""
    decorators: list[Callable[[Any], Any]] = [
        *NETWORK_OPTIONS,
        *TARGET_OPTIONS,
        *PRECISION_OPTIONS,
        *CALIBRATION_OPTIONS,
    ]
    decorators += [*(AUTOMATIC_OPTIONS if automatic else ()), config_option]

    def decorate(command: F) -> F:
        for one in reversed(decorators):
            command = one(command)
        parameters: list[click.Parameter] = command.__click_params__  # type: ignore[attr-defined]
        parameters[:] = [p for p in parameters if not set(without) & set(p.opts)]
        return command

    return decorate


def load_options(command: F) -> F:
    """Decorator: the options for loading an engine. The command gets them as the arguments of :func:`optdnn.load`."""
    for decorate in (
        option("--signed-by", group="Loading", metavar="PEM|sigstore:WHO,ISSUER",
               help="Refuse the engine, before anything else, unless ENGINE.sig is its signature by this public key, by a "
                    "certificate of this root, or by this identity.  [default: $OPTDNN_SIGNED_BY, which always applies]"),
        option("--simulate", is_flag=True, gpu=True, group="Loading", help="Run the engine in NumPy, on any machine."),
        option("--trust-cubins", is_flag=True, gpu=True, group="Loading",
               help="Run the compiled code in the file unchecked: you trust its author."),
        option("--devices", type=Integer(min=1), group="Loading", metavar="N",
               help="Refuse an engine for another number of GPUs."),
        option("--recompile", is_flag=True, gpu=True, group="Loading",
               help="Compile kernels again, from this version's templates."),
    ):  # fmt: skip
        command = decorate(command)
    return command


def make_options(
    ctx: click.Context,
    shape: Sequence[str],
    pin: Sequence[str] = (),
    value: Sequence[str] = (),
    preprocess: Sequence[str] = (),
    postprocess: Sequence[str] = (),
    **options: Any,
) -> BuildOptions:
    """Build options from a command's arguments. Raises UsageError."""
    calib = options.get("calib")
    if calib is not None and not Path(calib).exists():  # fp32 reads it only after the build
        raise UsageError(f"there is no calibration data {calib}")
    for name in ("images", "calib_cache"):
        if calib is None and options.get(name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{flag} is of no use without calibration data", hint=f"give --calib DATA, or leave {flag} out"
            )
    _tell_of_threads(options.get("threads"))
    return BuildOptions(
        shapes=parse_shapes(shape),
        values=parse_values(value),
        preprocess=parse_specs("preprocess", preprocess),
        postprocess=parse_specs("postprocess", postprocess),
        precision_map=parse_pins(pin),
        debug=bool(ctx.obj and ctx.obj.get("debug")),
        **options,
    )


def _tell_of_threads(threads: int | None) -> None:
    from optdnn.runtime.measuring.machine import usable_cores

    if threads is not None and threads > usable_cores():
        warn(f"--threads {threads}: this machine has {usable_cores()} usable cores")


def parse_specs(option: str, texts: Sequence[str]) -> dict[str, Any]:
    """``("x=SPEC",)`` of ``--preprocess`` or ``--postprocess`` as a mapping. Raises UsageError."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, spec = text.partition("=")
        if not name or not equals or not spec:
            port = "an input" if option == "preprocess" else "an output"
            raise UsageError(
                f"--{option} {text!r} is not NAME=SPEC",
                hint=f"NAME is {port} of the model: optdnn inspect MODEL lists them",
            )
        if name in found:
            raise UsageError(f"--{option} {name} is given twice")
        found[name] = spec
    return found


def parse_values(texts: Sequence[str]) -> dict[str, Any]:
    """``("axes=0,2", "k=5")`` of ``--value`` as a mapping from names to a number or a list of numbers."""
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, given = text.partition("=")
        try:
            numbers = [float(n) if set(n) & set(".einf") else int(n) for n in given.split(",") if n]
        except ValueError:
            numbers, equals = [], ""
        if not name or not equals or name in values:
            raise UsageError(
                f"--value {text!r} is not NAME=1,2,3", hint="each input has one value: numbers with commas"
            )
        values[name] = numbers if "," in given or not numbers else numbers[0]
    return values


def parse_pins(texts: Sequence[str]) -> dict[str, str]:
    """``("head*=fp32",)`` as a mapping from patterns of node names to precisions."""
    pins: dict[str, str] = {}
    for text in texts:
        nodes, _, precision = text.rpartition("=")
        if not nodes:
            raise UsageError(f"--pin {text!r} is not NODES=PRECISION", hint="for instance --pin 'head*=fp32'")
        pins.pop(nodes, None)  # given again, it takes the place of the later one
        pins[nodes] = precision
    return pins
