"""Megakernels compile: products and attention in many forms; those of real models do not spill if registers suffice."""

from __future__ import annotations

import pytest

from optdnn.kernels.megakernel.kernel import AttentionKind, Kinds, ProductKind, recipe, slots
from optdnn.runtime.cuda.compile import nvrtc, render
from optdnn.runtime.cuda.gpu_facts import named
from optdnn.runtime.cuda.kernel_text.check import check_text

H200 = named("h200")
PLAIN, ADDED = render.epilogue((("bias",),)), render.epilogue((("bias",), ("add",)))
GATED = render.epilogue((("bias",), ("silu",), ("mul",))) + "\n" + render.epilogue((("bias",),), "epilogue_beside")


def layer(hidden: int, inner: int, heads: int, groups: int, size: int, rows: int = 1, dtype: str = "float16") -> Kinds:
    """Norm and joint product, attention, product, gated unit, product."""
    products = (
        ProductKind(rows, (heads + 2 * groups) * size, hidden, True, False, False, PLAIN),
        ProductKind(rows, hidden, heads * size, False, False, True, ADDED),
        ProductKind(rows, inner, hidden, True, True, False, GATED),
        ProductKind(rows, hidden, inner, False, False, True, ADDED),
    )
    attention = AttentionKind(groups, heads // groups, size, size) if rows == 1 else None
    return Kinds(products, attention, dtype)


LAYERS = {
    "Llama 3.2 1B": layer(2048, 8192, 32, 8, 64),
    "Llama 3 8B": layer(4096, 14336, 32, 8, 128),
    "Qwen2 0.5B": layer(896, 4864, 14, 2, 64, dtype="bfloat16"),
    "four rows": layer(2048, 8192, 32, 8, 64, rows=4),
    "depths of no whole slot": layer(328, 1000, 4, 4, 48),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_text_is_one_that_an_engine_may_hold(name: str) -> None:
    check_text(recipe(LAYERS[name], 80, H200).generated["generated.cuh"], "megakernel.cu", "")


@pytest.mark.parametrize("name", LAYERS)
def test_the_ring_has_room(name: str) -> None:
    found, shared = slots(LAYERS[name], H200)
    assert found >= 6
    assert shared <= H200.shared_per_block


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", LAYERS)
def test_it_compiles(name: str) -> None:
    """The registers of a launch of 640 threads suffice: a layer of Llama 3.2 1B does not spill."""
    found = nvrtc.resources(recipe(LAYERS[name], 80, H200))["megakernel"]
    assert found.registers <= 96
    assert name != "Llama 3.2 1B" or found.spill_bytes == 0
