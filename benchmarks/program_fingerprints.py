"""Fingerprints of the programs that builds for GPUs make, which a refactoring must not change. Needs neither a GPU nor NVRTC.

    python benchmarks/program_fingerprints.py --out before.json          # every case: about three minutes of one core
    python benchmarks/program_fingerprints.py --compare before.json      # again, after a change
    python benchmarks/program_fingerprints.py --compare before.json --only resnet50 --only int8

A case is one network of the zoo in one precision for one architecture. Its fingerprint has the inputs and outputs, the buffers,
the constants, the lanes, and for each step the kernel (template, generated source, compiler options), grid, parameters, meaning and
operands. The record of the build (``Program.meta``) is not part of it. ``--compare`` names each case that differs, the first step
that differs, and the difference; then the exit code is 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import onnx

from optdnn.compiler import build_verbose
from optdnn.config import BuildOptions
from optdnn.models import zoo
from optdnn.runtime.program import Kernel, Program, Step

NETWORKS = (
    *("resnet18", "resnet50", "mobilenet_v2", "efficientnet_b0", "densenet121"),
    *("squeezenet1_1", "yolox_s", "vit_b_16", "bert_base", "lstm"),
)
PRECISIONS = ("fp16", "fp32", "int8")
Fingerprint = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One build. ``batch`` is a number, or a range (of a network of images) as ``shapes`` takes it. ``depth`` scales the numbers of
    blocks, for tests."""

    network: str
    precision: str
    arch: str = "sm_90a"
    batch: str = "1"
    depth: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.network}:{self.batch} {self.precision} {self.arch}"


CASES = (
    *(Case(network, precision) for network in NETWORKS for precision in PRECISIONS),
    Case("resnet18", "fp16", batch="32"),
    Case("resnet18", "fp16", batch="1..4..8"),
    Case("resnet50", "fp16", "sm_80"),
    Case("bert_base", "int8", "sm_80"),
    Case("mobilenet_v2", "fp16", "sm_86"),
    Case("vit_b_16", "fp16", "sm_89"),
)


@lru_cache(maxsize=1)
def _model(network: str, batch: int | str, depth: float) -> onnx.ModelProto:
    """The model of a case, built once for all precisions: this takes as long as compiling it."""
    return zoo.build(network, batch=batch, **({} if depth == 1 else {"depth": depth}))


def build(case: Case) -> Program:
    """The program of a case, by the cost model alone and without compiled kernels."""
    fixed = case.batch.isdigit()
    model = _model(case.network, int(case.batch) if fixed else "N", case.depth)
    options = BuildOptions(
        target=f"cuda:{case.arch}",
        precision=case.precision,
        shapes={} if fixed else {"x": f"{case.batch}x3x224x224"},
        tactics="heuristic",
        no_cubins=True,
        calib=zoo.example_inputs(model, seed=5) if case.precision == "int8" else None,
        calibrator="minmax",
    )
    return build_verbose(model, options).engine.program


def fingerprint(program: Program) -> Fingerprint:
    """The fingerprint of a program, in the form of the file: digests, and short values as they are."""
    blobs = [f"{b.dtype}{list(b.shape)} {_digest(b.tobytes())}" for b in program.blobs]
    kernels = [_kernel(k) for k in program.kernels]
    buffers = [
        asdict(b) | {"dtype": str(b.dtype), "blob": None if b.blob is None else blobs[b.blob]} for b in program.buffers
    ]
    return {
        "borders": [[str(spec), i] for spec, i in (*program.inputs, *program.outputs)],
        "arena_bytes": program.arena_bytes,
        "requires": list(program.requires),
        "retained": list(program.retained),
        "lanes": _of_plain([asdict(slot) for slot in program.lanes]),
        "buffers": _of_plain(buffers),
        "steps": [_step(step, kernels) for step in program.steps],
        "plans": [] if program.dynamic is None else [fingerprint(p) for p in program.dynamic.plans],
    }


def _kernel(kernel: Kernel) -> Fingerprint:
    return {
        "template": f"{kernel.template} {kernel.function}",
        "source": _of_plain([kernel.source, dict(kernel.generated), kernel.arch, list(kernel.options)]),
    }


def _step(step: Step, kernels: list[Fingerprint]) -> Fingerprint:
    params = dict(step.params)
    launch = dict(params.pop("launch", None) or {})
    found: Fingerprint = {"executor": step.executor, "op": params.pop("op", {"kind": ""})}
    found["op"] = {"kind": found["op"]["kind"], "attributes": _of_plain(found["op"])}
    if launch:
        found |= kernels[launch.pop("kernel")]
        found |= {key: launch.pop(key) for key in ("grid", "block", "shared", "cluster")}
        found |= {"parameters": _of_plain(launch.pop("parameters")), "launch": _of_plain(launch)}
    operands = {"inputs": list(step.inputs), "outputs": list(step.outputs), "src": list(step.src)}
    return found | {"tactic": params.pop("tactic", None), "rest": _of_plain(params), "operands": operands}


def _of_plain(value: Any) -> str:
    return _digest(json.dumps(value, sort_keys=True).encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def differences(before: Fingerprint, after: Fingerprint, where: str = "") -> Iterator[str]:
    """The differences, one line each: in the first differing step, and in each other part."""
    a, b = before["steps"], after["steps"]
    if len(a) != len(b):
        yield f"{where}{len(a)} steps before, {len(b)} now"
    k = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if k is not None:
        for key in sorted({*a[k], *b[k]}):
            if a[k].get(key) != b[k].get(key):
                yield f"{where}step {k} ({b[k]['op']['kind']}): {key} was {a[k].get(key)}, is {b[k].get(key)}"
    for key in sorted({*before, *after} - {"steps", "plans"}):
        if before.get(key) != after.get(key):
            yield f"{where}{key}: was {before.get(key)}, is {after.get(key)}"
    if len(before["plans"]) != len(after["plans"]):
        yield f"{where}{len(before['plans'])} plans before, {len(after['plans'])} now"
    for n, (x, y) in enumerate(zip(before["plans"], after["plans"], strict=False), 1):
        yield from differences(x, y, f"plan {n}: ")


def compare(before: Mapping[str, Fingerprint], name: str, after: Fingerprint) -> list[str]:
    """A line for each difference of a case, also if the earlier file does not have the case."""
    return list(differences(before[name], after)) if name in before else ["not in the file to compare with"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the fingerprints as JSON")
    parser.add_argument("--compare", type=Path, help="fingerprints of an earlier run")
    parser.add_argument("--only", action="append", default=[], help="take the cases whose names contain each of these")
    options = parser.parse_args(arguments)
    cases = [case for case in CASES if all(text in case.name for text in options.only)]
    if not cases:
        parser.error(f"no case has {' and '.join(options.only)} in its name")
    before = None if options.compare is None else json.loads(options.compare.read_text())
    found: dict[str, Fingerprint] = {}
    differing: list[str] = []
    for case in cases:
        start = time.perf_counter()
        # through JSON, so that stored and new fingerprints have the same types
        found[case.name] = json.loads(json.dumps(fingerprint(build(case))))
        new = [] if before is None else compare(before, case.name, found[case.name])
        differing += [case.name] if new else []
        said = f"{len(found[case.name]['steps'])} steps, {time.perf_counter() - start:.1f} s"
        print(f"{case.name}: {said}{', DIFFERS' if new else ''}", flush=True)
        for line in new:
            print(f"  {line}", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    if before is not None:
        print(f"{len(cases)} cases, {len(differing)} differ: {', '.join(differing) or 'none'}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
