"""Sampling of tokens: the kernel on the processor chooses the tokens of its meaning; refusals; compilation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.host import HostKernels, needs_compiler
from support.sampling_cases import KINDS, feeds, graph
from support.simulated import lowered, simulate
from support.sweep import sweep

from optdnn.kernels.builder import TensorView
from optdnn.kernels.index import sample
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.compile.recipes import recipe_of
from optdnn.runtime.cuda.launches.plan import parse
from optdnn.runtime.engine import Engine
from optdnn.types import FP16, FP32, FP64


@needs_compiler
@pytest.mark.parametrize(
    ("vocabulary", "precision"),
    sweep(
        [(1003, "fp32"), (1000, "fp16"), (992, "bf16"), (3, "fp32"), (1, "fp16"), (8200, "fp32")],
        *((1003, "fp32"), (992, "bf16"), (3, "fp32"), (1, "fp16")),
    ),
)
def test_the_kernel_on_the_processor(vocabulary: int, precision: str, tmp_path: Path) -> None:
    program = lowered(graph(vocabulary, precision), "fp32")
    kernels, (step,) = HostKernels(program, tmp_path), program.steps
    parsed = parse(step, program)
    assert kernels.runs(parsed)
    seen = set()
    for position in range(12):
        given = feeds(vocabulary, precision, position)
        wanted = simulate(program, given)["token"]
        token = np.full((len(KINDS), 1), -7, np.int64)
        kernels.run(parsed, [np.ascontiguousarray(given[s.name]) for s, _ in program.inputs] + [token])
        np.testing.assert_array_equal(token, wanted)
        seen.add(token.tobytes())
    assert len(seen) > 1 or vocabulary == 1


@needs_compiler
def test_rows_without_a_token_on_the_processor(tmp_path: Path) -> None:
    program = lowered(graph(100), "fp32")
    parsed = parse(program.steps[0], program)
    given = feeds(100)
    given["logits"][0, 50] = np.nan
    given["logits"][1, 99] = np.nan
    given["logits"][2] = -np.inf
    given["logits"][3, 3] = np.inf
    token = np.zeros((len(KINDS), 1), np.int64)
    HostKernels(program, tmp_path).run(parsed, [given[s.name] for s, _ in program.inputs] + [token])
    assert (token[:4] == -1).all()
    assert (token[4:] >= 0).all()
    np.testing.assert_array_equal(token, simulate(program, given)["token"])


def view(
    vocabulary: int, dtype: np.dtype = FP16, strides: tuple[int, int] | None = None, offset: int = 0
) -> TensorView:
    return TensorView(0, offset, (4, vocabulary), strides or (vocabulary, 1), dtype)


def test_rows_are_read_in_aligned_vectors() -> None:
    assert [sample.lanes(view(n)) for n in (1000, 1004, 1001)] == [8, 4, 1]
    assert sample.lanes(view(1000, FP32)) == 4
    assert sample.lanes(view(1000, strides=(1002, 1))) == 2
    assert sample.lanes(view(1000, offset=4)) == 4


def test_refusals() -> None:
    assert sample.refuse(view(1 << 18)) is None
    assert "at most 262144 tokens" in (sample.refuse(view((1 << 18) + 1)) or "")
    assert "16-bit and 32-bit logits" in (sample.refuse(view(100, FP64)) or "")
    assert "are not contiguous" in (sample.refuse(view(100, strides=(1, 4))) or "")


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("vocabulary", "precision", "arch"), [(128256, "fp16", "sm_90a"), (32000, "fp32", "sm_80"), (151, "bf16", "sm_90a")]
)
def test_the_kernel_compiles_without_spills(vocabulary: int, precision: str, arch: str) -> None:
    program = lowered(graph(vocabulary, precision), "fp32", f"cuda:{arch}")
    (kernel,) = program.kernels
    found = nvrtc.resources(recipe_of(kernel))["sample"]
    assert found.spill_bytes == 0


SIZES = [
    (3, "fp32"),
    (1003, "fp16"),
    (8193, "bf16"),
    (32000, "fp32"),
    (128256, "fp16"),
    (262144, "bf16"),
    (262144, "fp32"),
]


@pytest.mark.hopper
@pytest.mark.parametrize(("vocabulary", "precision"), SIZES)
def test_tokens_on_a_gpu_are_those_of_the_meaning(vocabulary: int, precision: str) -> None:
    """Exponentials may round otherwise: one token in a hundred may be its neighbor."""
    program = lowered(graph(vocabulary, precision), "fp32", target="cuda:sm_90a")
    context: Any = Engine(program).context()
    same = []
    for position in range(20):
        given = feeds(vocabulary, precision, position)
        token, again = (context.run(given)["token"] for _ in range(2))
        np.testing.assert_array_equal(token, again)
        same.append(token == simulate(program, given)["token"])
    assert np.mean(same) > 0.98
    assert all(s[0, 0] and s[5, 0] for s in same), "greedy rows compute nothing"
