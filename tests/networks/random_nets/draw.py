"""The builder of random networks: nodes, constants and inputs, all drawn from one seed.

Only PCG64's raw output is used, which NumPy keeps stable between its versions; its distributions may change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TypeProto, defs, helper, numpy_helper, shape_inference

Array = NDArray[Any]
T = TypeVar("T")
OPSETS = (13, 14, 15, 16, 17, 17, 18, 18, 19, 20, 20, 21, 21, 22, 23, 23)
MAX_ELEMENTS = 6000
"""No step makes a value with more elements larger."""
F32, I64, I32, BOOL = (np.dtype(t) for t in ("float32", "int64", "int32", "bool"))


class Random:
    """Numbers from one PCG64 stream, the same on every machine and for every version of NumPy."""

    def __init__(self, seed: int):
        self._bits = np.random.Generator(np.random.PCG64(seed)).bit_generator

    def unit(self, count: int) -> NDArray[np.float64]:
        """``count`` numbers in 0 .. 1 (1 not included)."""
        raw = np.asarray(self._bits.random_raw(count), np.uint64)
        return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def below(self, n: int) -> int:
        return int(self.unit(1)[0] * n)

    def between(self, low: int, high: int) -> int:
        """An integer; both ends are included."""
        return low + self.below(high - low + 1)

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * float(self.unit(1)[0])

    def chance(self, p: float) -> bool:
        return bool(self.unit(1)[0] < p)

    def choice(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def shuffled(self, options: Sequence[T]) -> list[T]:
        return [options[i] for i in np.argsort(self.unit(len(options)), kind="stable")]

    def array(self, dtype: Any, shape: Sequence[int], low: float, high: float) -> Array:
        """Uniform numbers. Integers include both ends; bool is True for half of the elements."""
        u = self.unit(math.prod(shape)).reshape(shape)
        dtype = np.dtype(dtype)
        if dtype == BOOL:
            return np.asarray(u < 0.5)
        if dtype.kind in "iu":
            return np.asarray(np.floor(low + u * (high - low + 1))).astype(dtype)
        return np.asarray(low + u * (high - low)).astype(dtype)


@dataclass(frozen=True)
class Value:
    """A tensor of the network. A dimension is a number, the name of a symbol, or "?…" if it depends on data."""

    name: str
    dtype: np.dtype[Any]
    dims: tuple[int | str, ...]

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def static(self) -> bool:
        return all(isinstance(d, int) for d in self.dims)

    @property
    def known(self) -> bool:
        """No dimension depends on data, or on shapes that inference cannot follow."""
        return not any(isinstance(d, str) and d.startswith("?") for d in self.dims)

    @property
    def shape(self) -> tuple[int, ...]:
        assert self.static, self
        return tuple(d for d in self.dims if isinstance(d, int))

    @property
    def size(self) -> int:
        """The number of elements; a symbol counts as 4."""
        return math.prod(d if isinstance(d, int) else 4 for d in self.dims)

    @property
    def is_float(self) -> bool:
        return self.dtype.kind == "f"


@dataclass(frozen=True)
class Feed:
    """An input of the network and the range of its random data."""

    value: Value
    low: float
    high: float
    upto: str = ""
    """The symbol that bounds the data: lengths of sequences."""
    turns: tuple[float, ...] = ()
    """The data of the first, second, … run: numbers of iterations, or thresholds that select some or none."""


@dataclass(frozen=True)
class Network:
    """A drawn network: its model, and its inputs for each of its sizes."""

    name: str
    model: onnx.ModelProto
    feeds: tuple[dict[str, Array], ...]
    sizes: tuple[dict[str, int], ...] = ()
    """The sizes of the symbols, for each entry of ``feeds``."""


@dataclass
class Draw:
    """Adds nodes to a network. Types of results come from ONNX's own inference."""

    seed: int
    family: str
    opset: int = 0
    random: Random = field(init=False)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    inputs: list[Feed] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    """Values that later steps may read."""
    count: int = 0

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.opset = self.opset or self.random.choice(OPSETS)
        self._types: dict[str, TypeProto] = {}
        self._data: dict[str, onnx.TensorProto] = {}

    # ------------------------------------------------------------ values

    def fresh(self, prefix: str = "v") -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def input(
        self,
        dims: Sequence[int | str],
        dtype: Any = F32,
        low: float = -1.7,
        high: float = 1.7,
        upto: str = "",
        turns: Sequence[float] = (),
    ) -> Value:
        v = Value(f"x{len(self.inputs)}", np.dtype(dtype), tuple(dims))
        self.inputs.append(Feed(v, low, high, upto, tuple(turns)))
        self._note(v)
        return v

    def const(self, array: Any, dtype: Any = None) -> Value:
        array = np.asarray(array, dtype)
        v = Value(self.fresh("c"), array.dtype, array.shape)
        tensor = numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), v.name)
        self.constants.append(tensor)
        self._note(v)
        if array.size < 64:
            self._data[v.name] = tensor
        return v

    def ints(self, *values: int) -> Value:
        return self.const(values, np.int64)

    def weights(self, *shape: int, fan_in: int = 1, offset: float = 0.0) -> Value:
        """Uniform numbers of variance 1 / fan_in around ``offset``."""
        high = math.sqrt(3 / max(1, fan_in))
        return self.const(self.random.array(np.float32, shape, offset - high, offset + high))

    def positive(self, *shape: int) -> Value:
        return self.const(self.random.array(np.float32, shape, 0.5, 1.5))

    def scalar(self, value: float, dtype: Any = np.float32) -> Value:
        return self.const(np.asarray(value, dtype))

    def _note(self, v: Value) -> None:
        dims = [None if isinstance(d, str) and d.startswith("?") else d for d in v.dims]
        self._types[v.name] = helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(v.dtype), dims)

    # ------------------------------------------------------------ nodes

    def op(self, kind: str, *inputs: Value | None, **attrs: Any) -> Value:
        """Add a node with one result."""
        return self.ops(kind, *inputs, outputs=1, **attrs)[0]

    def ops(
        self, kind: str, *inputs: Value | None, outputs: int, absent: Sequence[int] = (), **attrs: Any
    ) -> list[Value]:
        """Add a node with several results. Those in ``absent`` have no name. Attributes that are None are left out."""
        names = ["" if i in absent else self.fresh() for i in range(outputs)]
        given = {k: a for k, a in attrs.items() if a is not None}
        node = helper.make_node(
            kind, ["" if v is None else v.name for v in inputs], names, name=f"{kind}_{self.count}", **given
        )
        schema = defs.get_schema(kind, self.opset, "")
        read = [v.name for v in inputs if v is not None]
        types = {n: self._types[n] for n in read}
        data = {n: self._data[n] for n in read if n in self._data}
        found = shape_inference.infer_node_outputs(
            schema, node, types, data, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10
        )
        self.nodes.append(node)
        return [self._result(n, found.get(n)) for n in names if n]

    def typed(
        self, kind: str, inputs: Sequence[Value | None], types: Sequence[tuple[Any, Sequence[int | str]]], **attrs: Any
    ) -> list[Value]:
        """Add a node with given types of its results, which inference cannot find (control flow, data-dependent sizes)."""
        made = [Value(self.fresh(), np.dtype(t), tuple(dims)) for t, dims in types]
        read = ["" if v is None else v.name for v in inputs]
        self.nodes.append(helper.make_node(kind, read, [v.name for v in made], name=f"{kind}_{self.count}", **attrs))
        for v in made:
            self._note(v)
        return made

    def _result(self, name: str, found: TypeProto | None) -> Value:
        assert found is not None, name
        tensor = found.tensor_type
        assert tensor.HasField("shape"), f"no rank inferred for {name}: {self.nodes[-1].op_type}"
        dims: list[int | str] = []
        for d in tensor.shape.dim:
            dims.append(d.dim_value if d.HasField("dim_value") else d.dim_param or f"?{self.fresh('d')}")
        v = Value(name, np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type)), tuple(dims))
        self._note(v)
        return v

    def known_as(self, v: Value, dims: Sequence[int | str]) -> Value:
        """The same value with dimensions that the caller knows."""
        known = Value(v.name, v.dtype, tuple(dims))
        self._note(known)
        return known

    # ------------------------------------------------------------ picking

    def pick(self, wanted: Callable[[Value], bool] = lambda v: True) -> Value | None:
        """A value to read, later ones more often. None if none fits."""
        fit = [v for v in self.values if wanted(v)]
        if not fit:
            return None
        return fit[int(len(fit) * self.random.uniform(0, 1) ** 0.4)] if len(fit) > 1 else fit[0]

    def body(self) -> Draw:
        """A builder for a subgraph, with the same numbers, names and types, and its own nodes."""
        inner = Draw(self.seed, self.family, self.opset)
        inner.random, inner.count, inner.constants = self.random, self.count + 1, self.constants
        inner._types, inner._data = self._types, self._data
        return inner

    def subgraph(self, inner: Draw, inputs: Sequence[Value], outputs: Sequence[Value]) -> onnx.GraphProto:
        """The graph of a body of :meth:`body`. Its constants belong to the network."""
        self.count = inner.count
        made = []
        for v in (
            outputs
        ):  # each output is the result of a node in the body: a name may neither come from outside nor occur twice
            made.append(inner.op("Identity", v))
        self.count = inner.count
        return helper.make_graph(inner.nodes, self.fresh("body"), [_info(v) for v in inputs], [_info(v) for v in made])

    def local(self, dtype: Any, dims: Sequence[int | str]) -> Value:
        """An input of a subgraph."""
        v = Value(self.fresh("b"), np.dtype(dtype), tuple(dims))
        self._note(v)
        return v

    def keep(self, *made: Value | None) -> None:
        self.values += [v for v in made if v is not None]

    # ------------------------------------------------------------ the finished network

    def model(self, most_outputs: int = 5) -> onnx.ModelProto:
        """The model. Unread values are its outputs, sometimes with one that is also read. Nodes without an effect are dropped."""
        inputs = [f.value for f in self.inputs]
        if all(v in inputs for v in self.values):
            x = inputs[0]
            self.keep(self.op("Tanh", x) if x.is_float else self.op("Identity", x))
        read = {n for node in self.nodes for n in reads_of(node)}
        made = [v for v in self.values if v not in inputs]
        loose = [v for v in made if v.name not in read]
        outputs = loose[-most_outputs:] or made[-1:]
        others = [v for v in made if v not in outputs and v.name in read]
        if others and self.random.chance(0.25):
            outputs.append(self.random.choice(others))
        nodes = needed_nodes(self.nodes, {v.name for v in outputs})
        used = {n for node in nodes for n in reads_of(node)} | {v.name for v in outputs}
        self.inputs = [f for f in self.inputs if f.value.name in used]
        graph = helper.make_graph(
            nodes,
            f"{self.family}-{self.seed}",
            [_info(f.value) for f in self.inputs],
            [_info(v) for v in dict.fromkeys(outputs)],
            [t for t in self.constants if t.name in used],
        )
        ir = 8 if self.opset < 19 else 9 if self.opset < 21 else 10
        others = sorted({node.domain for node in nodes} - {""})
        opsets = [helper.make_opsetid("", self.opset), *(helper.make_opsetid(domain, 1) for domain in others)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=ir, producer_name="random_nets")

    def feeds(self, sizes: dict[str, int], index: int = 0) -> dict[str, Array]:
        """Random data for every input at these sizes of the symbols. Each ``index`` has other data."""
        random = Random(self.seed * 1000 + 17 + index)
        made: dict[str, Array] = {}
        for f in self.inputs:
            shape = [d if isinstance(d, int) else sizes[d] for d in f.value.dims]
            high = sizes[f.upto] if f.upto else f.high
            array = random.array(f.value.dtype, shape, f.low, high)
            if f.turns:
                array = np.full(shape, f.turns[index % len(f.turns)], f.value.dtype)
            made[f.value.name] = array
        return made


def _info(v: Value) -> onnx.ValueInfoProto:
    dims = [None if isinstance(d, str) and d.startswith("?") else d for d in v.dims]
    return helper.make_tensor_value_info(v.name, helper.np_dtype_to_tensor_dtype(v.dtype), dims)


def reads_of(node: onnx.NodeProto) -> set[str]:
    """The names that a node reads, including those in its subgraphs."""
    read = {n for n in node.input if n}
    for a in node.attribute:
        if a.type == onnx.AttributeProto.GRAPH:
            read |= {n for inner in a.g.node for n in reads_of(inner)} | {o.name for o in a.g.output}
    return read


def needed_nodes(nodes: Sequence[onnx.NodeProto], wanted: set[str]) -> list[onnx.NodeProto]:
    needed = set(wanted)
    kept = []
    for node in reversed(nodes):
        if needed & set(node.output):
            needed |= reads_of(node)
            kept.append(node)
    return kept[::-1]
