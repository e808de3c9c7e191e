"""The steps that become jobs of one launch, their order, and the contents of these launches."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from support.decoder import decoder, empty
from support.simulated import simulate
from support.spills import check_spills

import optdnn
from optdnn.kernels.megakernel.jobs import Job, Place, job_of
from optdnn.kernels.megakernel.kernel import AttentionKind, Kinds, ProductKind, refuse_attention, refuse_product
from optdnn.lowering import megakernels
from optdnn.lowering.megakernels import Run, gains, joined_seconds, launch_seconds, planned, trimmed, with_megakernels
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.gpu_facts import named
from optdnn.runtime.cuda.launches.plan import GRID, LaunchPlan, Pointer, parse
from optdnn.runtime.file.validate import validate
from optdnn.runtime.program import Program

H200 = named("h200")
PLAIN = "DEVICE float epilogue(float x, float c, float r) {\n    x = x + c;\n    return x;\n}\n"
PRODUCT = ProductKind(1, 2048, 2048, False, False, False, PLAIN)
ATTENTION = AttentionKind(8, 4, 64, 64)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small networks get megakernels, too."""
    monkeypatch.setattr(megakernels, "gains", lambda run, gpu: True)


def built(
    *,
    heads: int = 16,
    groups: int = 4,
    size: int = 64,
    grouped: dict[str, Any] | None = None,
    sinks: bool = False,
    **options: Any,
) -> Program:
    options = {"target": "cuda:h200", "precision": "fp16", "io_dtype": "fp16", "no_cubins": True, **options}
    return optdnn.build(decoder(heads=heads, groups=groups, size=size, grouped=grouped, sinks=sinks), **options).program


def launch_of(program: Program, k: int) -> LaunchPlan:
    launch = parse(program.steps[k], program).launch
    assert isinstance(launch, LaunchPlan)
    return launch


def parts(program: Program) -> list[int]:
    return [k for k in range(len(program.steps)) if launch_of(program, k).part is not None]


# ---------------------------------------------------------------- a decoder


@pytest.mark.slow
@pytest.mark.usefixtures("always")
def test_the_layers_of_a_decoder_are_one_run_of_neighbors() -> None:
    program = built()
    found = parts(program)
    assert found == list(range(found[0], found[0] + 10))
    layer = ["RowProduct", "CachedAttention", "Conv", "RowProduct", "Conv"]
    assert [program.steps[k].params["op"]["kind"] for k in found] == 2 * layer
    launches = [launch_of(program, k) for k in found]
    assert len({x.kernel for x in launches}) == 1
    assert [x.part.number for x in launches if x.part] == list(range(10))
    assert all(x.waits == GRID and not x.dependent and x.grid == (132, 1, 1) and x.cluster == 1 for x in launches)
    assert program.meta["runs"] == [{"first": found[0], "jobs": 10}]
    assert not program.lanes
    validate(program)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("sinks", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_gives_the_results_of_its_steps_and_keeps_their_nodes(
    sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"grouped": {} if sinks else None, "sinks": sinks}
    run = built(**given)
    monkeypatch.setattr(megakernels, "LEAST_JOBS", 1000)
    apart = built(streams=1, **given)
    model = decoder(heads=16, groups=4, size=64, **given)
    rng = np.random.default_rng(0)
    feeds = {n: rng.standard_normal(a.shape).astype(np.float16) for n, a in empty(model, 0).items()}
    feeds |= {"token": np.full((1, 1), 5), "at": np.array([17])}
    a, b = simulate(run, feeds), simulate(apart, feeds)
    assert all(np.array_equal(a[name], b[name]) for name in b)
    assert sorted(s.src for s in run.steps) == sorted(s.src for s in apart.steps)


@pytest.mark.slow
@pytest.mark.usefixtures("always")
def test_a_program_with_jobs_does_not_change_again() -> None:
    program = built()
    again, moved = with_megakernels(program, H200)
    assert again is program
    assert moved == {k: k for k in range(len(program.steps))}


@pytest.mark.slow
@pytest.mark.usefixtures("always")
def test_rows_come_from_the_jobs_that_compute_them() -> None:
    """The operand x of a job is the packets of the job before it. The first job reads results of earlier launches."""
    program = built()
    found = parts(program)
    first, attention, after = (launch_of(program, k) for k in found[:3])
    # The source of a product's rows is at byte 16 of x, after 16 bytes of the header, 16 of the kind and 40 of constants.
    assert struct.unpack_from("<i", first.parameters, 32 + 56) == (-1,)
    assert struct.unpack_from("<i", after.parameters, 32 + 56) == (1,)
    assert [struct.unpack_from("<i", attention.parameters, 32 + 24 * n + 16)[0] for n in range(3)] == [0, 0, 0]
    down = launch_of(program, found[4])
    assert struct.unpack_from("<2i", down.parameters, 32 + 56)[0] == 3
    assert struct.unpack_from("<i", down.parameters, 32 + 80) == (2,), "its residual"
    assert struct.unpack_from("<2i", down.parameters, 8) == (4, 1), "its number, and one job"


@pytest.mark.slow
@pytest.mark.usefixtures("always")
def test_windows_softcaps_and_interleaved_pairs_stay_with_their_attention() -> None:
    grouped = {"local_window_size": 7, "softcap": 10.0, "rotary_interleaved": 1}
    program = built(grouped=grouped)
    attention = launch_of(program, parts(program)[1])
    text = program.kernels[attention.kernel].generated["generated.cuh"]
    assert "#define SOFTCAP 1" in text
    assert "#define INTERLEAVED 1" in text
    # After the header, the kind, four rows, six constants, the exchange and two strides.
    capacity, reach, *scales = struct.unpack_from("<2i3f", attention.parameters, 32 + 4 * 24 + 6 * 8 + 8 + 16)
    assert (capacity, reach) == (32, 6)
    assert scales == pytest.approx([np.log2(np.e) / 8, 2 * np.log2(np.e) / 80, 10 * np.log2(np.e)])


@pytest.mark.slow
@pytest.mark.usefixtures("always")
def test_sinks_are_operands_of_their_attention() -> None:
    """They follow the scales, and such jobs have 16 bytes more. Other megakernels do not know of them."""
    program, plain = built(grouped={"softcap": 10.0}, sinks=True), built(grouped={"softcap": 10.0})
    attention, before = (launch_of(p, parts(p)[1]) for p in (program, plain))
    text, text_before = (
        p.kernels[x.kernel].generated["generated.cuh"] for p, x in ((program, attention), (plain, before))
    )
    assert "#define SINKS 1\n" in text
    assert "SINKS" not in text_before
    step = program.steps[parts(program)[1]]
    (place,) = (r for r in attention.relocations if isinstance(r, Pointer) and r.at == 32 + 192)
    sinks = program.buffers[(*step.inputs, *step.outputs)[place.operand]]
    assert sinks.shape == (16,)
    assert attention.part is not None
    assert before.part is not None
    assert (attention.part.size, before.part.size) == (16 + 208, 16 + 192)
    assert len(attention.parameters) == 16 + attention.part.size
    assert len(parts(program)) == len(parts(plain)) == 10


@pytest.mark.nvrtc
@pytest.mark.usefixtures("always")
def test_the_kernel_with_sinks_has_the_layout_of_its_jobs() -> None:
    program = built(grouped={}, sinks=True)
    kernel = program.kernels[launch_of(program, parts(program)[1]).kernel]
    lines = [
        "static_assert(__INTADDR__(&((AttentionJob*)0)->sinks) == 192);",
        "static_assert(sizeof(AttentionJob) <= JOB_BYTES);",
    ]
    generated = {**kernel.generated, "check.cu": "\n".join(['#include "megakernel.cu"', *lines, ""])}
    check_spills(nvrtc.Recipe("check.cu", kernel.arch, generated, kernel.options))


@pytest.mark.slow
@pytest.mark.usefixtures("always")
def test_results_of_a_run_share_no_memory() -> None:
    """A fast block may write a result while a slow one still reads for an earlier job."""
    program = built()
    at = [
        (b.offset, b.offset + (b.nbytes or 0))
        for k in parts(program)
        for i in program.steps[k].outputs
        if (b := program.buffers[i]).offset is not None
    ]
    assert len(at) == 10
    ordered = sorted(set(at))
    assert len(ordered) == 10
    assert all(a[1] <= b[0] for a, b in pairwise(ordered))


@pytest.mark.slow
@pytest.mark.usefixtures("always")
def test_a_retained_buffer_is_of_one_run() -> None:
    program = built()
    (exchange,) = program.retained
    other = next(k for k in range(len(program.steps)) if k not in parts(program))
    steps = list(program.steps)
    steps[other] = replace(steps[other], outputs=(*steps[other].outputs, exchange))
    with pytest.raises(optdnn.errors.EngineError, match="not one step's alone"):
        validate(replace(program, steps=tuple(steps)))


@pytest.mark.slow
def test_small_networks_other_gpus_and_invariant_rows_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not parts(built()), "a job waits longer for its rows than these launches take"
    monkeypatch.setattr(megakernels, "gains", lambda run, gpu: True)
    assert not parts(built(target="cuda:a100"))
    assert not parts(built(row_invariant=True))
    assert parts(built())


# ---------------------------------------------------------------- the prediction


def job(kind: ProductKind | AttentionKind) -> Job:
    return Job(kind, "float16", {}, Place(0, 0, 0), {}, {})


def run_of(*kinds: ProductKind | AttentionKind) -> Run:
    return Run(tuple(range(len(kinds))), tuple(map(job, kinds)))


def layer(hidden: int, inner: int, heads: int, groups: int, size: int) -> list[ProductKind | AttentionKind]:
    return [
        replace(PRODUCT, columns=(heads + 2 * groups) * size, depth=hidden), AttentionKind(groups, heads // groups, size, size),
        replace(PRODUCT, columns=hidden, depth=heads * size), replace(PRODUCT, columns=inner, depth=hidden, paired=True),
        replace(PRODUCT, columns=hidden, depth=inner),
    ]  # fmt: skip


MEASURED = {
    "16 layers of width 2,048": (layer(2048, 4096, 32, 8, 64), 27.7, 20.2, True),
    "Llama 3.2 1B": (layer(2048, 8192, 32, 8, 64), 41.0, 37.0, True),
    "Llama 3 8B": (layer(4096, 14336, 32, 8, 128), 117.0, 130.0, False),
}
"""The kinds of a layer, its microseconds on an H200 as launches and in a megakernel, and whether a megakernel is predicted to
pay."""


@pytest.mark.parametrize("name", MEASURED)
def test_the_prediction_is_near_the_measured_times(name: str) -> None:
    kinds, launched, joined, gain = MEASURED[name]
    run = run_of(*kinds * 16)
    assert sum(launch_seconds(j, H200) for j in run.jobs) / 16 == pytest.approx(launched * 1e-6, rel=0.1)
    assert joined_seconds(run.jobs, H200) / 16 == pytest.approx(joined * 1e-6, rel=0.06)
    assert gains(run, H200) == gain


def test_small_products_stay_launches() -> None:
    """A job waits longer for its rows than a launch would take."""
    assert not gains(run_of(*layer(512, 1024, 8, 2, 64) * 16), H200)
    assert not gains(run_of(*[replace(PRODUCT, columns=8192)] * 3), H200), "too few jobs"


def test_a_large_head_stays_a_launch() -> None:
    head = replace(PRODUCT, columns=128256)
    run = run_of(head, *layer(2048, 4096, 32, 8, 64), head)
    assert trimmed(run, H200) == Run((1, 2, 3, 4, 5), run.jobs[1:6])
    inside = run_of(PRODUCT, head, PRODUCT)
    assert trimmed(inside, H200) == inside


# ---------------------------------------------------------------- runs


def test_the_order_of_steps_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megakernels, "LEAST_JOBS", 2)
    a, other = job(PRODUCT), "no job"
    # Step 1 needs nothing of a run and comes first. Step 3 needs job 2 and comes after it. A job that needs step 3 begins a new
    # run.
    deps: list[set[int]] = [set(), set(), {0}, {2}, {2}, {3}, {5}]
    order, runs = planned(deps, [a, other, a, other, a, a, a])
    assert order == [1, 0, 2, 4, 3, 5, 6]
    assert [r.steps for r in runs] == [(0, 2, 4), (5, 6)]


def test_few_jobs_stay_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megakernels, "LEAST_JOBS", 3)
    order, runs = planned([set(), {0}, {0}, {1}], [job(PRODUCT), "no job", job(PRODUCT), "no job"])
    assert order == [0, 1, 2, 3]
    assert not runs


MADE = Place(0, 9, 64, 0, 128)
"""The place of a job's result in the following tests."""


@pytest.mark.parametrize(
    "other",
    [
        replace(job(PRODUCT), dtype="bfloat16"),
        job(replace(ATTENTION, features=128)),
        replace(job(PRODUCT), rows={"x": replace(MADE, nbytes=256)}),
        replace(job(PRODUCT), rows={"x": replace(MADE, at=0)}),
        replace(job(PRODUCT), constants={"weights": replace(MADE, at=4096)}),
    ],
    ids=["another type", "another attention", "a row beyond a result", "a row in front of it", "computed weights"],
)
def test_jobs_that_begin_another_run(other: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megakernels, "LEAST_JOBS", 2)
    found = [job(ATTENTION), replace(job(PRODUCT), out=MADE), other, other]
    assert [r.steps for r in planned([set()] * 4, found)[1]] == [(0, 1), (2, 3)]


@pytest.mark.parametrize(
    "row",
    [MADE, replace(MADE, at=80, nbytes=112), replace(MADE, buffer=8, at=0, nbytes=4096)],
    ids=["all of it", "a part", "another buffer"],
)
def test_rows_that_stay_in_the_run(row: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megakernels, "LEAST_JOBS", 2)
    found = [replace(job(PRODUCT), out=MADE), replace(job(PRODUCT), rows={"x": row})]
    assert [r.steps for r in planned([set(), {0}], found)[1]] == [(0, 1)]


def test_a_kernel_has_six_kinds_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megakernels, "LEAST_JOBS", 2)
    found = [job(replace(PRODUCT, columns=16 * n)) for n in range(1, 9)]
    assert [len(r.steps) for r in planned([set()] * 8, found)[1]] == [6, 2]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("because", "kind", "at"),
    [
        ("it has 2 rows (one is needed)", replace(PRODUCT, rows=2), 0),
        ("a depth that is a multiple of 8", replace(PRODUCT, depth=2044), 0),
        ("weights that are aligned", PRODUCT, 8),
        ("jobs exchange pairs of results, and 1001 is not even", replace(PRODUCT, columns=1001), 0),
        ("bytes of shared memory exceed", replace(PRODUCT, depth=65536), 0),
    ],
)
def test_products_that_are_no_jobs(because: str, kind: ProductKind, at: int) -> None:
    assert because in (refuse_product(kind, at, H200) or "")


@pytest.mark.parametrize(
    ("because", "kind"),
    [
        ("115 heads of keys are more than 114 blocks", replace(ATTENTION, heads=115)),
        ("a slot does not hold 64 keys of 256 features", replace(ATTENTION, features=256)),
        ("groups of 9 queries do not fit the registers", replace(ATTENTION, group=9)),
    ],
)
def test_attention_that_is_no_job(because: str, kind: AttentionKind) -> None:
    assert because in (refuse_attention(kind, H200) or "")


def test_launches_that_can_be_jobs() -> None:
    assert refuse_product(PRODUCT, 0, H200) is None
    assert refuse_attention(ATTENTION, H200) is None
    kinds = Kinds((PRODUCT,), ATTENTION, "float16")
    assert kinds.most_jobs == Kinds((PRODUCT,), None, "float16").most_jobs == 157
    assert replace(kinds, attention=replace(ATTENTION, sinks=True)).most_jobs == 146
    assert (kinds.number(PRODUCT), kinds.number(ATTENTION)) == (0, 6)


@pytest.mark.slow
def test_launches_that_are_no_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megakernels, "LEAST_JOBS", 1000)
    program = built(streams=1)

    def why(kind: str, change: Callable[[LaunchPlan], LaunchPlan] = lambda launch: launch, **text: str) -> str:
        k = next(k for k, s in enumerate(program.steps) if s.params["op"]["kind"] == kind)
        launch, changed = change(launch_of(program, k)), program
        if text:
            kernel = program.kernels[launch.kernel]
            ((old, new),) = text.items()
            generated = {
                n: t.replace(f"#define {old}", f"#define {old} {new}\n//") for n, t in kernel.generated.items()
            }
            kernels = list(program.kernels)
            kernels[launch.kernel] = replace(kernel, generated=generated)
            changed = replace(program, kernels=tuple(kernels))
        found = job_of(program.steps[k], launch, changed)
        return found if isinstance(found, str) else "a job"

    assert why("RowProduct") == why("CachedAttention") == "a job"
    assert why("Gather") == "gather cannot be a job of a megakernel"
    assert why("RowProduct", RESULT_FLOAT="1") == "its results are fp32"

    def beside(launch: LaunchPlan) -> LaunchPlan:
        return replace(launch, relocations=tuple(replace(r, offset=4) if r.at == 32 else r for r in launch.relocations))  # type: ignore[arg-type]

    assert why("RowProduct", beside) == "its rows are not aligned to four elements"
    assert why("CachedAttention", lambda x: replace(x, grid=(*x.grid[:2], 3))) == "it has 3 sequences (one is needed)"
    apart = struct.pack("<q", 999)

    def moved(launch: LaunchPlan) -> LaunchPlan:
        return replace(launch, parameters=launch.parameters[:192] + apart + launch.parameters[200:])

    assert why("CachedAttention", moved) == "the positions of its cache are not contiguous"
