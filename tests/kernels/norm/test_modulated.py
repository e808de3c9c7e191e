"""rows_modulated: norms of rows with a factor and a shift of each image's features, in one launch (DiT)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.net import Net
from support.on_gpu import checked_launches
from support.simulated import check_simulated, kinds, lowered
from support.sweep import turns

from optdnn.ir.graph import Graph
from optdnn.kernels.norm import rows_kernel as rows
from optdnn.ops.index import SplitAttrs
from optdnn.ops.norm import LpNormAttrs
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.gpu_facts import of_arch

GPU = of_arch("sm_90a")


def adaptive(
    kind: str = "LayerNormalization", *, width: int = 48, batch: int = 2, plus: float | None = 1.0, shift: bool = True, used: bool = False,
    each: bool = False, added: bool = False, images: int = 0, order: bool = False, after: str = "", residual: bool = False,
) -> Graph:  # fmt: skip
    """Rows of images. Their norm is multiplied by ``1 + s`` and shifted; both are parts of a product of each image's condition.

    ``each``: factors differ between rows. ``images``: images of the condition. ``order``: the factor is the first operand. ``after``: a
    pointwise operator at the end. ``residual``: other rows are added at the end.
    """
    n = Net()
    x = n.matmul(n.input(batch, 6, 32), width)
    x = n.op("Add", n.op("Softmax", x), n.op("Softmax", n.op("Neg", x))) if added else x
    condition = n.matmul(n.input(images or batch, 6 if each else 1, 16, name="c"), 3 * width)
    _, scale, moved = n.op("Split", condition, n.ints(width, width, width), attrs=SplitAttrs(2), outputs=3)
    if kind == "LpNormalization":
        y = n.op("Mul", n.op(kind, x, attrs=LpNormAttrs(-1, 2, 1e-12)), n.positive(width))
    else:
        y = n.op(kind, x, n.positive(width), *([n.random(width)] if kind == "LayerNormalization" else []))
    factor = scale if plus is None else n.op("Add", scale, plus)
    z = n.op("Mul", *((factor, y) if order else (y, factor)))
    z = n.op("Add", z, moved) if shift else n.op("Relu", z)
    z = n.op(after, z) if after else z
    z = n.op("Add", z, n.op("Softmax", n.op("Neg", x))) if residual else z
    return n.done(n.matmul(z, 16), *([n.op("Exp", y)] if used else []))


NETS = {
    "layer norm": adaptive(),
    "RMS norm": adaptive("RMSNormalization", width=104, order=True),
    "a factor": adaptive(plus=None, batch=3),
    "one condition": adaptive(images=1, plus=2.0),
    "wide": adaptive(width=1152),
    "L2 norm": adaptive("LpNormalization"),
    "an activation": adaptive(shift=False),
    "an activation and an addition": adaptive("RMSNormalization", after="Swish", residual=True),
    "L2 norm, activation and addition": adaptive("LpNormalization", after="Swish", residual=True, batch=3),
}


@pytest.mark.parametrize(("name", "precision"), turns(NETS, "fp16", "bf16"))
def test_one_launch_normalizes_and_modulates(name: str, precision: str) -> None:
    program = check_simulated(NETS[name], precision, tolerance=6e-2 if precision == "bf16" else 1e-2)
    assert "rows_modulated" in {t["tactic"] for t in program.meta["tactics"] if t["kind"] == "Pointwise"}
    assert not {"LayerNormalization", "RMSNormalization", "LpNormalization"} & set(kinds(program))


@pytest.mark.parametrize(
    ("graph", "because"),
    [
        (lambda: adaptive(used=True), "it is not a factor and shift of a norm without other readers"),
        (lambda: adaptive(after="Round"), "the kernel cannot compute the stages after the factor and shift"),
        (lambda: adaptive(batch=1, images=2), "it is not a factor and shift of a norm without other readers"),
        (lambda: adaptive(each=True), "it is not a factor and shift of a norm without other readers"),
        (lambda: adaptive(width=44), "its factor and shift are not one row per image, at multiples of 16 bytes"),
        (lambda: adaptive(added=True), "the normalization belongs to the launch of Add"),
        (lambda: adaptive(width=40000), "do not fit the registers of a block"),
    ],
)
def test_other_operators_after_norms_are_refused(graph: Callable[[], Graph], because: str) -> None:
    found = [r for t in lowered(graph()).meta["tactics"] if t["kind"] == "Pointwise" for r in t.get("refused", ())]
    assert [r for r in found if r["tactic"] == "rows_modulated" and because in r["reason"]], found


MODULATED = rows.Problem("layer_norm", 512, 384, modulated=rows.Modulated(256, 2304, 2304, 1.0))


def test_the_kernel_refuses() -> None:
    config = rows.candidates(MODULATED, GPU)[0]
    assert rows.refuse(MODULATED, config) is None
    other = rows.Problem("softmax", 512, 384, modulated=MODULATED.modulated)
    assert rows.refuse(other, config) == "factors after the norm allow no addend before it and no quantization"
    odd = rows.Problem("layer_norm", 512, 384, modulated=rows.Modulated(256, 2308, None, 0.0))
    assert rows.refuse(odd, config) == "rows do not begin at multiples of 8 elements"


@pytest.mark.nvrtc
def test_the_kernel_compiles_without_spills() -> None:
    block = replace(MODULATED, operation="l2_norm", bias=False, add=True, last=True, epilogue=(("silu",), ("add",)))
    for problem in (MODULATED, block):
        for config in rows.candidates(problem, GPU):
            (kernel,) = nvrtc.resources(rows.recipe(problem, config)).values()
            assert kernel.spill_bytes == 0, str(config)


@pytest.mark.hopper
@pytest.mark.parametrize("name", NETS)
def test_every_launch_does_what_its_step_means(name: str) -> None:
    checked_launches(NETS[name], "fp16")
