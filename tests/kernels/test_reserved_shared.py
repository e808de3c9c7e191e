"""Kernels with a planned layout of shared memory do not compile if their launch would reserve less than they use."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from support.net import Net
from support.simulated import lowered

from optdnn.errors import OptdnnError
from optdnn.ir.graph import Value
from optdnn.ops.attention import AttentionAttrs
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.compile.recipes import recipe_of


def product(n: Net) -> Value:
    return n.conv(n.op("Relu", n.input(8, 256, 28, 28)), 512, kernel=1, pads=0)


def depthwise(n: Net) -> Value:
    """A 3x3 convolution, which loads patches, and a depthwise one."""
    return n.conv(n.op("Relu", n.conv(n.input(64, 64, 28, 28), 64)), 64, group=64)


def attention(n: Net) -> Value:
    q, k, v = (n.op("Relu", n.input(2, 4, 256, 64, name=name)) for name in "qkv")
    return n.op("Attention", q, k, v, attrs=AttentionAttrs())


def recipes() -> dict[str, Recipe]:
    """A recipe of each template that asserts its size."""
    found = {}
    for make in (product, depthwise, attention):
        n = Net()
        for kernel in lowered(n.done(make(n)), "fp16").kernels:
            if "SHARED_BYTES" in kernel.generated.get("generated.cuh", ""):
                found[kernel.template] = recipe_of(kernel)
    return found


def test_these_templates_assert_their_size() -> None:
    assert set(recipes()) == {"conv_sm90.cu", "conv_patch_sm90.cu", "depthwise_sm90.cu", "attention_sm90.cu"}


@pytest.mark.nvrtc
@pytest.mark.parametrize("template", ["conv_sm90.cu", "conv_patch_sm90.cu", "depthwise_sm90.cu", "attention_sm90.cu"])
def test_too_little_shared_memory_is_an_error_of_the_compiler(template: str) -> None:
    recipe = recipes()[template]
    text = recipe.generated["generated.cuh"]
    assert nvrtc.compile_recipe(recipe)[0]
    less = re.sub(r"(?<=SHARED_BYTES )\d+", lambda m: str(int(m[0]) - 1), text)
    with pytest.raises(OptdnnError, match="the launch reserves what the block uses"):
        nvrtc.compile_recipe(replace(recipe, generated={**recipe.generated, "generated.cuh": less}))
