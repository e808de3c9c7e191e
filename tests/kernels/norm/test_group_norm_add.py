"""A group normalization and the addition of another image, in one launch: where it is used, and refusals with their reasons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.net import Net, built
from support.on_gpu import launch_errors
from support.simulated import check_not_taken, check_simulated, lowered, refusals
from support.sweep import sweep

from optdnn.ir.graph import Graph, Value
from optdnn.kernels.norm import group_norm_add as tactic
from optdnn.kernels.norm import group_norm_grid as gridded
from optdnn.kernels.norm import group_norm_kernel as clustered
from optdnn.kernels.norm import group_norm_tiles as tiled
from optdnn.lowering.choose import TacticChoice
from optdnn.ops.norm import GroupNormAttrs
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.device import facts_for
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.target_name import TargetName

HOPPER = of_arch("sm_90a")


def norm(n: Net, x: Value, groups: int = 4) -> Value:
    channels = n.dims(x)[1]
    assert isinstance(channels, int)
    return n.op("GroupNormalization", x, n.random(channels), n.random(channels), attrs=GroupNormAttrs(groups))


def block(
    *, images: int = 2, channels: int = 32, size: tuple[int, int] = (9, 7), turned: bool = False, activation: str = "Relu",
    projected: bool = False,
) -> Graph:  # fmt: skip
    """The end of a residual block: the shortcut is added to a normalized convolution."""
    n = Net()
    x = n.op("Relu", n.conv(n.input(images, 8, *size), channels, 1, pads=0))
    y = norm(n, n.conv(x, channels))
    other = norm(n, n.conv(x, channels, 1, pads=0)) if projected else x
    y = n.op("Add", other, y) if turned else n.op("Add", y, other)
    y = n.op(activation, y) if activation else y
    return n.done(n.conv(y, 16), *([] if activation else [n.op("GlobalAveragePool", y)]))


NETS: dict[str, Callable[[], Graph]] = {
    "plain": block,
    "turned": lambda: block(turned=True),
    "one image": lambda: block(images=1, channels=64, size=(14, 14)),
    "no activation": lambda: block(activation=""),
    "swish": lambda: block(activation="Swish"),
    "a projection": lambda: block(projected=True),
    "large": lambda: block(images=1, channels=256, size=(40, 40)),
}


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the cost model choose one launch everywhere."""
    monkeypatch.setattr(tactic, "SEPARATE_S", 1.0)


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("precision", sweep(["fp16", "bf16"], "fp16"))
@pytest.mark.usefixtures("chosen")
def test_one_launch_gives_the_results_of_two(name: str, precision: str) -> None:
    program = check_simulated(NETS[name](), precision)
    made = [s for s in program.steps if str(s.params["tactic"]).startswith("group_norm_add")]
    (step,) = made
    assert any(node.startswith("Add") for node in step.src)
    assert any(node.startswith("GroupNorm") for node in step.src)
    assert not any(node.startswith("Add") for s in program.steps if s is not step for node in s.src), (
        "nothing else adds"
    )


def two_readers(n: Net, x: Value) -> list[Value]:
    y = norm(n, x)
    return [n.op("Tanh", n.op("Add", y, x)), n.op("Sigmoid", y)]


def of_rows(n: Net, x: Value) -> list[Value]:
    return [n.op("Tanh", n.op("Add", n.op("Softmax", x), x))]


def odd(n: Net, x: Value) -> list[Value]:
    x = n.conv(x, 36, 1, pads=0)
    return [n.conv(n.op("Tanh", n.op("Add", norm(n, n.conv(x, 36)), x)), 8)]


def repeated(n: Net, x: Value) -> list[Value]:
    """One normalized image is added to each of two images."""
    one = n.conv(n.input(1, 8, 9, 7, name="one"), 32)
    return [n.conv(n.op("Tanh", n.op("Add", norm(n, one), n.op("Softmax", x))), 8)]


REFUSED: dict[str, tuple[Callable[[Net, Value], list[Value]], str]] = {
    "another reader": (two_readers, "it is not the sum of an image and a group normalization"),
    "another norm": (of_rows, "it is not the sum of an image and a group normalization"),
    "repeated": (repeated, "normalized images are repeated"),
    "odd channels": (odd, "aligned vectors of channels"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("chosen")
def test_refused_with_its_reason(name: str) -> None:
    build, reason = REFUSED[name]
    network = built(lambda n: build(n, n.conv(n.input(2, 8, 9, 7), 32)))
    check_not_taken(network, "group_norm_add", reason)


def test_unmeasured_the_cost_model_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tactic, "SEPARATE_S", -1.0)
    program = lowered(block())
    assert not any(str(s.params["tactic"]).startswith("group_norm_add") for s in program.steps)
    assert any("two launches are predicted" in r for r in refusals(program, "group_norm_add"))


P = clustered.Problem(2, 196, 64, 32, (("add",), ("relu",)))


def test_only_clusters_add_an_image() -> None:
    assert clustered.candidates(P, HOPPER)
    assert not gridded.candidates(P, HOPPER)
    assert not tiled.candidates(P, HOPPER)
    assert "no operands" in str(clustered.refuse(replace(P, epilogue=(("bias",),)), clustered.candidates(P, HOPPER)[0]))


@pytest.mark.nvrtc
def test_kernels_compile_without_spills() -> None:
    for problem in (P, replace(P, dtype="bfloat16", pixels=3136), replace(P, pixels=40000)):
        for config in clustered.candidates(problem, HOPPER)[:2]:
            (kernel,) = nvrtc.resources(clustered.recipe(problem, config)).values()
            assert kernel.spill_bytes <= 16, str(config)


@pytest.mark.hopper
@pytest.mark.parametrize("name", NETS)
@pytest.mark.usefixtures("chosen")
def test_every_configuration_on_a_gpu_agrees_with_its_meaning(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = NETS[name]()
    facts = facts_for(TargetName.parse("cuda:sm_90a"))
    asked: list[clustered.Problem] = []
    offers = tactic.GroupNormAdd.offers
    monkeypatch.setattr(
        tactic.GroupNormAdd, "offers", lambda self, problem, gpu: (asked.append(problem), offers(self, problem, gpu))[1]
    )
    plain = lowered(graph, "fp16", "cuda:sm_90a")
    (decision,) = [t for t in plain.meta["tactics"] if t["tactic"] == tactic.GroupNormAdd.name]
    for config in map(str, clustered.candidates(asked[-1], facts)):
        choices = {decision["signature"]: TacticChoice(tactic.GroupNormAdd.name, config)}
        program = lowered(graph, "fp16", "cuda:sm_90a", choices=choices)
        assert max(launch_errors(program, graph, "ActivatedNorm")) < 2e-3, config
