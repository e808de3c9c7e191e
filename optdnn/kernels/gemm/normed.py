"""Products of normalized rows without a launch for the norm.

The product that makes the rows also writes their moments: mean and squared deviations of each 64 channels. The product of the
normalized rows reads the rows before the norm, multiplies them by a scaled matrix, and applies the norm to its sums
(``conv_moments.cuh``). If other operators read the normalized rows, the norm's launch stays and runs beside the
product. But a product that adds the normalized rows normalizes them itself (:mod:`.normed_residual`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from optdnn.ir.graph import Graph, Op
from optdnn.kernels.builder import Builder, TensorView, as_rows
from optdnn.kernels.conv import hopper_launch
from optdnn.kernels.conv.fused import Convolution
from optdnn.kernels.conv.packed import Meaning
from optdnn.kernels.conv.problem import Problem
from optdnn.kernels.gemm.hopper import HopperGemm, MatrixProduct, rows_of
from optdnn.kernels.gemm.paired import PairedGemm, halves, multiplier
from optdnn.kernels.gemm.row_norms import (
    ADDED,
    BESIDE,
    PLAIN,
    PRODUCTS,
    ROWS,
    TOLD,
    Normed,
    adder,
    behind,
    norm_attrs,
    normed,
    normed_operands,
    refuse_norm,
    refuse_places,
    scaled_refusal,
    seconds_of,
    stages_of,
)
from optdnn.kernels.tactic import Region, Tactic
from optdnn.ops.fused import plain_stages

MOST_WORK = 2.0e10
"""Most operations of products that were faster this way. Larger products run at the power limit and gained nothing
(``docs/internals/kernels-epilogues.md``)."""


class TakesNorm(hopper_launch.HopperTactic, MatrixProduct):
    """One or two products of normalized 16-bit rows whose producer can write their moments.

    The tactic is tried before ``alone``, which runs the same products after a separate launch of the norm.
    """

    alone: ClassVar[Tactic]

    @staticmethod
    def others(graph: Graph, op: Op) -> tuple[Op, ...]:
        """Further products of the same rows in the launch of ``op``."""
        return ()

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := self.alone.refuse(b, op)) is not None:
            return why
        found = normed(b.graph, op.inputs[0])
        if found is None:
            return "its rows are not the normalized rows of another product"
        if (why := refuse_norm(b, op, found)) is not None:
            return why
        if any(found.norm.value in x.inputs[1:] for x in (op, *self.others(b.graph, op))):
            return "its own stages read the normalized rows"
        readers = self._readers(b, op, found)
        shared = self._shared(b, op, found, readers)
        if not shared and any(u.kind in PRODUCTS and u.inputs[0] == found.norm.value for u in readers):
            return "other products read the normalized rows"
        if self._stays(b, op, found) and not b.lanes and not shared and adder(b, found, readers) is None:
            return "others read the normalized rows, and steps run one after the other"
        return refuse_places(b, op, found, self._order(b, op)) or self._unfit(b, op, found)

    @staticmethod
    def _normed(b: Builder, op: Op) -> Normed:
        found = normed(b.graph, op.inputs[0])
        assert found is not None
        return found

    def _readers(self, b: Builder, op: Op, found: Normed) -> list[Op]:
        """The operators outside of this launch that read the normalized rows, except products that normalize the rows
        themselves."""
        own = {op.id, *(x.id for x in self.others(b.graph, op))}
        others = [u for u in b.graph.users(found.norm.value) if u.id not in own]
        return [u for u in others if not isinstance(b.chosen.get(u.id), TakesNorm)]

    def _shared(self, b: Builder, op: Op, found: Normed, readers: Sequence[Op]) -> bool:
        """Whether all other readers are products that are not planned yet and may normalize the rows themselves: attention and
        perceptron side by side (GPT-J). The last of them drops the norm's launch."""
        if not readers or found.norm.value in b.reserved:
            return False
        plain = (x.kind in PRODUCTS and x.inputs[0] == found.norm.value and x.id not in b.chosen for x in readers)
        return all(plain) and all(self._may_take(b, x) for x in (op, *readers))

    @staticmethod
    def _may_take(b: Builder, op: Op) -> bool:
        """Whether the product reads only constants besides the rows."""
        ep = stages_of(b.graph, op)
        multiplies = b.graph.sole_user(op.value)
        pair = multiplies is not None and multiplier(b.graph, multiplies) is not None
        return not (ep.residual or ep.constants or pair) and PLAIN.refuse(b, op) is None

    def _stays(self, b: Builder, op: Op, found: Normed) -> bool:
        """Whether the norm's own launch stays for other readers, beside the product."""
        return bool(self._readers(b, op, found)) or found.norm.value in b.reserved

    def _unfit(self, b: Builder, op: Op, found: Normed) -> str | None:
        """Why the norm cannot be applied after the product, or None."""
        c = super().convolution(b, op)
        if c.residual is not None or c.ep.constants:
            return "its stages read other tensors"
        return scaled_refusal(b, c.feed.weight, found.scale(b))

    def defer(self, b: Builder, op: Op) -> str | None:
        """Unmeasured, the cost model decides."""
        if (why := super().defer(b, op)) is not None:
            return why
        found, problem = self._normed(b, op), self.problem(b, op)
        if problem.flops > MOST_WORK:
            return (
                f"{problem.flops / 1e9:.0f} GFLOP run at the power limit, where a norm before the product costs little"
            )
        norm, alone, own = seconds_of(b, (ROWS, found.norm), (self.alone, op), (self, op))
        own += TOLD
        readers = self._readers(b, op, found)
        if self._stays(b, op, found) and not self._shared(b, op, found, readers):
            own += BESIDE if adder(b, found, readers) is None else ADDED
        if own < norm + alone:
            return None
        return f"norm and product are predicted to take {(norm + alone) * 1e6:.1f} us, one launch {own * 1e6:.1f}"

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The norm, the producer of its rows, and the other products."""
        found = normed(graph, op.inputs[0])
        return [] if found is None else [found.norm, found.producer, *self.others(graph, op)]

    def region(self, b: Builder, op: Op) -> Region:
        """The norm, unless its launch stays for other readers, and the products."""
        found = self._normed(b, op)
        norm = () if self._stays(b, op, found) else (found.norm,)
        return Region(op, before=(*norm, *self.others(b.graph, op)))

    def place(self, b: Builder, op: Op) -> None:
        """Place the result, and the moments that the producer writes."""
        super().place(b, op)
        self._normed(b, op).moments(b)

    def convolution(self, b: Builder, op: Op) -> Convolution:
        """The product of the rows before the norm with the scaled matrix."""
        c, found = super().convolution(b, op), self._normed(b, op)
        x = rows_of(b.source(found.rows))
        assert x is not None
        return behind(b, c, x, found)

    def problem_of(self, b: Builder, op: Op, c: Convolution) -> Problem:
        problem: Problem = super().problem_of(b, op, c)
        return replace(problem, norm=self._normed(b, op).kind)

    def operands(self, b: Builder, op: Op, c: Convolution, problem: Problem) -> dict[str, TensorView]:
        """The launch's operands by name, with its result."""
        return normed_operands(b, op, c, problem, self._normed(b, op).moments(b))


class NormedGemm(TakesNorm, HopperGemm):
    """One product, which may also write the moments of its own rows."""

    name = "gemm_normed_sm90"
    alone = PLAIN

    def launch(self, b: Builder, op: Op, c: Convolution, problem: Problem, config: Any) -> None:
        operands, moments = self.operands(b, op, c, problem), b.together.get(op.id)
        columns, depth = c.out.shape[1], c.feed.x.shape[1]
        weights = operands["weights"].view((columns, depth), (depth, 1))
        sums, bias = (operands[n].view((columns,), (1,)) for n in ("columns", "channel"))
        attrs = {**norm_attrs(problem.norm), "image": 0, "epilogue": plain_stages(c.ep.stages), "beside": ()}
        kind = "NormedProduct"
        if moments is not None:
            problem, operands["moments"] = replace(problem, moments=True), moments
            kind, attrs = hopper_launch.with_moments(kind, attrs)
        meaning: Meaning = (kind, attrs, [as_rows(c.feed.x), operands["given"], weights, sums, bias])
        if (angles := self.angles(b, op)) is not None:
            operands["angles"] = angles
            meaning = hopper_launch.with_turn(meaning, problem, angles)
        made = hopper_launch.launch(problem, config, b.gpu, c.feeds, operands)
        hopper_launch.emit(b, op, made, problem, config, operands, meaning, as_rows(c.out), moments)


class NormedPair(TakesNorm, PairedGemm):
    """Two products of the same rows, one multiplied by the other."""

    name = "gemm_paired_normed_sm90"
    alone = PairedGemm()

    @staticmethod
    def others(graph: Graph, op: Op) -> tuple[Op, ...]:
        """The product that multiplies ``op``."""
        other = multiplier(graph, op)
        return () if other is None else (other,)

    def launch(self, b: Builder, op: Op, c: Convolution, problem: Problem, config: Any) -> None:
        operands = self.operands(b, op, c, problem)
        reads = [as_rows(c.feed.x), operands["given"]]
        for part in halves(problem, c.feeds, *(operands[n] for n in ("weights", "columns", "channel"))):
            reads += part
        self.emit_pair(
            b,
            op,
            c,
            problem,
            config,
            operands,
            ("NormedProduct", {**norm_attrs(problem.norm), "image": 0, **self.stages(b, op)}, reads),
        )
