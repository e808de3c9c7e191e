"""Programs with other kernels, as hostile engine files have them, and the refusal that each must get."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import optdnn
from optdnn.errors import EngineError
from optdnn.runtime.cuda.compile.nvrtc import KernelError, Recipe
from optdnn.runtime.file import format as engine_format
from optdnn.runtime.program import Program
from support.net import Net
from support.simulated import lowered


@cache
def program() -> Program:
    """A program of one pointwise kernel."""
    n = Net()
    graph = n.done(n.op("Tanh", n.op("Add", n.input(4, 8), n.input(8, name="b"))))
    return lowered(graph, "fp32", target="cuda:sm_90a")


@cache
def convolution() -> Program:
    """A program of a kernel with tensor core instructions, from a template."""
    n = Net()
    graph = n.done(n.op("Relu", n.conv(n.input(1, 64, 14, 14), 64)))
    return lowered(graph, "fp16", target="cuda:sm_90a")


def changed(made: Program, of: str = "general.cu", **changes: Any) -> Program:
    """The program with its first kernel of a template changed."""
    k = next(i for i, kernel in enumerate(made.kernels) if kernel.template == of)
    kernels = list(made.kernels)
    kernels[k] = replace(kernels[k], **changes)
    return replace(made, kernels=tuple(kernels))


def text_of(made: Program, template: str = "general.cu") -> str:
    return next(k.generated["generated.cuh"] for k in made.kernels if k.template == template)


def resourced(made: Program, text: str, template: str = "general.cu") -> Program:
    """The program with another source, and its right digest."""
    kernel = next(k for k in made.kernels if k.template == template)
    generated = {"generated.cuh": text}
    try:
        digest = Recipe(kernel.template, kernel.arch, generated, kernel.options).digest()
    except KernelError:
        digest = "0" * 64
    return changed(made, template, generated=generated, source=digest)


def refused(made: Program, folder: Path, why: str) -> None:
    """Writing accepts the program, loading refuses it, with and without recompiling, and the cache gets nothing."""
    engine_format.write(made, folder / "evil.engine")
    for recompile in (False, True):
        with pytest.raises(EngineError, match=why):
            optdnn.load(folder / "evil.engine", recompile=recompile)
    assert not list(folder.rglob("*.cubin"))
