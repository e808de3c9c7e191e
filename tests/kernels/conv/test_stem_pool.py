"""A first convolution and the max pool after it in one launch: where it is used, refusals with their reasons, and results."""

from __future__ import annotations

from typing import Any

import pytest
from kernels.conv.test_stem import normalized, picture
from support.net import Build, Net, built
from support.simulated import check_not_taken, check_simulated, kinds, lowered, refusals

from optdnn.ir.graph import Value
from optdnn.kernels.conv.stem_pool import PooledStem
from optdnn.ops.index import ConcatAttrs


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the cost model choose one launch everywhere."""
    monkeypatch.setattr(PooledStem, "_slower", lambda *given: None)


def stem(n: Net, channels: int = 16, kernel: int = 7, **more: Any) -> Value:
    given = {"pads": kernel // 2, "strides": 2, "bias": True, **more}
    return n.op("Relu", n.conv(n.input(2, 3, 34, 30), channels, kernel, **given))


def followed(n: Net, x: Value) -> list[Value]:
    return [n.conv(x, 8, 3)]


NETS: dict[str, Build] = {
    "ResNet": lambda n: followed(n, n.max_pool(stem(n), 3, pads=1)),
    "no padding, upwards": lambda n: followed(n, n.max_pool(stem(n, 24), 3, ceil_mode=True)),
    "2x2": lambda n: followed(n, n.max_pool(stem(n, kernel=5), 2)),
    "odd channels": lambda n: followed(n, n.max_pool(stem(n, 20), 3, pads=1)),
    "bytes": lambda n: followed(
        n, n.max_pool(n.op("Relu", n.conv(normalized(n, picture(n, (22, 18))), 16, 5, strides=2, pads=2)), 3, pads=1)
    ),
    "an output": lambda n: [n.max_pool(stem(n), 3, pads=1)],
}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.usefixtures("chosen")
def test_one_launch_gives_the_results_of_two(name: str) -> None:
    program = check_simulated(built(NETS[name]))
    assert kinds(program).count("PooledImageConv") == 1
    assert not {"MaxPool", "ImageConv"} & set(kinds(program))
    (step,) = [s for s in program.steps if s.params["op"]["kind"] == "PooledImageConv"]
    assert {node.split("_")[0] for node in step.src} >= {"Conv", "MaxPool"}


@pytest.mark.usefixtures("chosen")
def test_in_bf16() -> None:
    assert "PooledImageConv" in kinds(check_simulated(built(NETS["ResNet"]), "bf16"))


def two_readers(n: Net) -> list[Value]:
    x = stem(n)
    return [*followed(n, n.max_pool(x, 3, pads=1)), n.op("GlobalAveragePool", x)]


def added(n: Net) -> list[Value]:
    x = n.conv(n.input(2, 3, 34, 30), 16, 3, bias=True)
    return followed(n, n.max_pool(n.op("Relu", n.op("Add", x, n.input(2, 16, 34, 30, name="r"))), 3, pads=1))


def joined_rows(n: Net) -> list[Value]:
    """The pool's rows are concatenated with those of another image."""
    x, other = n.max_pool(stem(n, strides=1), 3, pads=1), n.conv(n.input(2, 8, 4, 15, name="z"), 16, 3)
    return followed(n, n.op("Concat", other, x, attrs=ConcatAttrs(2)))


REFUSED: dict[str, tuple[Build, str]] = {
    "no pool": (lambda n: followed(n, stem(n)), "no max pool is the only reader"),
    "another reader": (two_readers, "no max pool is the only reader"),
    "many channels": (
        lambda n: followed(n, n.max_pool(n.op("Relu", n.conv(n.input(2, 8, 20, 20), 16, 3)), 3, pads=1)),
        "images of up to 4 channels",
    ),
    "other windows": (lambda n: followed(n, n.max_pool(stem(n), 3, pads=1, strides=1)), "other windows than"),
    "joined rows": (joined_rows, "the pool's result is not channels-last"),
    "an addition": (added, "its epilogue reads other tensors than constants"),
    "a wide image": (
        lambda n: followed(n, n.max_pool(n.op("Relu", n.conv(n.input(1, 3, 12, 300), 16, 3)), 3, pads=1)),
        "300 columns exceed",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("chosen")
def test_refused_with_its_reason(name: str) -> None:
    build, reason = REFUSED[name]
    check_not_taken(built(build), "conv_stem_pool", reason, "PooledImageConv")


@pytest.mark.parametrize("faster", [False, True])
def test_the_cost_model_decides(faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from optdnn.kernels.conv import stem_pool

    monkeypatch.setattr(stem_pool, "predicted", lambda *given: 1.0 if faster else 0.0)
    program = lowered(built(NETS["ResNet"]))
    assert ("PooledImageConv" in kinds(program)) == faster
    assert faster or any("two launches are predicted" in r for r in refusals(program, "conv_stem_pool"))
