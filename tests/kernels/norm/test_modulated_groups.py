"""group_norm_modulated: group norms of images with a factor and a shift for each image and channel (AdaIN, diffusion's ``scale_shift``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.host import needs_compiler
from support.host_tiles import run_launches
from support.net import Net
from support.on_gpu import checked_launches
from support.simulated import check_not_taken, check_simulated, kinds

from optdnn.ir.graph import Graph
from optdnn.kernels.norm import group_norm_grid as gridded
from optdnn.kernels.norm import group_norm_kernel as clustered
from optdnn.kernels.norm import group_norm_tiles as tiled
from optdnn.ops.index import SplitAttrs
from optdnn.ops.norm import GroupNormAttrs
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.reference.run import run_kernel
from optdnn.types import Array

GPU = of_arch("sm_90a")
NO_MODULATION = "it is not a factor and shift of a group normalization without other readers"


def adaptive(
    kind: str = "GroupNormalization", *, channels: int = 32, batch: int = 2, images: int = 0, plus: float | None = 1.0,
    shift: bool = True, after: str = "Swish", used: bool = False, each: bool = False, added: bool = False,
    size: tuple[int, ...] = (6, 5), conditions: int = 16,
) -> Graph:  # fmt: skip
    """Images between convolutions. Their norm is multiplied by ``1 + s`` and shifted; both are parts of a product of each image's condition.

    ``each``: factors differ between pixels. ``images``: images of the condition. ``added``: the norm is of a sum with vectors of channels.
    """
    n = Net()
    x = n.conv(n.input(batch, 8, *size), channels, 3)
    x = n.op("Add", x, n.input(batch, channels, *(1 for _ in size), name="t")) if added else x
    if kind == "GroupNormalization":
        y = n.op(kind, x, n.positive(channels), n.random(channels), attrs=GroupNormAttrs(4, 1e-3))
    else:
        y = n.op(kind, x, n.positive(channels), n.random(channels))
    condition = n.matmul(n.input(images or batch, conditions, name="c"), 2 * channels)
    condition = n.op("Reshape", condition, n.ints(images or batch, 2 * channels, *(1 for _ in size)))
    factor, moved = n.op("Split", condition, n.ints(channels, channels), attrs=SplitAttrs(1), outputs=2)
    if each:
        factor = n.op("Softmax", n.input(batch, channels, *size, name="f"))
    factor = factor if plus is None else n.op("Add", factor, plus)
    z = n.op("Mul", y, factor)
    z = n.op("Add", z, moved) if shift else z
    if after == "Snake":
        per_channel = (channels, *(1 for _ in size))
        z = n.op("Snake", z, n.positive(*per_channel), n.positive(*per_channel))
    elif after == "residual":
        z = n.op("Add", z, n.op("Softmax", n.input(batch, channels, *size, name="r")))
    elif after:
        z = n.op(after, z)
    return n.done(n.conv(z, 8, 3), *([n.op("Exp", y)] if used else []))


NETS = {
    "group norm": adaptive(),
    "instance norm": adaptive("InstanceNormalization", after="LeakyRelu"),
    "a factor": adaptive(plus=None, shift=False, after="Relu", batch=3),
    "one condition": adaptive(images=1, plus=2.0, after=""),
    "snake": adaptive("InstanceNormalization", after="Snake"),
    "sequence": adaptive("InstanceNormalization", size=(40,), after="Snake"),
    "large": adaptive(size=(160, 220), batch=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("name", NETS)
def test_the_norm_is_modulated_in_its_launches(name: str, precision: str) -> None:
    program = check_simulated(NETS[name], precision, tolerance={"fp16": 1e-2, "bf16": 6e-2, "fp32": 1e-4}[precision])
    if name in ("snake", "sequence") and precision == "fp32":
        assert "Pointwise" in kinds(program)
        return
    assert "group_norm_modulated" in {t["tactic"] for t in program.meta["tactics"] if t["kind"] == "Pointwise"}
    found = kinds(program)
    assert not {"GroupNormalization", "InstanceNormalization"} & set(found)
    assert ("GroupApply" in found) != ("ActivatedNorm" in found)


@pytest.mark.parametrize(
    ("graph", "because"),
    [
        (lambda: adaptive(used=True), NO_MODULATION),
        (lambda: adaptive(after="residual"), "the kernels cannot compute the stages after the factor and shift"),
        (
            lambda: adaptive(each=True, plus=None),
            "its factor and shift are not one aligned vector of channels for each image",
        ),
        (lambda: adaptive(batch=1, images=2), "the normalized images are repeated"),
        (lambda: adaptive(channels=12), "do not consist of aligned vectors of channels"),
        (lambda: adaptive(added=True), "the normalization belongs to the launch of Add"),
    ],
)
def test_other_operators_after_norms_are_refused(graph: Callable[[], Graph], because: str) -> None:
    check_not_taken(graph(), "group_norm_modulated", because)


SNAKE = clustered.Problem(2, 400, 128, 128, (("snake",),), modulated=clustered.Modulated(512, 512, 1.0))
LARGE = clustered.Problem(1, 512 * 512, 128, 32, (("silu",),), modulated=clustered.Modulated(0, None, 0.0))


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    "made",
    [
        clustered.recipe(SNAKE, clustered.candidates(SNAKE, GPU)[0]),
        tiled.recipe(LARGE, tiled.candidates(LARGE, GPU)[0]),
        gridded.recipe(LARGE, gridded.candidates(LARGE, GPU)[0]),
        gridded.recipe(replace(LARGE, epilogue=(("snake",),)), gridded.candidates(LARGE, GPU)[0]),
    ],
)
def test_kernels_compile_without_spills(made: Any) -> None:
    assert all(kernel.spill_bytes == 0 for kernel in nvrtc.resources(made).values())


def values(shape: tuple[int, ...], seed: int, dtype: str = "float16") -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@needs_compiler
@pytest.mark.parametrize("kernel", ["cluster", "tiles"])
@pytest.mark.parametrize(("shift", "own"), [(True, True), (False, False)])
def test_kernels_on_the_processor(kernel: str, shift: bool, own: bool, tmp_path: Path) -> None:
    """``own``: each image has a factor of its own."""
    n, channels, pixels, groups = 2, 16, 35, 4
    by = clustered.Modulated(24 if own else 0, 40 if shift else None, 0.5)
    problem = clustered.Problem(n, pixels, channels, groups, (("snake",),), "float16", 1e-3, modulated=by)
    x, scale, bias = (
        values((n, channels, pixels), 0),
        values((channels,), 1, "float32"),
        values((channels,), 2, "float32"),
    )
    factor, moved, numbers = values((n, 24), 3), values((n, 40), 4), np.abs(values((2, channels), 5, "float32"))
    image, out = np.ascontiguousarray(np.moveaxis(x, 1, -1)), np.full((n, pixels, channels), np.nan, np.float16)
    memory = {"input": image, "output": out, "scale": scale, "bias": bias, "factor": factor, "shift": moved}
    memory |= {"numbers": numbers, "moments": np.full((n, groups, 3, 2), np.nan, np.float32)}
    if kernel == "cluster":
        launches = [clustered.launch(problem, clustered.Config(channels, 1, 64, 8), GPU)]
    else:
        launches = list(tiled.launches(problem, tiled.Config(channels, 3, 64, 8), GPU))
    run_launches(launches, memory, tmp_path)
    normal = run_kernel(
        "GroupNormalization", [x.astype(np.float64), scale, bias], {"num_groups": groups, "epsilon": 1e-3}
    )[0]
    wanted = normal * (factor.astype(np.float64)[: n if own else 1, :channels, None] + 0.5)
    wanted = wanted + (moved.astype(np.float64)[:, :channels, None] if shift else 0.0)
    rate, gain = numbers.astype(np.float64)[:, :, None]
    wanted = wanted + gain * np.sin(rate * wanted) ** 2
    np.testing.assert_allclose(np.moveaxis(out, -1, 1), wanted, rtol=4e-3, atol=4e-3)


@pytest.mark.hopper
@pytest.mark.parametrize("name", NETS)
def test_every_launch_does_what_its_step_means(name: str) -> None:
    checked_launches(NETS[name], "fp16")
