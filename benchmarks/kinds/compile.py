"""Compile every kernel that the zoo's engines use, for each architecture and precision: none may fail, the hot ones may not
spill.

    python -m benchmarks compile                                        # the whole zoo (minutes; needs NVRTC, no GPU)
    python -m benchmarks compile --arch sm_80 --precision fp16 --again resnet50:1 mobilenet_v2:128

Networks are NAME:BATCH. Prints one line per network and one per fault; exits 1 if there was a fault. ``--again``: a new process
compiles all kernels once more, in the opposite order, and must get the same bytes; else a rebuilt engine would differ.
``--few`` leaves out kernels that consist of lines of the kernels before them: the other half has all constants and functions.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from pathlib import Path

import onnx

from benchmarks.models import tests_on_path
from benchmarks.rows import Results, Row, command_parser, say
from optdnn.config import BuildOptions
from optdnn.errors import OptdnnError
from optdnn.models import zoo
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.compile.recipes import recipe_of

tests_on_path()

from support.covering import lines  # noqa: E402 (the tests' folders are no packages)

HOT = frozenset(
    {
        "conv_sm90.cu", "conv_patch_sm90.cu", "conv_sm80.cu", "conv_stem.cu", "conv_stem_pool.cu",
        "conv_stem_pool_sm90.cu", "chained_sm90.cu", "conv_fp32.cu", "matmul_fp32.cu", "matmul_mma.cu",
        "depthwise.cu", "depthwise_sm90.cu", "grouped_sm90.cu", "separable_sm90.cu", "expanded_sm90.cu",
        "attention_sm90.cu", "attention_sm80.cu", "attention_channels.cu", "channel_sums.cu",
        "channel_results.cu", "rows.cu", "rows_across.cu", "group_norm.cu", "group_norm_tiles.cu",
        "row_norm_tiles.cu", "rotary.cu", "rotary_norm.cu", "means.cu", "rnn_sm90.cu", "rnn_grid.cu",
        "rnn_resident.cu", "pool_int8.cu", "gemv.cu", "squeeze_finish.cu", "packed_digits.cu",
        "packed_gemv.cu", "packed_mma.cu", "packed_resident.cu", "packed_sm90.cu", "packed_dense.cu",
    }
)  # fmt: skip
"""Templates whose kernels must keep everything in registers; the general ones may spill where they serve rare shapes."""


def recipes_of(name: str, batch: int, precision: str, arch: str) -> dict[str, Recipe]:
    """The recipes of an engine with heuristic tactics, by key."""
    from optdnn.compiler import build_verbose

    model = _model(name, batch)
    options = BuildOptions(
        target=f"cuda:{arch}", precision=precision, tactics="heuristic", no_cubins=True,
        calib=zoo.example_inputs(model, seed=5) if "8" in precision else None, calibrator="minmax",
    )  # fmt: skip
    program = build_verbose(model, options).engine.program
    return {recipe.key(): recipe for recipe in map(recipe_of, program.kernels)}


@lru_cache(maxsize=1)
def _model(name: str, batch: int) -> onnx.ModelProto:
    """A network, built once for all architectures and precisions: that takes longer than compiling most of its kernels."""
    return zoo.build(name, batch=batch)


def compiled(recipe: Recipe) -> tuple[str, str]:
    """The fault of a kernel, or "", and the digest of its cubin."""
    try:
        cubin, log = nvrtc.compile_recipe(recipe, resources=True)
    except OptdnnError as error:
        return f"does not compile: {str(error)[:400]}", ""
    found = nvrtc.reported(recipe, log)
    worst = max((k.spill_bytes + k.stack_bytes for k in found.values()), default=0)
    return f"spills {worst} bytes" if worst and recipe.name in HOT else "", digest(cubin)


def digest(cubin: bytes) -> str:
    return hashlib.sha256(cubin).hexdigest()


def compiled_again(recipes: Iterable[Recipe]) -> list[str]:
    """The digests of the kernels' cubins, compiled by a new process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return [found for _, found in process.map(compiled, recipes)]


def main(words: Sequence[str]) -> int:
    """Compile every kernel of the zoo: none fails, the hot ones do not spill."""
    parser = command_parser("compile", __doc__)
    parser.add_argument("networks", nargs="*", metavar="NAME:BATCH")
    parser.add_argument("--arch", default="sm_80,sm_90a")
    parser.add_argument("--precision", default="fp16,bf16,tf32,fp32,int8+fp16")
    parser.add_argument("--batches", default="1,128", help="of the zoo's networks, where none are named")
    parser.add_argument("--again", action="store_true", help="all kernels a second time: their bytes must be the same")
    parser.add_argument("--few", action="store_true", help="only kernels with a line that no kernel before has")
    parser.add_argument("--out", type=Path, help="add rows to this file")
    options = parser.parse_intermixed_args(words)
    results = Results(options.out, ["compile", *words]) if options.out is not None else None
    networks = options.networks or [f"{name}:{batch}" for name in zoo.NAMES for batch in options.batches.split(",")]
    seen: dict[str, tuple[Recipe, str]] = {}
    known: set[tuple[str, str, str]] | None = set() if options.few else None
    faults = 0
    for network in networks:
        for arch in options.arch.split(","):
            for precision in options.precision.split(","):
                row = _row(network, arch, precision, seen, known)
                faults += len(row["faults"])
                if results is not None:
                    results.add(row)
    if options.again:
        backwards = [found for found in reversed(seen.values()) if found[1]]
        for (recipe, first), second in zip(backwards, compiled_again(r for r, _ in backwards), strict=True):
            if first != second:
                say(f"  FAULT {recipe.name}: compiled twice, its bytes differ")
                faults += 1
    say(f"{len(seen)} kernels, {faults} faults")
    return 1 if faults else 0


def _row(
    network: str,
    arch: str,
    precision: str,
    seen: dict[str, tuple[Recipe, str]],
    known: set[tuple[str, str, str]] | None,
) -> Row:
    """Compile the kernels of a network that are not in ``seen``, and add them there, with the digests of their cubins. ``known``:
    the lines of those before. Kernels without a further line are left out."""
    name, _, batch = network.partition(":")
    start = time.perf_counter()
    row: Row = {"workload": f"zoo/{name}:{batch or 1}@{precision}", "what": "compile", "setup": arch}
    try:
        recipes = recipes_of(name, int(batch or 1), precision, arch)
    except OptdnnError as error:
        say(f"{network} {arch} {precision}: {error}")
        return {**row, "faults": [str(error)[:300]]}
    fresh = {k: r for k, r in recipes.items() if k not in seen}
    if known is not None:
        fresh = {k: r for k, r in fresh.items() if _adds(lines(r), known)}
    found = {key: (recipe, *compiled(recipe)) for key, recipe in fresh.items()}
    seen.update((key, (recipe, bytes_)) for key, (recipe, _, bytes_) in found.items())
    faults = [f"{recipe.name}: {text}" for recipe, text, _ in found.values() if text]
    counts = f"{len(recipes):3d} kernels, {len(fresh):3d} new"
    say(f"{network:20s} {arch:7s} {precision:10s} {counts}, {time.perf_counter() - start:.1f} s")
    for fault in faults:
        say(f"  FAULT {fault}")
    return {**row, "kernels": len(recipes), "compiled": len(fresh), "faults": faults}


def _adds(own: set[tuple[str, str, str]], known: set[tuple[str, str, str]]) -> bool:
    """Whether a kernel has a line that is not known; all its lines are known then."""
    before = len(known)
    known |= own
    return len(known) > before
