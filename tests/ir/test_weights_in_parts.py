"""Weights that launches read in parts of fp16: an engine holds 2 bits more for each, and gives back the exact weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.net import Net
from support.sweep import sweep

from optdnn.config import BuildOptions
from optdnn.errors import EngineError
from optdnn.importers.onnx import import_model
from optdnn.ir.embedded_graph import KEY, held, hold
from optdnn.ir.graph import Graph
from optdnn.ir.weights_in_parts import WeightInParts, corrected, correction, weights_of
from optdnn.kernels.conv.parts_kernel import divided, kernel_order
from optdnn.lowering.cuda import lower_cuda
from optdnn.models import zoo
from optdnn.ops.conv import ConvAttrs
from optdnn.optimize import optimize
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.file.format import read, write
from optdnn.runtime.program import Program
from optdnn.types import Array

OPTIONS = BuildOptions(target="simulate", precision="fp32")
BLOCK = 32
SHAPE = 144, 136, 3, 3
"""Weights that the planner multiplies in parts."""


def lowered(graph: Graph) -> Program:
    return lower_cuda(graph, OPTIONS, of_arch("sm_90a"), {})


def optimized(graph: Graph) -> Graph:
    optimize(graph, OPTIONS, "simulate")
    return graph


def conv(weights: Array, group: int = 1) -> Graph:
    n = Net()
    x = n.op("Relu", n.input(1, weights.shape[1] * group, 14 * group, 14 * group))
    attrs = ConvAttrs((1, 1), (weights.shape[2] // 2,) * 4, (1, 1), group=group)
    return optimized(n.done(n.op("Relu", n.op("Conv", x, n.const(weights), attrs=attrs))))


def normal(*shape: int) -> Array:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def constants(graph: Graph) -> list[bytes]:
    return [op.attrs.value.tobytes() for op in graph.of_kind("Constant")]


def in_parts(program: Program) -> list[Any]:
    return [row[2] for row in program.meta[KEY]["ops"] if row[1] == "Constant" and isinstance(row[2], dict)]


# ---------------------------------------------------------------- corrections


def in_parts_of_fp16(weights: Array) -> WeightInParts:
    with np.errstate(invalid="ignore"):
        parts, factors = divided(weights, BLOCK)
    first, rest = parts.reshape(2, *weights.shape)
    return WeightInParts(first, rest, factors, None, kernel_order(BLOCK), weights.shape[1])


def test_a_correction_has_two_bits_per_weight() -> None:
    exact = normal(256, 1024)
    weight = in_parts_of_fp16(exact)
    assert 0.2 < np.mean(weight.sums(slice(None)) != exact) < 0.3, "a quarter needs a unit in the last place"
    made = correction(exact, weight)
    assert made.nbytes < 1.001 * exact.size / 4
    assert np.array_equal(corrected(weight, made), exact)


def pruned(weights: Array) -> Array:
    return weights * (np.abs(weights) > 0.7)  # half of the zeros are negative


def of_all_sizes(weights: Array) -> Array:
    return weights * np.ldexp(
        np.float32(1), np.random.default_rng(1).integers(-140, 100, weights.shape).astype(np.int32)
    )


def not_finite(weights: Array) -> Array:
    weights[0, :3] = np.nan, np.inf, -np.inf
    weights.view(np.uint32)[1, 0] = 0xFFC01234
    return weights


@pytest.mark.parametrize("change", [pruned, of_all_sizes, not_finite])
@pytest.mark.parametrize("rows", [9, 12])
@pytest.mark.parametrize("at_a_time", [1 << 20, 1 << 8])
def test_corrected_weights_are_exact(
    change: Callable[[Array], Array], rows: int, at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optdnn.ir.weights_in_parts.BLOCK", at_a_time)
    exact = change(normal(rows, 64))
    weight = in_parts_of_fp16(exact)
    made = correction(exact, weight)
    assert corrected(weight, made).tobytes() == exact.tobytes()
    if change is pruned:
        assert made.nbytes < 1.05 * exact.size / 4, "zeros keep their sign"


def test_corrections_of_other_weights_are_refused() -> None:
    exact = of_all_sizes(normal(9, 64))
    weight = in_parts_of_fp16(exact)
    made = correction(exact, weight)
    for wrong in (made[:-4], made[:-1], made[:100], np.append(made, made[:4]), made.astype(np.int16), made[None]):
        with pytest.raises(ValueError, match=r"a correction of 576 weights has \d+ bytes"):
            corrected(weight, wrong)


# ---------------------------------------------------------------- engines


def uneven(*shape: int) -> Array:
    """Weights of input channels of very different sizes: the build gives them scales."""
    weights = normal(*shape or SHAPE)
    weights[:, ::3] *= np.float32(2**-13)
    return weights


CASES: dict[str, Callable[[], Graph]] = {
    "conv": lambda: conv(normal(*SHAPE)),
    "padded channels": lambda: conv(normal(264, 250, 3, 3)),
    "scales": lambda: conv(uneven()),
    "scales of groups": lambda: conv(uneven(288, 96, 3, 3), 3),
    "pruned": lambda: conv(pruned(normal(*SHAPE))),
    "resnet": lambda: optimized(import_model(zoo.build("resnet18", batch=1, width=0.5))),
    "bert": lambda: optimized(import_model(zoo.build("bert_base", batch=1, width=0.25, depth=0.17))),
}


@pytest.mark.parametrize("name", sweep(CASES, *(name for name in CASES if name != "resnet")))
def test_an_engine_gives_back_its_exact_weights(name: str, tmp_path: Path) -> None:
    graph = CASES[name]()
    program = lowered(graph)
    own, size = len(program.blobs), sum(b.nbytes for b in program.blobs)
    write(hold(graph, program), tmp_path / "a.engine")
    assert in_parts(program)
    assert sum(b.nbytes for b in program.blobs[own:]) < 0.08 * size, "no second copy of a weight"
    if name in ("resnet", "bert"):
        assert (tmp_path / "a.engine").stat().st_size < 1.15 * sum(map(len, constants(graph)))
    again = read(tmp_path / "a.engine")
    assert constants(held(again)) == constants(graph)
    write(hold(held(again), lowered(held(again))), tmp_path / "b.engine")
    assert (tmp_path / "a.engine").read_bytes() == (tmp_path / "b.engine").read_bytes()


@pytest.mark.parametrize("name", ["scales", "scales of groups"])
def test_scales_are_tested(name: str) -> None:
    steps = lowered(CASES[name]()).steps
    assert any(s.params["op"]["attrs"].get("scaled") for s in steps if "op" in s.params)


def test_weights_of_which_the_parts_say_little_are_stored() -> None:
    """Most weights of a row are tiny beside its largest ones: a correction would store them all."""
    weights = normal(144, 136, 5, 5) * np.float32(2**-30)
    weights[:, :, 0, 0] = 1
    graph = conv(weights)
    program = hold(graph, lowered(graph))
    assert any(step.params["op"]["kind"] == "WeightsInParts" for step in program.steps)
    assert not in_parts(program)
    assert constants(held(program)) == constants(graph)


def test_engines_with_exact_weights_beside_the_parts_are_read() -> None:
    """Engines had a second copy of these weights."""
    graph = conv(normal(*SHAPE))
    program = hold(graph, lowered(graph))
    rows = {row[0]: row for row in program.meta[KEY]["ops"]}
    for op in graph.of_kind("Constant"):
        if isinstance(rows[op.id][2], dict):
            program.blobs.append(op.attrs.value)
            rows[op.id][2] = [len(program.blobs) - 1, 0, None]
    assert not in_parts(program)
    assert constants(held(program)) == constants(graph)


def another_step(place: dict[str, Any]) -> None:
    place["step"] = 10_000


def another_operand(place: dict[str, Any]) -> None:
    place["operand"] = 1


def transposed(place: dict[str, Any]) -> None:
    place["transposed"] = True


def no_correction(place: dict[str, Any]) -> None:
    del place["correction"]


def another_blob(place: dict[str, Any]) -> None:
    place["correction"] = 0


def another_digest(place: dict[str, Any]) -> None:
    place["sha256"] = "0" * 64


@pytest.mark.parametrize(
    "damage", [another_step, another_operand, transposed, no_correction, another_blob, another_digest]
)
def test_damaged_places_are_refused(damage: Callable[[dict[str, Any]], None]) -> None:
    graph = conv(normal(*SHAPE))
    program = hold(graph, lowered(graph))
    damage(in_parts(program)[0])
    with pytest.raises(EngineError, match="the engine's graph is not one of this version") as error:
        held(program)
    assert error.value.hint == "build the engine again from its model"


def test_a_correction_that_gives_other_weights_is_refused() -> None:
    graph = conv(normal(*SHAPE))
    program = hold(graph, lowered(graph))
    number = in_parts(program)[0]["correction"]
    changed = program.blobs[number].copy()
    changed[0] ^= 1  # from equal to one unit more, or back
    program.blobs[number] = changed
    with pytest.raises(EngineError, match="its correction, do not give the weight"):
        held(program)


def malformed(change: Callable[[dict[str, Any], list[Any]], None]) -> Program:
    graph = CASES["scales of groups"]() if change is uneven_bands else conv(normal(*SHAPE))
    program = hold(graph, lowered(graph))
    for step in program.steps:
        if step.params["op"]["kind"] == "WeightsInParts":
            change(step.params["op"]["attrs"], step.params["reads"])
    return program


def no_order(attrs: dict[str, Any], reads: list[Any]) -> None:
    attrs["order"] = []


def many_channels(attrs: dict[str, Any], reads: list[Any]) -> None:
    attrs["counts"] = [1 << 40]


def repeated_elements(attrs: dict[str, Any], reads: list[Any]) -> None:
    (at,) = attrs["at"]
    operand, offset, shape, strides = reads[at]
    reads[at] = [operand, offset, [1 << 40, *shape[1:]], [0, *strides[1:]]]


def computed(attrs: dict[str, Any], reads: list[Any]) -> None:
    attrs["at"] = [0]


def no_elements(attrs: dict[str, Any], reads: list[Any]) -> None:
    (at,) = attrs["at"]
    operand, offset, shape, strides = reads[at]
    reads[at] = [operand, offset, [*shape[:-1], 0], strides]


def huge_order(attrs: dict[str, Any], reads: list[Any]) -> None:
    attrs["order"] = [1 << 100]


def sums_of_all_pairs(attrs: dict[str, Any], reads: list[Any]) -> None:
    """Two views whose sum has the square of their size."""
    (at,) = attrs["at"]
    attrs["counts"] = [1 << 17]
    for number, shape, strides in (
        (at, [1, 1, 1 << 17], [0, 0, 1]),
        (len(reads) - 2, [1, 1 << 17, 1], [0, 1, 0]),
        (len(reads) - 1, [1, 1], [0, 0]),
    ):
        reads[number] = [reads[number][0], 0, shape, strides]


def uneven_bands(attrs: dict[str, Any], reads: list[Any]) -> None:
    operand, offset, (bands, *shape), strides = reads[-1]
    assert bands == 3
    reads[-1] = [operand, offset, [5, *shape], [0, *strides[1:]]]


@pytest.mark.parametrize("change", [
    no_order, many_channels, repeated_elements, computed, no_elements, huge_order, sums_of_all_pairs, uneven_bands,
])  # fmt: skip
def test_malformed_launches_are_refused(change: Callable[[dict[str, Any], list[Any]], None]) -> None:
    """An engine may be hostile."""
    with pytest.raises(EngineError, match="not one of this version"):
        held(malformed(change))


def test_other_launches_have_no_weights_in_parts() -> None:
    program = lowered(conv(normal(*SHAPE)))
    found = [len(list(weights_of(step, program, program.blobs))) for step in program.steps]
    kinds = [step.params["op"]["kind"] == "WeightsInParts" for step in program.steps]
    assert found == [int(k) for k in kinds]
