"""Attention over a cache in one launch: plans, and the kernel on a processor with emulated warps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import emulated
from support.cached_cases import CASES, JOINT, case, check, operands_of
from support.host import needs_compiler
from support.layout import ATTENTION_FIELDS, check_pointers
from support.spills import check_spills
from support.sweep import sweep

from optdnn.kernels.attention import cached_kernel as cached
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.gpu_facts import of_arch

ARCHS = ("sm_80", "sm_86", "sm_90a", "sm_100", "sm_120")
ALONE, SHARED = cached.Config(4, 1), cached.Config(2, 3)


def run(name: str, config: cached.Config, folder: Path) -> None:
    """Compares the kernel with its meaning, twice: counts are zero after each run, and equal inputs give equal bits."""
    c = CASES[name]
    p, o = c.problem, operands_of(c)
    assert cached.refuse(p, config) is None
    made = cached.launch(p, config, of_arch("sm_90a"), o.places)
    text = made.recipe.generated["generated.cuh"].replace(render.mma(p.dtype), "")
    library = emulated.compiled(made.recipe, made.function, folder, rendered="\n".join(
        line for line in text.splitlines() if not line.startswith("#define")), inside=["attention_cached.cuh"])  # fmt: skip
    partial, arrived = cached.workspace(p, config)
    held = {n: emulated.aligned(a) for n, a in o.held.items()}
    held["partial"], held["arrived"] = emulated.aligned(np.full(partial, 0xFF, np.uint8)), np.zeros(arrived, np.uint8)
    results = []
    for _ in range(2):
        held["out"][...] = np.nan
        emulated.run(library, made, {n: held[JOINT.get(n, n)].ctypes.data for n in made.operands})
        assert not held["arrived"].any()
        results.append(held["out"].tobytes())
    assert results[0] == results[1]
    check(c, o, held)


@needs_compiler
@pytest.mark.parametrize(
    "name",
    sweep(
        CASES,
        "lengths of their own",
        "a window and a softcap, bf16",
        "sinks, groups of 12",
        "sinks, no key",
    ),
)
def test_the_kernel_on_a_processor(name: str, tmp_path: Path) -> None:
    run(name, ALONE, tmp_path)


@needs_compiler
@pytest.mark.parametrize(
    "name",
    sweep(
        (
            *(
                "one key",
                "a full cache",
                "lengths of their own",
                "no key",
                "a row elsewhere",
                "heads of 80, a part turns",
            ),
            *("heads of 256", "groups of 12", "sinks", "sinks, no key", "sinks, a window and a softcap, bf16"),
        ),
        *("lengths of their own", "heads of 80, a part turns", "sinks"),
    ),
)
def test_keys_that_blocks_share_on_a_processor(name: str, tmp_path: Path) -> None:
    run(name, SHARED, tmp_path)


def test_refusals() -> None:
    p = case([1]).problem
    assert cached.refuse(p, ALONE) is None
    for because, changed in {
        "it is for 16-bit floats, not float32": case([1], dtype="float32"),
        "heads of 72 features": case([1], features=72, turned=0),
        "17 queries of 1 key heads": case([1], heads=17, key_heads=1),
        "6 features have rotary embeddings": case([1], turned=6),
        "a softcap of -1": case([1], softcap=-1.0),
        "exceed the registers": case([1], heads=16, key_heads=1, features=256),
        "the grid is too large": case([1] * 65536),
    }.items():
        assert because in str(cached.refuse(changed.problem, ALONE))
    assert cached.refuse(p, cached.Config(3, 1)) == "not a tile of this kernel"
    assert cached.refuse(p, cached.Config(8, 16, True)) == "16 blocks do not form a cluster"
    assert "bytes of shared memory exceed" in str(cached.refuse(p, ALONE, shared=4000))


def test_blocks_share_keys_where_heads_are_few() -> None:
    gpu = of_arch("sm_90a")
    alone, many = (case([1] * n, 32, 8, 128, 4096).problem for n in (1, 64))
    first, last = cached.candidates(alone, gpu)[0], cached.candidates(many, gpu)[0]
    assert first.splits >= 8 > last.splits
    assert 3e-6 < cached.estimate(alone, first, gpu) < 9e-6
    assert cached.estimate(many, last, gpu) > many.bytes(1024) / 4.3e12


def test_blocks_are_a_cluster_where_all_clusters_fit() -> None:
    alone, some = (case([1] * n, 32, 8, 128, 4096).problem for n in (1, 4))
    hopper, older = of_arch("sm_90a"), of_arch("sm_80")
    assert str(cached.candidates(alone, hopper)[0]) == "cached8x8c"
    assert not any(c.cluster for c in cached.candidates(alone, older, 12))
    assert {c.splits: c.cluster for c in cached.candidates(some, hopper, 12)} == {
        1: False, 2: True, 4: False, 8: False, 16: False, 32: False,
    }  # fmt: skip
    sent = cached.Config(8, 8, True)
    assert cached.workspace(alone, sent) == (0, 0)
    assert cached.shared_bytes(alone, sent) - cached.shared_bytes(alone, cached.Config(8, 8)) == 8 * 4 * 132 * 4


def test_only_kernels_with_sinks_know_of_them() -> None:
    plain, sunk = (case([1], 12, 1, sinks=x).problem for x in (False, True))
    texts = [cached.recipe(p, ALONE).generated["generated.cuh"] for p in (plain, sunk)]
    assert "SINKS" not in texts[0]
    assert texts[1].replace("#define SINKS 1\n", "") == texts[0]
    assert cached.shared_bytes(sunk, ALONE) - cached.shared_bytes(plain, ALONE) == 12 * 4


@pytest.mark.nvrtc
@pytest.mark.parametrize("config", [cached.Config(8, 8, True), cached.Config(4, 8)], ids=str)
def test_the_parameter_block_has_the_kernels_layout(config: cached.Config) -> None:
    c = case([5, 9], sinks=True)
    made = cached.launch(c.problem, config, of_arch("sm_90a"), operands_of(c).places)
    assert len(made.pointers) == (11 if config.cluster else 13)
    check_pointers(made, ATTENTION_FIELDS)


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_do_not_spill(arch: str) -> None:
    cases = (
        case([1], 16, 1, 128, reach=9, softcap=1.0, sinks=True),
        case([1], 8, 1, 256, dtype="bfloat16"),
        case([1], 32, 8, 128),
        case([1], 16, 1, 128, reach=9, softcap=1.0),
    )
    for c in cases if arch == "sm_90a" else cases[:2] if arch == "sm_80" else cases[:1]:
        for config in (ALONE, cached.Config(8, 8, True)) if arch.startswith("sm_90") else (ALONE,):
            check_spills(cached.recipe(c.problem, config, arch))
