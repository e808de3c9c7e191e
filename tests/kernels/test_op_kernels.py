"""The kernels of depthwise convolution, rows, attention and RNNs compile, do not spill, and read the parameter blocks that
their plans write. Needs NVRTC, no GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.attention_cases import bshd
from support.layout import check_syntax
from support.spills import check_launch, check_spills
from support.sweep import every

from optdnn.kernels.attention import hopper_kernel as attention
from optdnn.kernels.attention.problem import Problem
from optdnn.kernels.conv import depthwise_kernel as depthwise
from optdnn.kernels.conv import depthwise_tma_kernel as depthwise_tma
from optdnn.kernels.conv.problem import Source
from optdnn.kernels.launch import Launch
from optdnn.kernels.norm import group_norm_kernel as group_norm
from optdnn.kernels.norm import rows_kernel as rows
from optdnn.kernels.quantized.quantized_store import no_conversion
from optdnn.kernels.recurrent import kernel as rnn
from optdnn.runtime.cuda import gpu_facts
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.gpu_facts import of_arch

DEVICE = of_arch("sm_90a")


pytestmark = pytest.mark.nvrtc


def merged(batch: int, positions: int, features: int, **options: Any) -> Problem:
    q, k, v = (bshd(positions, 12, features, parts=3, part=i) for i in range(3))
    out = bshd(positions, 12, features)
    return Problem(batch, 12, positions, positions, features, features**-0.5, q, k, v, out, **options)


SQUEEZED = depthwise.Problem(
    2, Source(14, 14, 80, (5, 5), (2, 2), (2, 2, 2, 2)), (("bias",), ("silu",)), "bfloat16", True
)
PROBLEMS: dict[str, tuple[Any, Any]] = {
    "depthwise 3x3": (depthwise, depthwise.Problem(128, Source(56, 56, 144, (3, 3), (1, 1), (1, 1, 1, 1)))),
    "depthwise 5x5, squeeze": (depthwise, SQUEEZED),
    "depthwise by TMA": (depthwise_tma, depthwise.Problem(128, Source(56, 56, 144, (3, 3), (1, 1), (1, 1, 1, 1)))),
    "depthwise by TMA, squeeze": (depthwise_tma, SQUEEZED),
    "layer norm": (rows, rows.Problem("layer_norm", 4096, 768, add=True, sum=True)),
    "rms norm": (rows, rows.Problem("rms_norm", 64, 4096, "bfloat16", bias=False)),
    "softmax of odd rows": (rows, rows.Problem("softmax", 2364, 197)),
    "group norm": (group_norm, group_norm.Problem(2, 4096, 320, 32, (("silu",),))),
    "BERT": (attention, merged(32, 128, 64, mask=(128, 0, 0))),
    "ViT": (attention, merged(32, 197, 64, dtype="bfloat16")),
    "causal": (attention, merged(2, 2048, 128, causal=True, lengths=True)),
    "five subtiles": (attention, merged(2, 100, 80)),
    "LSTM": (rnn, rnn.Problem("lstm", 128, 32, 512, 512, 2)),
    "GRU": (rnn, rnn.Problem("gru", 20, 3, 40, 96, 2, "bfloat16", True, True)),
}


@pytest.mark.parametrize("name", every(2, PROBLEMS))
def test_the_first_candidate_compiles_without_spills(name: str) -> None:
    module, problem = PROBLEMS[name]
    config = module.candidates(problem, DEVICE)[0]
    description = module.launch(problem, config, DEVICE)
    check_spills(description.recipe, description.function, description.block)


S3, S5 = Source(28, 28, 96, (3, 3), (1, 1), (1, 1, 1, 1)), Source(14, 14, 80, (5, 5), (2, 2), (2, 2, 2, 2))
NO_HOPPER: dict[str, tuple[Any, Any]] = {
    **{name: PROBLEMS[name] for name in ("depthwise 3x3", "depthwise 5x5, squeeze", "layer norm", "rms norm")},
    "depthwise, residual, sums of tiles": (
        depthwise,
        depthwise.Problem(2, S3, (("bias",), ("add",), ("relu",)), squeeze=True),
    ),
    "depthwise of bytes": (
        depthwise,
        depthwise.Problem(2, S3, (("add",), ("relu",)), "int8", False, "int8", "int8", True, 3),
    ),
    "depthwise of bytes, means": (depthwise, depthwise.Problem(2, S5, (), "uint8", True, "uint8")),
    "depthwise of bytes to floats": (depthwise, depthwise.Problem(2, S5, (), "int8", False, "bfloat16")),
    "softmax of odd rows": PROBLEMS["softmax of odd rows"],
    "log-softmax": (rows, rows.Problem("log_softmax", 5, 1000, "bfloat16")),
    "layer norm to bytes": (rows, rows.Problem("layer_norm", 64, 768, narrow="uint8")),
    "groups": (group_norm, group_norm.Problem(2, 256, 320, 32, (("silu",),))),
    "instances": (group_norm, group_norm.Problem(2, 100, 24, 24, (), "bfloat16")),
}


@pytest.mark.parametrize(
    ("name", "arch"),
    every(
        2,
        [(name, "sm_80") for name in NO_HOPPER]
        + [(name, ("sm_86", "sm_89")[k % 2]) for k, name in enumerate(NO_HOPPER) if k % 3 == 0],
    ),
)
def test_kernels_without_hopper_features_compile_before_it_without_spills(name: str, arch: str) -> None:
    module, problem = NO_HOPPER[name]
    gpu = gpu_facts.of_arch(arch)
    config = module.candidates(problem, gpu)[0]
    description = module.launch(problem, config, gpu)
    check_launch(description, gpu)
    assert description.cluster == 1
    assert not description.maps


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89"])
def test_kernels_after_a_squeeze_compile_before_hopper(arch: str) -> None:
    for problem in (SQUEEZED, NO_HOPPER["depthwise of bytes, means"][1]):
        nvrtc.compile_recipe(depthwise.squeeze_recipe(problem, arch))


def test_fp8_begins_with_sm_89() -> None:
    """NVRTC is a second guard after the refusal: it has no such conversion for earlier architectures."""
    problem = rows.Problem("layer_norm", 64, 768, narrow="float8_e4m3fn", wide=False)
    config = rows.candidates(problem, DEVICE)[0]
    for arch in ("sm_80", "sm_86"):
        assert no_conversion("float8_e4m3fn", arch) is not None
        with pytest.raises(nvrtc.KernelError, match="sm_89"):
            nvrtc.compile_recipe(rows.recipe(problem, config, arch))
    assert no_conversion("float8_e4m3fn", "sm_89") is None
    nvrtc.compile_recipe(rows.recipe(problem, config, "sm_89"))


def compile_with(recipe: nvrtc.Recipe, text: str) -> None:
    wrapped = {**recipe.generated, "check.cu": f'#include "{recipe.name}"\n{text}\n'}
    check_syntax(replace(recipe, name="check.cu", generated=wrapped))


def layout_checks(struct: str, description: Launch, fields: dict[str, str]) -> str:
    """static_asserts: the size of the block, and the offsets of the fields of operands."""
    places = {p.operand: p.at for p in description.pointers} | {m.operand: m.at for m in description.maps}
    lines = [f"static_assert(sizeof({struct}) == {len(description.parameters)});"]
    lines += [
        f"static_assert(__INTADDR__(&(({struct}*)0)->{field}) == {places[name]});" for field, name in fields.items()
    ]
    return "\n".join(lines)


def test_parameter_blocks_have_the_kernels_layout() -> None:
    config: Any = depthwise.candidates(SQUEEZED, DEVICE)[0]
    recipe = depthwise.recipe(SQUEEZED, config)
    fields = {"input": "input", "output": "output", "weights": "weights", "channel": "bias"}
    squeeze = {1: {"sums": "sums"}, 2: {"means": "means"}}[depthwise.squeeze_mode(SQUEEZED, config)]
    compile_with(recipe, layout_checks("Params", depthwise.launch(SQUEEZED, config, DEVICE), fields | squeeze))
    finish = depthwise.squeeze_recipe(SQUEEZED)
    compile_with(
        finish, layout_checks("FinishParams", depthwise.launch_squeeze(SQUEEZED, 7, DEVICE), {"means": "means"})
    )
    config = depthwise_tma.candidates(SQUEEZED, DEVICE)[0]
    squeeze = {1: {"sums": "sums"}, 2: {"means": "means"}}[depthwise_tma.squeeze_mode(SQUEEZED, config)]
    description = depthwise_tma.launch(SQUEEZED, config, DEVICE)
    compile_with(depthwise_tma.recipe(SQUEEZED, config), layout_checks("Params", description, fields | squeeze))

    problem: Any = rows.Problem("layer_norm", 5, 768, add=True, sum=True)
    config = rows.candidates(problem, DEVICE)[0]
    fields = {name: name for name in ("input", "addend", "scale", "bias", "output", "sum")}
    compile_with(rows.recipe(problem, config), layout_checks("Params", rows.launch(problem, config, DEVICE), fields))

    problem = group_norm.Problem(2, 100, 320, 32)
    config = group_norm.candidates(problem, DEVICE)[0]
    fields = {name: name for name in ("input", "output", "scale", "bias")}
    checks = layout_checks("Params", group_norm.launch(problem, config, DEVICE), fields)
    compile_with(group_norm.recipe(problem, config), checks)

    problem = merged(2, 128, 64, mask=(128, 0, 0), lengths=True)
    config = attention.candidates(problem, DEVICE)[0]
    fields = {"queries": "q", "keys": "k", "values": "v", "output": "out", "mask": "mask", "lengths": "lengths"}
    compile_with(
        attention.recipe(problem, config), layout_checks("Params", attention.launch(problem, config, DEVICE), fields)
    )

    problem = rnn.Problem("lstm", 7, 3, 64, 64, 2, initial=True)
    config = rnn.Config(8)
    description = rnn.launch(problem, config, DEVICE)
    fields = {name: name for name in description.operands}
    compile_with(rnn.recipe(problem, config), layout_checks("Params", description, fields))
    reset = rnn.launch_reset(problem, config, DEVICE)
    compile_with(rnn.recipe(problem, config), layout_checks("ResetParams", reset, {"progress": "progress"}))


def test_a_wrong_layout_is_noticed() -> None:
    problem = rows.Problem("softmax", 5, 64)
    config = rows.candidates(problem, DEVICE)[0]
    with pytest.raises(nvrtc.KernelError, match="static assertion failed"):
        compile_with(rows.recipe(problem, config), "static_assert(sizeof(Params) == 1);")
