"""The small networks that ``python -m benchmarks sanitize`` runs: between them every kernel template, and the configurations that
differ in how they move data (split over a cluster, patches, stores by TMA or from registers, stationary weights). No GPU is needed
here; ``tests`` has to be on the path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from kernels.attention.test_attention_between_channels import between_channels  # type: ignore[import-not-found]
from kernels.attention.test_attention_one_query import step as one_query  # type: ignore[import-not-found]
from kernels.attention.test_attention_over_a_cache import step  # type: ignore[import-not-found]
from kernels.conv import test_conv_pool, test_conv_shuffle, test_narrow  # type: ignore[import-not-found]
from kernels.conv.test_conv_scaled import preact  # type: ignore[import-not-found]
from kernels.conv.test_conv_stem import NETS as STEMS  # type: ignore[import-not-found]
from kernels.conv.test_depthwise_paired import NETS as FILTERED  # type: ignore[import-not-found]
from kernels.conv.test_depthwise_volumes import SQUEEZED, TRANSPOSED, VOLUMES  # type: ignore[import-not-found]
from kernels.conv.test_fp32_parts import NETS as IN_PARTS  # type: ignore[import-not-found]
from kernels.conv.test_normed_images import NETS as NORMED_IMAGES  # type: ignore[import-not-found]
from kernels.gemm.test_gated import NETS as GATED  # type: ignore[import-not-found]
from kernels.gemm.test_gemv_pair import excited  # type: ignore[import-not-found]
from kernels.gemm.test_left_products import NETS as LEFT  # type: ignore[import-not-found]
from kernels.gemm.test_matmul_mma import NETS as ANY  # type: ignore[import-not-found]
from kernels.gemm.test_matmul_stacks import NETS as STACKS  # type: ignore[import-not-found]
from kernels.gemm.test_matmul_tiles import NETS as TILED  # type: ignore[import-not-found]
from kernels.gemm.test_normed import NETS as NORMED  # type: ignore[import-not-found]
from kernels.gemm.test_normed_residual import NETS as NORMED_RESIDUALS  # type: ignore[import-not-found]
from kernels.gemm.test_paired import NETS as PAIRED  # type: ignore[import-not-found]
from kernels.gemm.test_selected import experts  # type: ignore[import-not-found]
from kernels.gemm.test_turned_heads import NETS as TURNED  # type: ignore[import-not-found]
from kernels.generated_cases import FAMILIES, graph_of  # type: ignore[import-not-found]
from kernels.index import test_top_rows  # type: ignore[import-not-found]
from kernels.norm.test_across import mixer  # type: ignore[import-not-found]
from kernels.norm.test_group_norm_add import block  # type: ignore[import-not-found]
from kernels.norm.test_modulated import adaptive  # type: ignore[import-not-found]
from kernels.norm.test_rows_once import deviations  # type: ignore[import-not-found]
from kernels.norm.test_short_rows import pair  # type: ignore[import-not-found]
from kernels.norm.test_softmax_mean import CASES as MEANS  # type: ignore[import-not-found]
from kernels.pointwise.test_prologue import dense_layer, gated  # type: ignore[import-not-found]
from kernels.quantized.test_dynamic import NETS as DYNAMIC  # type: ignore[import-not-found]
from kernels.quantized.test_dynamic import network as dynamic  # type: ignore[import-not-found]
from kernels.quantized.test_zero_padding import NETS as EDGED  # type: ignore[import-not-found]
from kernels.quantized.test_zero_padding import network as padded_8bit  # type: ignore[import-not-found]
from kernels.reduce.test_image_means import gate  # type: ignore[import-not-found]
from kernels.test_pointwise_rows import CASES as OF_ROWS  # type: ignore[import-not-found]
from kernels.test_staged_pad import CASES as PADDED  # type: ignore[import-not-found]
from lowering.test_joined_launches import boxes  # type: ignore[import-not-found]

from optdnn.importers.onnx import import_model
from support.grouped_nets import grouped
from support.net import Net
from support.packed_cases import CASES, network
from support.quantized_nets import FP8, NARROWED, NETS, STREAMS, QNet
from support.rotary_cases import NORMED as NORMED_HEADS
from support.rotary_cases import ROTARY
from support.sampled_cases import CASES as SAMPLED
from support.sampled_cases import graph_of as sampled
from support.sampling_cases import graph as sampling
from support.sanitizer_graphs import (
    bottlenecks,
    chained_8bit,
    convolutional,
    depthwise,
    expanded,
    far_strides,
    far_strides_8bit,
    few_rows,
    layers,
    perceptron,
    quantized,
    scalar_tiles,
    separable,
    stem_and_pool,
    stems,
    stream_k,
    tiles,
    transposed,
    wide_results,
)
from support.sequence_cases import ATTENTION, GROUP_NORM, RECURRENT, RESIDUAL, group_norm
from support.suppression_cases import detector


def _never(*given: Any) -> None:
    """A ``defer`` of a tactic that accepts every launch, whatever the cost model predicts."""


def _always(*_: Any) -> str:
    """A tactic's ``defer`` that prefers other tactics."""
    return "it is not what is to be tested"


def sharing(*, clusters: bool, teams: int) -> Callable[..., tuple[tuple[Any, float], ...]]:
    """The configurations of a packed product in which blocks of a cluster (or none), and so many teams of warps, share K."""

    def found(kernel: Any, problem: Any, gpu: Any) -> tuple[tuple[Any, float], ...]:
        alike = (c for c in kernel.CONFIGS if (c.split > 1, c.teams) == (clusters, teams))
        return tuple((c, kernel.estimate(problem, c, gpu)) for c in alike if kernel.refuse(problem, c) is None)

    return found


def by_wgmma(problem: Any, gpu: Any) -> Any:
    """The configurations of a pooled stem that use wgmma only."""
    from optdnn.kernels.conv.stem_pool import wgmma_offers

    return wgmma_offers(problem, gpu)


SETTINGS: dict[str, dict[str, Any]] = {
    "pool behind a convolution": {"conv.pooled.OVERLAP": -1.0},
    "a gate": {"gemm.gemv_pair.VectorPair.defer": _never},
    "a gate of ten images": {"gemm.gemv_pair_kernel.IMAGES": (8,)},
    "a norm and a shortcut": {"norm.group_norm_add.SEPARATE_S": 1.0},
    "narrow groups": {"conv.general.BandedConv.defer": _always},
    "few channels": {"conv.narrow.NarrowConv.defer": _never},
    "bands": {"conv.general.BandedConv.defer": _never},
    "stacks fp32": {"gemm.tiles.FEWEST": 0},
    "stacks tf32": {"gemm.matmul.LEAST": 0},
    "pairs of channels": {f"gemm.paired.{c}.defer": _never for c in ("PairedGemm", "PairedPartsGemm")},
    "attention of ": {"attention.fp32.PartsAttention.refuse": _always},
    "attention in parts": {"attention.fp32.PartsAttention.defer": _never},
    "fp32 in parts": {"conv.parts.PartsConv.defer": _never, "conv.parts.PartsGemm.defer": _never},
    "scalar tiles": {"conv.parts.PartsConv.defer": _always, "conv.parts.PartsGemm.defer": _always},
    "norms between products": {
        "gemm.normed.TakesNorm.defer": _never,
        "gemm.normed_residual.NormedResidualGemm.defer": _never,
    },
    "norms of images": {"conv.normed.NormedConv.defer": _never},
    "chained": {"conv.chained.GAIN": 99.0},
    "bottlenecks of int8": {"conv.chained.GAIN": 99.0, "conv.chained.FEWEST": 1},
    "a first convolution": {"conv.stem_pool.GAIN": 99.0},
    "packed weights: in clusters": {"packed.product._estimated": sharing(clusters=True, teams=1)},
    "packed weights: two teams": {"packed.product._estimated": sharing(clusters=False, teams=2)},
    "packed weights: teams in clusters": {"packed.product._estimated": sharing(clusters=True, teams=2)},
    "a first convolution and its pool, by wgmma": {"conv.stem_pool._offers": by_wgmma},
}
"""Prefix of families' names -> settings of ``optdnn.kernels`` with which their kernels are chosen."""


@contextmanager
def forced(name: str) -> Iterator[None]:
    """Lets a family's kernel be chosen even if it is not predicted to win."""
    import pytest
    from kernels.conv import test_stream_k  # type: ignore[import-not-found]

    from optdnn.kernels.conv import general
    from optdnn.kernels.norm import group_norm, group_norm_grid
    from optdnn.lowering import megakernels
    from optdnn.lowering.table import TACTICS

    with pytest.MonkeyPatch.context() as patch:
        for begin, settings in SETTINGS.items():
            for place, value in settings.items() if name.startswith(begin) else ():
                patch.setattr(f"optdnn.kernels.{place}", value)
        if name == "layers in one launch":
            patch.setattr(megakernels, "gains", lambda run, gpu: True)
        if name == "stream-K":
            test_stream_k.prefer_stream_k(patch)
        if name == "a grid that keeps an image":
            patch.setattr(group_norm, "group_norm_offers", kept_by_a_grid(group_norm_grid))
        if name.startswith("K shared"):
            patch.setattr(general, "ranked", shared_k(general.ranked))
        for kind, tactic, others in _alone(name):
            patch.setattr(tactic, "defer", _never)
            patch.setitem(TACTICS, kind, (tactic(), *others))
        yield


def _alone(name: str) -> Iterator[tuple[str, type, tuple[Any, ...]]]:
    """The kind of operator for which a family's tactic comes first, that tactic, and the following ones."""
    from optdnn.kernels.conv.stem import StemConv
    from optdnn.kernels.packed.eight_bits import PackedBytes
    from optdnn.kernels.packed.gemm import PackedGemm
    from optdnn.kernels.packed.tactics import PackedGemv, PackedMma, PackedResident, PackedWgmma
    from optdnn.lowering.table import TACTICS

    packed = {
        "unpacked": PackedGemm,
        "by gemv": PackedGemv,  # groups of other sizes take it
        "by mma": PackedMma,  # GPUs before Hopper take it
        "by resident": PackedResident,
        "in 8 bits": PackedBytes,
        "in clusters": PackedWgmma,
        "two teams": PackedWgmma,
        "teams in clusters": PackedWgmma,
    }
    tactic = packed.get(name.removeprefix("packed weights: "))
    if tactic is not None:
        yield "PackedMatMul", tactic, ()
    if name.startswith("stem"):
        yield "Conv", StemConv, TACTICS["Conv"]


def kept_by_a_grid(kernel: Any) -> Callable[..., Any]:
    """A group norm that keeps one pixel of a thread in shared memory and others in registers, and reads the rest again."""
    from optdnn.kernels.tactic import Offer

    return lambda problem, gpu: (Offer(kernel.Config(problem.channels, 3, 64, 8, 1), 0.0),)


def shared_k(offers: Callable[..., Any]) -> Callable[..., Any]:
    """The configurations of the mma.sync kernel in which blocks share K. Hopper does not get them."""
    from optdnn.kernels.conv import general_kernel as general

    def those(problem: Any, gpu: Any) -> Any:
        config = next(c for c in general.CONFIGS if c.split > 1 and general.refuse(problem, c) is None)
        return (Offer(config, 0.0), *offers(problem, gpu))

    from optdnn.kernels.tactic import Offer

    return those


ATTENTIONS = (
    "plain",
    "long",
    "few queries, many keys",
    "full mask",
    "tiled mask",
    "causal past",
    "lengths",
    "grouped",
    "wide heads",
    "softcap",
    "sinks",
    "sinks of wide heads",
    "heads of 264",
)
ROTARIES = ("halves", "neighbors", "a part", "narrow vectors, neighbors", "position ids", "of a product, grouped")
RECURRENTS = (
    "lstm", "lstm stacked", "lstm initial", "gru both", "gru other", "gru other, computed", "gru of 300", "grid rnn both",
    "grid gru",
)  # fmt: skip

GENERAL = tuple(FAMILIES)
"""The families of generated kernels."""

Graphs = dict[str, tuple[Callable[[], Any], str]]
"""Family -> a function that builds its graph, and the precision."""


def net(kind: type, build: Callable[[Any], Any]) -> Callable[[], Any]:
    def made() -> Any:
        n = kind()
        results = build(n)
        return n.done(*results) if type(results) is tuple else n.done(results)

    return made


def convolutions() -> Graphs:
    """Families of images and volumes in floats."""
    return {
        **{precision: (net(Net, convolutional), precision) for precision in ("fp16", "bf16", "tf32", "fp32")},
        **{f"tiles {precision}": (net(Net, tiles), precision) for precision in ("fp16", "tf32")},
        "stream-K": (stream_k, "fp16"),
        # Fewer multiply-adds would be one product with all matrices.
        **{
            f"experts {precision}": (lambda: experts(rows=256, times=2, many=16, depth=256, columns=256), precision)
            for precision in ("fp16", "fp32")
        },
        "pool behind a convolution": (test_conv_pool.net, "fp16"),
        "pixel shuffle behind a convolution": (test_conv_shuffle.net, "fp16"),
        "bands": (lambda: grouped(128, 128, 32, size=(14, 15), residual=True), "fp16"),
        "narrow groups": (lambda: grouped(64, 64, 8, size=(14, 15), residual=True), "fp16"),
        "few channels": (lambda: test_narrow.net(24, 24, act="SiLU", residual=True), "fp16"),
        "few channels, strided": (lambda: test_narrow.net(18, 32, strides=2), "fp16"),
        "bands, strided": (lambda: grouped(256, 256, 32, size=(14, 15), strides=2), "fp16"),
        **{f"far strides {precision}": (net(Net, far_strides), precision) for precision in ("fp16", "tf32")},
        "K shared fp16": (net(Net, lambda n: n.conv(n.input(2, 128, 90, 70), 96, 3, strides=9, bias=True)), "fp16"),
        "patch embedding": (net(Net, lambda n: n.conv(n.input(2, 3, 32, 48), 24, 16, pads=0, strides=16)), "fp16"),
        **{f"stem: {name}": (net(Net, STEMS[name][0]), STEMS[name][1]) for name in STEMS},
        "prologue": (net(Net, lambda n: tuple(dense_layer(n))), "fp16"),
        "prologue: gate": (net(Net, lambda n: tuple(gated(n))), "bf16"),
        "scalar tiles": (net(Net, scalar_tiles), "fp32"),
        **{f"transposed {precision}": (net(Net, transposed), precision) for precision in ("fp16", "tf32", "fp32")},
        **{f"stems {precision}": (net(Net, stems), precision) for precision in ("fp16", "bf16")},
        "a scaled shortcut": (lambda: preact(3), "fp16"),
    }


def depthwise_convolutions() -> Graphs:
    """Families of depthwise convolutions, of the convolutions next to them, and of squeeze-and-excitation."""
    return {
        "depthwise": (net(Net, lambda n: depthwise(n, 16, 28, 3)), "fp16"),
        "depthwise on tensor cores": (net(Net, lambda n: depthwise(n, 4, 56, 5)), "fp16"),
        "depthwise by TMA": (net(Net, lambda n: depthwise(n, 32, 56, 3)), "fp16"),
        "depthwise, whole images": (net(Net, lambda n: depthwise(n, 64, 7, 5)), "fp16"),
        "depthwise by TMA, whole images": (net(Net, lambda n: depthwise(n, 64, 5, 7)), "fp16"),
        **{
            f"depthwise {precision}": (net(Net, lambda n: depthwise(n, 8, 28, 3)), precision)
            for precision in ("fp32", "tf32")
        },
        **{
            f"depthwise of other forms: {name}": (made[name], "fp16")
            for made, names in (
                (VOLUMES, ("5x5x5", "5x5x5 by 2")),
                (SQUEEZED, ("squeezed",)),
                (TRANSPOSED, ("8x8 by 4", "7x7x7 by 2")),
            )
            for name in names
        },
        **{
            f"filtered gates {precision}: {name}": (net(Net, FILTERED[name]), precision)
            for precision in ("fp16", "fp32")
            for name in ("image", "large filters", "line", "squeezed")
        },
        "separable": (net(Net, separable), "fp16"),
        "expanded": (net(Net, expanded), "fp16"),
        "chained convolutions": (net(Net, bottlenecks), "fp16"),
        "chained products": (net(Net, perceptron), "fp16"),
        "a first convolution and its pool": (net(Net, stem_and_pool), "fp16"),
        "a first convolution and its pool, by wgmma": (net(Net, stem_and_pool), "fp16"),
        "a gate": (lambda: excited(images=1), "fp16"),
        "a gate of means": (lambda: excited(images=1, size=(40, 36)), "fp16"),
        "a gate of ten images": (lambda: excited(images=10, size=(40, 36)), "fp16"),
        "a gate of a cluster": (lambda: excited(960, 240, images=1), "fp16"),
    }


def products() -> Graphs:
    """Families of products in floats."""
    return {
        **{f"stacks: {name}": (net(Net, STACKS[name]), "fp16") for name in ("with_epilogue", "transposed")},
        **{f"stacks, from the left: {name}": (net(Net, LEFT[name]), "fp16") for name in ("row_bias", "gate")},
        "norms between products, of a stack": (net(Net, LEFT["moments"]), "fp16"),
        **{f"stacks fp32: {name}": (net(Net, build), "fp32") for name, build in TILED.items()},
        **{f"stacks tf32: {name}": (net(Net, build), "tf32") for name, build in ANY.items()},
        "few rows": (net(Net, few_rows), "fp16"),
        "selected matrices": (experts, "fp16"),
        "wide results": (net(Net, wide_results), "fp16"),
        **{
            f"pairs of channels {precision}: {name}": (net(Net, build), precision)
            for precision in ("fp16", "tf32", "fp32")
            for name, build in PAIRED.items()
        },
        **{
            f"norms between products: {name}": (net(Net, build), "fp16")
            for name, build in (NORMED | NORMED_RESIDUALS).items()
        },
        **{f"fp32 in parts: {name}": (net(Net, build), "fp32") for name, (build, _) in IN_PARTS.items()},
        **{
            f"gated products: {name}": (GATED[name], "fp16")
            for name in ("after", "one image of odd size", "images of eight rows")
        },
        **{f"turned heads: {name}": (TURNED[name], "fp16") for name in ("halves", "neighbors of a part", "two tiles")},
    }


def packed_products() -> Graphs:
    """Products with packed weights."""
    picked = (
        ("a row", "an odd depth", 1),
        ("by gemv", "an odd depth", 1),
        ("gated", "gated", 5),
        ("8 bits", "8 bits, bf16", 8),
        ("12 rows", "a last block that is not full", 12),
        ("by resident", "a last block that is not full", 12),
        ("by mma", "a last block that is not full", 12),
        ("300 rows", "gated", 300),
        ("unpacked", "a last block that is not full", 300),
        ("in 8 bits", "a last block that is not full", 300),
        ("in clusters", "a last block that is not full", 300),
        ("two teams", "a last block that is not full", 100),
        ("teams in clusters", "a last block that is not full", 100),
    )
    return {
        f"packed weights: {name}": (
            partial(network, CASES[case].of_rows(rows), rounded=name == "in 8 bits"),
            "bf16" if CASES[case].dtype == "bfloat16" else "fp16",
        )
        for name, case, rows in picked
    }


def eight_bits() -> Graphs:
    """Convolutions and products of 8-bit numbers."""
    return {
        "int8": (net(QNet, quantized), "fp16"),
        "bottlenecks of int8": (net(QNet, chained_8bit), "fp16"),
        "K shared int8": (
            net(QNet, lambda n: n.fake(n.qconv(n.fake(n.input(2, 128, 90, 70), 0.03), 96, stride=9), 0.04)),
            "fp16",
        ),
        "far strides int8": (net(QNet, far_strides_8bit), "fp16"),
        "far strides fp8": (
            net(QNet, lambda n: n.qconv(n.fake(n.input(2, 21, 60, 50), 0.01, None, FP8), 37, stride=9, dtype=FP8)),
            "fp16",
        ),
        **{
            f"8 bits: {name}": (net(QNet, NETS[name]), "fp16")
            for name in (
                *("zero points, a perceptron", "rows of three axes", "groups, zero points", "32 groups of 8, strided"),
                *("frames under taps, zero point", "padding with a zero point"),
            )
        },
        **{f"8 bits: {name}": (build, "fp16") for name, build in (NARROWED | STREAMS).items()},
        **{f"8 bits, padded: {name}": (partial(padded_8bit, name), "fp16") for name in EDGED},
        **{f"dynamic scales: {name}": (partial(dynamic, name), "fp16") for name in DYNAMIC},
    }


def norms() -> Graphs:
    """Norms, means, and the kernels that include them."""
    picked = [("groups", GROUP_NORM, tuple(GROUP_NORM)), ("residual", RESIDUAL, tuple(RESIDUAL))]
    return {
        **{f"norms of images: {name}": (net(Net, NORMED_IMAGES[name]), "fp16") for name in ("block", "chain")},
        "a grid that keeps an image": (lambda: group_norm(channels=32, groups=4, size=(20, 21), then="Relu"), "fp16"),
        "a norm and a shortcut": (block, "fp16"),
        **{f"adaptive norms {precision}": (adaptive, precision) for precision in ("fp16", "fp32")},
        "other deviations": (partial(deviations, True, False), "fp16"),
        "pairs of norms": (lambda: pair(factor=True), "fp16"),
        "means of images": (lambda: gate(size=57), "fp16"),
        **{
            f"means of a softmax: {name}": (lambda name=name: MEANS[name], "fp16")
            for name in ("17 bins", "sides apart")
        },
        "norms across": (net(Net, lambda n: mixer(n, 20)), "fp16"),
        **{f"{kind}: {name}": (cases[name][0], "fp16") for kind, cases, names in picked for name in names},
    }


def pointwise() -> Graphs:
    """Pointwise operators with others in one launch."""
    return {
        **{f"operators on gathered rows: {name}": (build, "fp16") for name, build in OF_ROWS.items()},
        **{f"padded operators: {name}": (build, "fp16") for name, build in PADDED.items()},
        "joint operators": (boxes, "fp16"),
    }


def sequences() -> Graphs:
    """Attention, recurrent layers, rotary embeddings, and the choice of tokens."""
    picked = [("attention", ATTENTION, ATTENTIONS), ("recurrent", RECURRENT, RECURRENTS)]
    return {
        **{f"{kind}: {name}": (cases[name][0], "fp16") for kind, cases, names in picked for name in names},
        **{
            f"attention {form} {p}: {name}": (ATTENTION[name][0], p)
            for form in ("of", "in parts,")
            for p in ("fp32", "tf32")
            for name in ATTENTIONS
        },
        "attention over a cache": (step, "fp16"),
        "layers in one launch": (layers, "fp16"),
        "attention over a cache, keys shared": (lambda: step(batch=1, capacity=2048), "fp16"),
        "attention of one query": (lambda: one_query(masked="keys"), "fp16"),
        "attention of one query, by a few blocks": (lambda: one_query(batch=48, masked="heads"), "fp16"),
        "attention between channels": (between_channels, "fp16"),
        "attention between channels over many tokens": (lambda: between_channels(tokens=3000), "fp16"),
        **{f"rotary: {name}": (ROTARY[name], "fp16") for name in ROTARIES},
        **{f"norms and rotary: {name}": (NORMED_HEADS[name], "fp16") for name in ("a part turns", "tokens, grouped")},
        **{f"sampled sums: {name}": (partial(sampled, name), "fp16") for name in SAMPLED},
        "top rows": (lambda: test_top_rows.graph(test_top_rows.CASES[0]), "fp32"),
        "top rows of several blocks": (lambda: test_top_rows.graph(((1, 40000), 1, 40, "fp16", True)), "fp32"),
        "top rows, equal elements": (lambda: test_top_rows.graph(((1, 9000), 1, 300, "int8", True)), "fp32"),
        "top rows, read again": (lambda: test_top_rows.graph(((150000, 1), 0, 4000, "fp16", True)), "fp32"),
        "suppression of boxes": (lambda: import_model(detector(1500, 2)), "fp32"),
        **{f"sampling {n} tokens": (partial(sampling, n, "fp16"), "fp32") for n in (1003, 32000)},
    }


def graphs() -> Graphs:
    """All of them."""
    generated: Graphs = {name: (partial(graph_of, name), "fp16") for name in FAMILIES}
    parts = (convolutions, depthwise_convolutions, products, packed_products, eight_bits, norms, pointwise, sequences)
    return {name: made for part in parts for name, made in part().items()} | generated
