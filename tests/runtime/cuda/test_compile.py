"""Every kernel compiles for its architectures, and the hot ones do not spill. Needs NVRTC, no GPU."""

from __future__ import annotations

import pytest
from support import compiler_cache
from support.conv_cases import ADD, CASES, GENERAL, RELU, same
from support.covering import covering
from support.net import Net
from support.quantized_cases import GENERAL as QUANTIZED
from support.simulated import lowered
from support.spills import check_spills
from support.sweep import every
from support.traps import trapping

from optdnn.config import GPU_PRECISIONS
from optdnn.kernels.conv import configs
from optdnn.kernels.conv import general_kernel as conv_general
from optdnn.kernels.conv import implicit_gemm as conv
from optdnn.kernels.conv import patch_kernel as conv_patch
from optdnn.kernels.conv.patch_kernel import PatchConfig
from optdnn.kernels.conv.problem import Problem, Source
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.gpu_facts import of_arch

pytestmark = pytest.mark.nvrtc


def recipe_of_case(name: str) -> nvrtc.Recipe:
    problem, config = CASES[name]
    family = conv_patch if isinstance(config, PatchConfig) else conv
    # The compiler does not move registers between warps if there is a trap.
    recipe = family.recipe(problem, config)
    return recipe if getattr(config, "wide", False) else trapping(recipe)


@pytest.mark.parametrize("name", every(2, covering({name: recipe_of_case(name) for name in CASES})))
def test_case_compiles_without_spills(name: str) -> None:
    config = CASES[name][1]
    check_spills(recipe_of_case(name), threads=config.threads * config.blocks)


@pytest.mark.parametrize("across", [False, True])
def test_products_of_stacks_compile_without_spills(across: bool) -> None:
    problem = Problem(200, 136, (Source(1, 1, 520),), ADD, stack=(12, 2), across=across)
    for config in (
        conv.Config(2, 1, 1, 128, 4),
        conv.Config(1, 1, 2, 128, 4, alternate=True),
        conv.Config(1, 1, 1, 64, 8, stream=True),
    ):
        assert conv.refuse(problem, config) is None
        check_spills(trapping(conv.recipe(problem, config)))


def test_the_first_candidates_of_resnet50_do_not_spill() -> None:
    batch = 128  # `benchmarks compile` looks at those of batch 1
    problems = [
        Problem(batch, 64, (same(56, 56, 64),), RELU),
        Problem(batch, 256, (Source(56, 56, 64),), ADD),
        Problem(batch, 256, (Source(56, 56, 64), Source(56, 56, 64)), RELU),
        Problem(batch, 128, (same(56, 56, 128, stride=2),), RELU),
        Problem(batch, 1024, (Source(14, 14, 256), Source(28, 28, 512, (1, 1), (2, 2))), RELU),
        Problem(batch, 512, (same(7, 7, 512),), RELU),
    ]
    for problem in problems:
        recipes = [conv.recipe(problem, config) for config in configs.candidates(problem, of_arch("sm_90a"), 1)]
        recipes += [
            conv_patch.recipe(problem, config) for config in conv_patch.candidates(problem, of_arch("sm_90a"))[:1]
        ]
        for recipe in recipes:
            log = compiler_cache.log(recipe)
            assert " 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log, recipe.generated
            assert "wgmma.mma_async instructions are serialized" not in log, recipe.generated


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        *((name, "sm_80") for name in ("3x3", "bf16", "tf32", "5x3 dilated", "mma", "mma uint8, zero points")),
        *(("tf32", "sm_86"), ("mma uint8, zero points", "sm_90a")),
        *(("mma fp8", arch) for arch in ("sm_80", "sm_86", "sm_89", "sm_90a")),
    ],
)
def test_the_general_convolution_compiles(name: str, arch: str) -> None:
    """The first configuration, the middle one, and the last one, which shares K. All GPUs compile the text of sm_80, so one
    configuration is enough for the others."""
    configs = conv_general.CONFIGS
    for config in configs[:: len(configs) // 2] if arch == "sm_80" else configs[-1:]:
        if name not in GENERAL and f"{name}, {config}" not in QUANTIZED:
            continue
        problem = GENERAL[name].problem if name in GENERAL else QUANTIZED[f"{name}, {config}"].problem
        recipe = conv_general.recipe(problem, config, arch)
        if "fp8" in name and "fp8" not in GPU_PRECISIONS[arch]:
            with pytest.raises(nvrtc.KernelError, match="e4m3"):
                nvrtc.compile_recipe(recipe)
            continue
        (kernel,) = nvrtc.resources(recipe).values()
        if "fp8" not in name or arch != "sm_90a":  # Hopper has fp8 only in wgmma: this kernel uses 16-bit products
            assert kernel.spill_bytes == kernel.stack_bytes == 0, config


def test_too_many_accumulators_do_not_fit_and_are_refused() -> None:
    """The compiler is a second guard after the refusal: it cannot allocate registers for 160 accumulators and two blocks."""
    problem, config = Problem(8, 256, (Source(56, 56, 64),), ADD), conv.Config(2, 1, 2, 160, 2, blocks=2)
    assert conv.refuse(problem, config) is not None
    with pytest.raises(nvrtc.KernelError, match="registers"):
        nvrtc.compile_recipe(conv.recipe(problem, config))


def test_products_of_tf32_compile_without_spills() -> None:
    problems = [
        Problem(32, 64, (same(56, 56, 64),), RELU, "tfloat32", "float32"),
        Problem(32, 256, (Source(56, 56, 64),), ADD, "tfloat32", "float32"),
        Problem(1, 512, (same(7, 7, 512),), RELU, "tfloat32", "float32"),
    ]
    for problem in problems:
        plain = [conv.recipe(problem, config) for config in configs.candidates(problem, of_arch("sm_90a"), 2)]
        patches = [conv_patch.recipe(problem, c) for c in conv_patch.candidates(problem, of_arch("sm_90a"))[:2]]
        assert plain
        for recipe in plain + patches:
            check_spills(recipe)


@pytest.mark.parametrize("precision", ["tf32", "fp16", "bf16"])
def test_every_kernel_of_a_network_compiles(precision: str) -> None:
    n = Net()
    x = n.op("Relu", n.bn(n.conv(n.input(1, 3, 32, 32), 16, 7, strides=2, pads=3)))  # a stem of blocks of pixels
    y = n.op("Relu", n.conv(n.max_pool(x, pads=1), 24, 3))
    z = n.op("Add", n.conv(y, 24, 1, pads=0), y)
    graph = n.done(n.gemm(n.op("Flatten", n.op("GlobalAveragePool", z)), 10))
    program = lowered(graph, precision, target="cuda:sm_90a", no_cubins=False)
    assert all(k.cubin is not None for k in program.kernels)
