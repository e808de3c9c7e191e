"""The cuda program under construction: the place of every value, the steps, the table of kernels.

The place of a value is a :class:`TensorView`: a buffer, an offset and a stride per logical axis (in elements). Reshapes, transposes,
slices and splits are therefore other views of the same memory, and the producers of a concatenation's parts write it in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from optdnn.errors import InternalError
from optdnn.ir.constant_cache import ConstantCache
from optdnn.ir.epilogue import summed_dtype
from optdnn.ir.graph import Graph, Op, Value
from optdnn.kernels.launch import Launch
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts, launches_early
from optdnn.runtime.cuda.launches.plan import GRID, CudaStep, LaunchPlan, OperandView, ReferenceOp, Relocation
from optdnn.runtime.cuda.libraries.calls import LibraryCall, Operation
from optdnn.runtime.program import Buffer, Kernel, Program, Step
from optdnn.runtime.steps.attrs import attrs_to_plain
from optdnn.types import BF16, FP16, FP32, Array, DType, TensorType

EIGHT_BITS = ("int8", "uint8", "float8_e4m3fn")
"""Element types of quantized tensors; their pixels have a multiple of 16 channels."""
CHANNEL_ALIGN = 8
"""Channels-last tensors of 16-bit floats have a multiple of this many channels per pixel: TMA needs multiples of 16 bytes."""


VERY_MANY = 1 << 40
"""With ``row_invariant``, the count of anything that grows with the batch."""
NOWHERE = -1
"""The buffer of a tensor that has none yet (:meth:`Builder.made`)."""


@dataclass(frozen=True)
class TensorView:
    """A tensor in a buffer. ``offset`` and ``strides`` (one per logical axis) are in elements.

    Tensors of a plan may not exist yet: their buffer is :data:`NOWHERE`. Then ``make`` adds the launches that fill a buffer, and returns
    the buffer's number.
    """

    buffer: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    make: Callable[[], int] | None = field(default=None, compare=False, repr=False)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def byte_offset(self) -> int:
        return self.offset * self.dtype.itemsize

    def is_like(self, strides: Sequence[int]) -> bool:
        """Whether it has these strides on all axes longer than 1."""
        return all(n == 1 or a == b for n, a, b in zip(self.shape, self.strides, strides, strict=True))

    @property
    def dense(self) -> bool:
        """Whether it is in plain row-major order without gaps."""
        return self.is_like(row_major(self.shape))

    def view(self, shape: Sequence[int], strides: Sequence[int], offset: int = 0) -> TensorView:
        """Another view of the same buffer, ``offset`` elements further."""
        return replace(self, shape=tuple(shape), strides=tuple(strides), offset=self.offset + offset)

    def permuted(self, order: Sequence[int]) -> TensorView:
        """The view with its axes in this order; axes that are left out must have one element."""
        return self.view([self.shape[k] for k in order], [self.strides[k] for k in order])


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def channels_last(shape: Sequence[int], pitch: int) -> tuple[int, ...]:
    """Strides of a channels-last tensor of this logical shape (axis 1: channels) with ``pitch`` channels per position."""
    _, _, *spatial = shape
    inner = row_major(spatial)
    total = int(np.prod(spatial, dtype=np.int64))
    return (total * pitch, 1, *(s * pitch for s in inner))


def physical_shape(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The shape of a buffer for a tensor with these strides.

    The buffer of padded rows or pixels also holds the padding of the last one, whichever axis is outermost in memory.
    """
    if tuple(strides) == row_major(shape):
        return tuple(shape)
    whole = max((n * s for n, s in zip(shape, strides, strict=True)), default=1)
    span = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return (max(span, whole),)


def unmade(
    dtype: DType, shape: Sequence[int], strides: Sequence[int] | None = None, make: Callable[[], int] | None = None
) -> TensorView:
    """A tensor that has no buffer yet (strides None: without gaps)."""
    return TensorView(NOWHERE, 0, tuple(shape), row_major(shape) if strides is None else tuple(strides), dtype, make)


def as_rows(x: TensorView) -> TensorView:
    """Images of 1 x 1 (NCHW) as the rows of a matrix."""
    return x.view(x.shape[:2], x.strides[:2])


def up(n: int, multiple: int) -> int:
    """``n`` rounded up to a multiple."""
    return -(-n // multiple) * multiple


def rows_of_vectors(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor whose rows begin at multiples of 8 elements: 16 bytes of 16-bit floats, as TMA needs."""
    return row_major((*shape[:-1], up(shape[-1], 8)))


@dataclass(frozen=True)
class Move:
    """A copy on behalf of ``op``: a view that has to be written out. Several ``sources`` are joined along ``axis`` of ``target``."""

    op: Op
    sources: tuple[TensorView, ...]
    target: TensorView
    axis: int = 0


@dataclass
class Builder:
    """Collects buffers, steps, kernels and blobs. ``graph`` has the types of values, ``place`` their places."""

    graph: Graph
    gpu: GpuFacts
    buffers: list[Buffer] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    blobs: list[Array] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    recipes: list[Recipe] = field(default_factory=list)
    place: dict[Value, TensorView] = field(default_factory=dict)
    padded: bool = False
    """Whether fp32 tensors also have a multiple of CHANNEL_ALIGN channels per pixel (for tf32 products)."""
    row_invariant: bool = False
    """Whether a row of a batch must have the same bits for any batch size."""
    lanes: bool = True
    """Whether independent steps may run side by side."""
    reserved: dict[Value, TensorView] = field(default_factory=dict)
    """Values with a place that was chosen beforehand: network outputs, and parts of concatenations."""
    fetch: Callable[[Value], TensorView | None] = field(default=lambda value: None)
    """Copies a value that the host computes to the GPU (see :mod:`optdnn.lowering.host`)."""
    _kernel_of: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _blob_of: dict[tuple[str, tuple[int, ...], bytes], int] = field(default_factory=dict)
    _constants: dict[int, TensorView] = field(default_factory=dict)
    copies: dict[tuple[TensorView, DType, tuple[int, ...]], TensorView] = field(default_factory=dict)
    """View, and the strides of its copy (or a key of its tactic's) -> the copy, for all operators that read it."""
    flattened: dict[TensorView, TensorView] = field(default_factory=dict)
    """View -> its copy without gaps that a Reshape needed, for all Reshapes of the view."""
    kept: ConstantCache = field(default_factory=ConstantCache)
    """Constants; other builders may share them."""
    retained: list[int] = field(default_factory=list)
    """Buffers that keep their contents from run to run (:attr:`optdnn.runtime.program.Program.retained`)."""
    together: dict[int, Any] = field(default_factory=dict)
    """Operator (by number) -> further decisions of its tactic's ``place``, beyond the places of its results."""
    sums: dict[Value, TensorView] = field(default_factory=dict)
    """Means that a separate launch computes from sums over an image's tiles -> these sums (images, tiles, channels)."""
    chosen: dict[int, Any] = field(default_factory=dict)
    """Anchor of a planned site (by number) -> its tactic."""
    joined: dict[int, tuple[Op, ...]] = field(default_factory=dict)
    """Operator of a planned site (by number) -> the operators before it that the same launches compute. Their results are not stored, or
    not as they were: products rotate heads in place."""
    plan: list[Any] = field(default_factory=list)
    """The entries to launch, in order: moves, steps of the host, and sites (:mod:`optdnn.lowering.sites`)."""

    @property
    def arch(self) -> str:
        """The architecture that its kernels are compiled for."""
        return self.gpu.arch

    def __post_init__(self) -> None:
        self.kept.of(self.graph)

    def counted(self, size: float) -> float:
        """A size that grows with the batch, as a decision that may change sums or roundings counts it: with :attr:`row_invariant`, that of
        a very large batch."""
        return VERY_MANY if self.row_invariant else size

    def fork(self) -> Builder:
        """An independent copy of this builder: additions to the copy do not change this one."""
        made = copy(self)
        made.fetch = lambda value: None
        for name, value in vars(self).items():
            if isinstance(value, (list, dict)):
                setattr(made, name, value.copy())
        return made

    # ---------------------------------------------------------------- memory

    def new(self, name: str, dtype: DType, shape: Sequence[int], strides: Sequence[int] | None = None) -> TensorView:
        """A tensor of this logical shape in a new buffer. The buffer has the size that the strides span."""
        return self.made(self.later(name, dtype, shape, strides))

    def later(self, name: str, dtype: DType, shape: Sequence[int], strides: Sequence[int] | None = None) -> TensorView:
        """:meth:`new`, but the buffer is added only when the tensor is made."""

        def make() -> int:
            self.buffers.append(Buffer(name, dtype, physical_shape(x.shape, x.strides)))
            return len(self.buffers) - 1

        x = unmade(dtype, shape, strides, make)
        return x

    def made(self, x: TensorView) -> TensorView:
        """``x`` with a buffer: if it does not exist yet, its launches and its buffer are added."""
        if x.buffer != NOWHERE:
            return x
        if x.make is None:
            raise InternalError("a tensor without a buffer has no function that makes it")
        return replace(x, buffer=x.make(), make=None)

    def blob(self, array: Array) -> int:
        """Number of the blob with this content."""
        key, kept = self.kept.same(array)
        if key not in self._blob_of:
            self._blob_of[key] = len(self.blobs)
            self.blobs.append(kept)
        return self._blob_of[key]

    def constant(self, array: Array, name: str = "constant") -> TensorView:
        """A constant buffer with this content; equal contents share one."""
        array = np.ascontiguousarray(array).reshape(array.shape)
        blob = self.blob(array)
        if blob not in self._constants:
            self.buffers.append(Buffer(name, array.dtype, array.shape, blob=blob))
            self._constants[blob] = TensorView(
                len(self.buffers) - 1, 0, array.shape, row_major(array.shape), array.dtype
            )
        return self._constants[blob]

    def place_empty(self, value: Value) -> TensorView:
        """The place of a value without elements: a constant, since no step writes it."""
        out = self.graph.output(value)
        self.place[value] = self.constant(np.empty(out.type.static_shape, out.type.dtype), out.name)
        return self.place[value]

    def rearranged(self, x: TensorView, name: str, strides: Sequence[int] | None = None) -> TensorView:
        """A constant's elements with other strides (None: without gaps), and zeros in the gaps."""
        blob = self.buffers[x.buffer].blob
        if blob is None:
            raise InternalError("only constants can be rearranged")
        to = row_major(x.shape) if strides is None else tuple(strides)
        flat = self.blobs[blob].reshape(-1)[x.offset :]
        values = as_strided(flat, x.shape, [s * flat.itemsize for s in x.strides])
        made: Array = np.zeros(physical_shape(x.shape, to), x.dtype)
        as_strided(made.reshape(-1), x.shape, [s * made.itemsize for s in to])[...] = values
        return replace(self.constant(made, name), shape=x.shape, strides=to)

    def operand(self, value: Value | None) -> TensorView:
        """The place of a value. A constant is placed on first use. Raises InternalError for an absent operand."""
        if value is None:
            raise InternalError("an operand is absent")
        found = self.place.get(value) or self.fetch(value)
        if found is None:
            array = self.graph.constant_value(value)
            if array is None:
                raise InternalError(f"{self.graph.output(value).name!r} is read before it is placed")
            found = self.place[value] = self.constant(array, self.graph.output(value).name)
        return found

    def source(self, value: Value | None) -> TensorView:
        """:meth:`operand`, but a constant is placed only when the view is made."""
        array = self.graph.constant_value(value)
        if array is None or value in self.place:
            return self.operand(value)
        return unmade(array.dtype, array.shape, make=lambda: self.operand(value).buffer)

    def seen(self, value: Value) -> TensorView:
        """:meth:`source`, but a value that is not computed yet is seen where it would be placed."""
        known = self.graph.constant_value(value) is not None or value in self.place or self.fetch(value) is not None
        return self.source(value) if known else self.result(value)

    def result(self, value: Value, strides: Sequence[int] | None = None) -> TensorView:
        """:meth:`target`, but the value is placed only when the view is made."""
        found = self.place.get(value, self.reserved.get(value))
        if found is not None:
            return found
        out = self.graph.output(value)
        t = out.type
        return self.later(out.name, t.dtype, t.static_shape, self.strides_for(t) if strides is None else strides)

    def fixed(self, *values: Value) -> list[TensorView]:
        """The reserved places of those values that have one."""
        return [self.reserved[value] for value in values if value in self.reserved]

    def weights(self, op: Op) -> Array:
        """The constant operand 1 of an operator. Raises InternalError if it is not constant."""
        array = self.graph.constant_value(op.inputs[1])
        if array is None:
            raise InternalError(f"{op.kind} {op.name}: its weights are not constant")
        return array

    def strides_for(self, type: TensorType) -> tuple[int, ...]:
        """Strides of a new tensor of this type in its layout."""
        shape = type.static_shape
        if not type.layout:
            return row_major(shape)
        align = CHANNEL_ALIGN if type.dtype in (FP16, BF16) else 16 if type.dtype.name in EIGHT_BITS else 1
        if type.dtype == FP32 and self.padded:
            align = CHANNEL_ALIGN
        return channels_last(shape, up(shape[1], align))

    def target(self, value: Value, strides: Sequence[int] | None = None) -> TensorView:
        """The place where the producer of a value writes it: its place, its reserved place, or a new buffer with these strides (None: in
        the layout of its type)."""
        if value not in self.place:
            self.place[value] = self.made(self.result(value, strides))
        return self.place[value]

    def move(self, op: Op, source: TensorView, target: TensorView) -> None:
        """Record that ``source`` has to be copied to ``target``."""
        self.plan.append(Move(op, (source,), target))

    def join(self, op: Op, sources: Sequence[TensorView], target: TensorView, axis: int) -> None:
        """Record that ``sources`` have to be copied to ``target``, side by side along ``axis``."""
        self.plan.append(Move(op, tuple(sources), target, axis))

    # ---------------------------------------------------------------- steps

    def kernel(self, launch: Launch) -> int:
        """Number of a launch's kernel in the program's table."""
        r = launch.recipe
        key = (r.name, launch.function, r.arch, tuple(sorted(r.generated.items())), tuple(r.options))
        if key not in self._kernel_of:
            self._kernel_of[key] = len(self.kernels)
            made = Kernel(r.name, launch.function, r.arch, dict(r.generated), tuple(r.options), r.digest())
            self.kernels.append(made)
            self.recipes.append(r)
        return self._kernel_of[key]

    def emit(
        self,
        op: Op,
        launch: Launch,
        operands: Mapping[str, TensorView],
        kind: str,
        attrs: Mapping[str, Any],
        reads: Sequence[TensorView | None],
        writes: Sequence[TensorView | None],
        *,
        scratch: Sequence[TensorView] = (),
        kept: Sequence[TensorView] = (),
    ) -> None:
        """Add a launch. ``operands``: name -> view. Its meaning is ``kind``, ``attrs`` (of the reference kernel), ``reads`` and ``writes``.

        ``scratch``: memory that only this launch uses. ``kept``: the same, but zeros at first, and kept from run to run."""
        touched = [operands[r.operand] for r in launch.relocations]
        inputs, written = _buffers(reads, touched, [*writes, *scratch, *kept])
        number = {b: i for i, b in enumerate((*inputs, *written))}
        placed: list[Relocation] = []
        for r, at in zip(launch.relocations, touched, strict=True):
            place: dict[str, Any] = {"operand": number[at.buffer], "offset": at.byte_offset + r.offset}
            placed.append(replace(r, **place))  # type: ignore[arg-type]
        plan = LaunchPlan(
            self.kernel(launch), launch.grid, launch.block, launch.parameters, tuple(placed), launch.shared, launch.cluster,
            dependent=launches_early(self.arch) and launch.waits != GRID, waits=launch.waits,
        )  # fmt: skip
        self.retained += [p.buffer for p in kept]
        self._add(op, plan, inputs, written, kind, attrs, reads, writes)

    def call(
        self,
        op: Op,
        operation: Operation,
        operands: Mapping[str, TensorView],
        kind: str,
        attrs: Mapping[str, Any],
        reads: Sequence[TensorView | None],
        writes: Sequence[TensorView | None],
    ) -> None:
        """Add a library call. ``operands``: name -> view, for the operation's operands. The rest is as for :meth:`emit`."""
        inputs, written = _buffers(reads, operands.values(), writes)
        number = {b: i for i, b in enumerate((*inputs, *written))}
        places = {name: (number[p.buffer], p.byte_offset) for name, p in operands.items()}
        self._add(op, LibraryCall(operation, places), inputs, written, kind, attrs, reads, writes)

    def _add(
        self, op: Op, launch: LaunchPlan | LibraryCall, inputs: Sequence[int], written: Sequence[int], kind: str,
        attrs: Mapping[str, Any], reads: Sequence[TensorView | None], writes: Sequence[TensorView | None],
    ) -> None:  # fmt: skip
        """Add a step on these buffers. A buffer that is read and written is an operand twice: as an input, and as an output."""
        read = {b: i for i, b in enumerate(inputs)}
        write = {b: len(inputs) + i for i, b in enumerate(written)}
        meaning = ReferenceOp(
            kind,
            attrs_to_plain(attrs),
            tuple(None if r is None else OperandView(read[r.buffer], r.offset, r.shape, r.strides) for r in reads),
            tuple(None if w is None else OperandView(write[w.buffer], w.offset, w.shape, w.strides) for w in writes),
        )
        step = CudaStep(launch, meaning)
        self.steps.append(Step("cuda", step.to_params(), tuple(inputs), tuple(written), tuple(sorted(op.src))))

    def credit(self, first: int, tactic: str) -> None:
        """Record ``tactic`` as the origin of the steps from number ``first`` on that have no origin yet."""
        for k in range(first, len(self.steps)):
            step = self.steps[k]
            if step.executor == "cuda" and "tactic" not in step.params:
                self.steps[k] = replace(step, params={**step.params, "tactic": tactic})

    def program(self, target: str, precision: str, inputs: Any, outputs: Any, meta: dict[str, Any]) -> Program:
        return Program(
            target=target, precision=precision, inputs=tuple(inputs), outputs=tuple(outputs), buffers=tuple(self.buffers),
            steps=tuple(self.steps), blobs=self.blobs, meta=meta, kernels=tuple(self.kernels),
            retained=tuple(self.retained),
        )  # fmt: skip


def _buffers(
    reads: Iterable[TensorView | None], touched: Iterable[TensorView], writes: Iterable[TensorView | None]
) -> tuple[list[int], list[int]]:
    """The buffers that a step reads, and the buffers that it writes. A buffer in ``touched`` only counts as read."""
    written = list(dict.fromkeys(w.buffer for w in writes if w is not None))
    read = dict.fromkeys(r.buffer for r in reads if r is not None)
    more = dict.fromkeys(p.buffer for p in touched if p.buffer not in written)
    return list(read | more), written


def products(b: Builder, op: Op) -> str:
    """The kernels' name for the element type of an operator's products."""
    dtype = summed_dtype(b.graph, op)
    return "tfloat32" if dtype == FP32 and has_tf32(op) else map_dtype(dtype)


def has_tf32(op: Op) -> bool:
    """Whether fp32 operands of the operator are rounded to tf32 before they are multiplied."""
    return getattr(op.attrs, "factors", "") == "tf32"


def map_dtype(dtype: DType) -> str:
    """The name of an element type in a tensor map."""
    return {FP16: "float16", BF16: "bfloat16"}.get(dtype, dtype.name)
