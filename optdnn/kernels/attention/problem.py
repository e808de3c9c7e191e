"""Problems of the fused attention kernels: sizes, masks, and views of the operands."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from optdnn.ops.unary import FakeQuantizeAttrs


@dataclass(frozen=True)
class HeadView:
    """View of a tensor with logical axes (batch, head, position, feature): offset and strides in elements. Features are
    contiguous."""

    batch: int
    head: int
    position: int
    offset: int = 0


def bhsd(positions: int, heads: int, features: int) -> HeadView:
    """The view of a tensor [batch, head, position, feature]."""
    return HeadView(heads * positions * features, positions * features, features)


@dataclass(frozen=True)
class Factors:
    """A bias of two factors: key k of a query gets ``rows[k // key_width] + columns[k % key_width]``.

    ``rows`` and ``columns``: strides of the two tensors in elements, along (batch, head, row of the query, column of the query).
    Queries form rows of ``query_width``. The last axis of both tensors is contiguous.
    """

    rows: tuple[int, int, int, int]
    columns: tuple[int, int, int, int]
    key_width: int
    query_width: int


@dataclass(frozen=True)
class Problem:
    """``batch`` x ``heads`` attentions of ``queries`` over ``keys`` positions of ``features``.

    ``key_heads`` divides ``heads`` (grouped queries). ``mask``: strides (batch, head, query), in elements, of an additive mask of
    the operands' type. Its last axis of ``keys`` elements is contiguous; stride 0 broadcasts. Batch entry n uses mask
    n % ``mask_period`` (0: one mask per entry): the windows of a Swin transformer share masks this way.
    ``causal``: query i sees keys up to i + ``causal_offset``. ``lengths``: an int32 per batch entry gives the number of keys.
    A row that sees no key is zero. ``value_features``: features of values and result (0: ``features``).
    ``reach``: with a window, query i sees keys from i + ``causal_offset`` - reach on (-1: from the first).
    ``from_end``: query positions count from the end of the keys of their batch entry; ``causal_offset`` is added to them.
    ``softcap``: scores x become softcap * tanh(x / softcap) before the mask is added (0: no softcap).
    """

    batch: int
    heads: int
    queries: int
    keys: int
    features: int
    scale: float
    q: HeadView
    k: HeadView
    v: HeadView
    out: HeadView
    dtype: str = "float16"
    key_heads: int = 0
    mask: tuple[int, int, int] | None = None
    mask_period: int = 0
    mask_aligned: bool = False
    """Whether all rows of the mask begin at multiples of 16 bytes."""
    causal: bool = False
    causal_offset: int = 0
    lengths: bool = False
    narrow: str = ""
    """8-bit element type of the result; "": ``dtype``."""
    value_features: int = 0
    reach: int = -1
    from_end: bool = False
    softcap: float = 0.0
    factors: Factors | None = None
    sinks: bool = False
    """Whether each head's softmax has one more logit, which no value belongs to."""
    rounded: bool = False
    """Whether fp32 operands are rounded to tf32 before they are multiplied."""
    grids: tuple[FakeQuantizeAttrs | None, FakeQuantizeAttrs | None] = (None, None)
    """The grids that scores and weights are rounded to (None: they are not)."""

    @property
    def cap(self) -> tuple[float, float]:
        """Factor of the scores in the base-2 exponential of the softcap's tanh, and factor of the tanh itself (in units of
        log2); zeros without a softcap."""
        if not self.softcap:
            return 0.0, 0.0
        return 2 * math.log2(math.e) * self.scale / self.softcap, self.softcap * math.log2(math.e)

    @cached_property
    def widest(self) -> int:
        """The features of keys or of values, whichever are more."""
        return max(self.features, self.value_features)

    @property
    def out_item(self) -> int:
        """Bytes of an element of the result."""
        return 1 if self.narrow else self.item

    @property
    def item(self) -> int:
        """Bytes of an element of the operands."""
        return 4 if self.dtype == "float32" else 2

    @property
    def values(self) -> int:
        """Features of values and result."""
        return self.value_features or self.features

    @cached_property
    def head(self) -> int:
        """Features per head in the kernel: a multiple of 16, or of 64 above 128. TMA pads keys and values with zeros."""
        unit = 16 if self.widest <= 128 else 64
        return -(-self.widest // unit) * unit

    @property
    def span(self) -> int:
        """Bytes per row of a subtile in shared memory."""
        return span_of(self.head)

    @property
    def bytes(self) -> int:
        """Least global traffic: each tensor once."""
        rows = self.queries * self.heads + self.keys * (self.key_heads or self.heads)
        return self.item * self.batch * (self.features + self.values) * rows


def span_of(head: int) -> int:
    """Bytes per row of a subtile in shared memory, of 16-bit heads of ``head`` features."""
    return next(span for span in (128, 64, 32) if head * 2 % span == 0)


def unsuitable(problem: Problem, unit: int, most: int) -> str | None:
    """Why no kernel for heads of a multiple of ``unit`` up to ``most`` features can run the problem, or None. Strides aside."""
    for features in (problem.features, problem.values):
        if features % unit or not unit <= features <= most:
            return f"heads of {features} features (a multiple of {unit} up to {most} is needed)"
    if problem.softcap < 0 or math.isinf(problem.softcap):
        return f"a softcap of {problem.softcap}"
    if not problem.scale > 0 or math.isinf(problem.scale):
        return f"a scale of {problem.scale}"
    if problem.heads % (problem.key_heads or problem.heads):
        return f"{problem.heads} heads do not share {problem.key_heads} key heads evenly"
    if problem.heads > 65535 or problem.batch > 65535:
        return "the grid is too large"
    return None


def mask_width(problem: Problem) -> int:
    """Elements of a mask that a load reads: 2 if every row starts at an even element, else 1; 0 without a mask."""
    if problem.mask is None:
        return 0
    return 2 if problem.keys % 2 == 0 and all(x % 2 == 0 for x in problem.mask) else 1


def mask_rows(problem: Problem) -> int:
    """Mask rows that a thread reads for its two queries: one if all queries share a row."""
    return 2 if problem.mask is not None and problem.mask[2] else 1
