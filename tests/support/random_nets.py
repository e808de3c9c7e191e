"""Random networks: any order of the operators that passes rewrite, so that rules meet one another in ways nobody wrote down."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from optdnn.dim import DimLike, symbol
from optdnn.ir.graph import Graph, Value
from optdnn.ops.index import ConcatAttrs, PadAttrs, SplitAttrs
from optdnn.ops.pool import MaxPoolAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.shape import AxisAttrs, ReshapeAttrs, TransposeAttrs
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.ops.unary import AlphaAttrs, HardSigmoidAttrs, LeakyReluAttrs
from support.net import Net

MAX_ELEMENTS = 4096


def _ints(*values: int) -> np.ndarray:  # type: ignore[type-arg]
    return np.asarray(values, np.int64)


class _Maker:
    """Adds random ops to a net. Values keep a moderate size: results are not drowned by one large branch."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.n = Net(np.float64, seed)
        self.values: list[Value] = []

    def pick(self) -> Value:
        """A value, the later ones more often: networks are long."""
        weights = [1 + 3 * i for i in range(len(self.values))]
        return self.random.choices(self.values, weights)[0]

    def rank(self, x: Value) -> int:
        return len(self.n.dims(x))

    def static(self, x: Value, axis: int) -> int | None:
        d = self.n.dims(x)[axis]
        return d if isinstance(d, int) else None

    def constant(self, x: Value) -> Value | float:
        """A constant to combine with x: a number, one value per channel, per column, or per element of a row."""
        shape = self.n.dims(x)
        forms: list[tuple[int, ...]] = [(), (1,)]
        if len(shape) > 1 and isinstance(shape[1], int):
            forms += [(shape[1], *(1,) * (len(shape) - 2)), (1, shape[1], *(1,) * (len(shape) - 2))] * 2
        if isinstance(shape[-1], int):
            forms.append((shape[-1],))
        form = self.random.choice(forms)
        if self.random.random() < 0.15:
            return float(self.random.choice([0.0, 1.0, -1.0, 2.0]))
        return self.n.const(self.n.rng.uniform(0.5, 1.5, form) * self.random.choice([1, 1, -1]))

    def step(self) -> None:
        x = self.pick()
        rank = self.rank(x)
        options: list[Callable[[Value], Value | None]] = [
            self.unary,
            self.arithmetic,
            self.binary,
            self.shape,
            self.decomposed,
        ]
        if rank == 4:
            options += [self.conv, self.conv, self.norm, self.pool, self.image]
        if rank in (2, 3):
            options += [self.product]
        y = self.random.choice(options)(x)
        if y is not None:
            self.values.append(y)

    def unary(self, x: Value) -> Value:
        kinds = [
            "Relu",
            "Sigmoid",
            "Tanh",
            "Abs",
            "Neg",
            "LeakyRelu",
            "HardSigmoid",
            "HardSwish",
            "Swish",
            "Softplus",
            "Elu",
            "Identity",
        ]
        kind = self.random.choice(kinds)
        attrs = {"LeakyRelu": LeakyReluAttrs(0.1), "HardSigmoid": HardSigmoidAttrs(0.3, 0.4), "Swish": AlphaAttrs(1.0)}
        if self.random.random() < 0.25:
            low, high = sorted(self.random.uniform(-1, 2) for _ in range(2))
            bounds = self.random.choice([(low, high), (low,), (None, high), (0.0,), (0.0, 6.0)])
            return self.n.op("Clip", x, *bounds)
        return self.n.op(kind, x, attrs=attrs.get(kind))

    def arithmetic(self, x: Value) -> Value:
        kind = self.random.choice(["Add", "Sub", "Mul", "Div", "Max", "Min"])
        operands = [x, self.constant(x)]
        if kind != "Div" and self.random.random() < 0.4:
            operands.reverse()
        if kind == "Div" and isinstance(operands[1], float):
            operands[1] = 4.0
        return self.n.op(kind, *operands)

    def binary(self, x: Value) -> Value | None:
        same = [v for v in self.values if self.n.dims(v) == self.n.dims(x)]
        other = self.random.choice(same)
        if self.random.random() < 0.2 and self.rank(x) == 4 and self.static(x, 1) is not None:
            gate = self.n.op("Sigmoid", self.n.op("GlobalAveragePool", x))
            return self.n.op("Mul", *self.random.sample([x, gate], 2))
        kind = self.random.choice(["Add", "Add", "Sub", "Mul", "Sum", "Concat"])
        if kind == "Concat":
            y = self.n.op("Concat", x, other, attrs=ConcatAttrs(self.random.choice([-1, 1])))
            size = np.prod([d for d in self.n.dims(y) if isinstance(d, int)])
            return y if size < MAX_ELEMENTS else None
        if kind == "Mul":
            other = self.n.op("Tanh", other)
        return self.n.op(kind, *([x, other, x] if kind == "Sum" and self.random.random() < 0.3 else [x, other]))

    def conv(self, x: Value) -> Value | None:
        c, h, w = (self.static(x, i) for i in (1, 2, 3))
        if c is None or h is None or w is None or min(h, w) < 3 or h * w > 256:
            return None
        if self.random.random() < 0.15:
            return self.n.conv_transpose(x, 4, self.random.choice([2, 3]), bias=self.random.random() < 0.5)
        kernel = self.random.choice([1, 3])
        group = c if self.random.random() < 0.2 else 1
        y = self.n.conv(
            x,
            c if group > 1 else self.random.choice([c, 4, 6]),
            kernel,
            pads=self.random.choice([0, kernel // 2]),
            strides=self.random.choice([1, 1, 2]),
            group=group,
            bias=self.random.random() < 0.4,
        )
        return self.norm(y) if self.random.random() < 0.5 else y

    def norm(self, x: Value) -> Value | None:
        return None if self.static(x, 1) is None else self.n.bn(x)

    def pool(self, x: Value) -> Value | None:
        h, w = self.static(x, 2), self.static(x, 3)
        if h is None or w is None or min(h, w) < 4:
            return None
        pads = self.random.choice([0, 1])
        if self.random.random() < 0.5:
            if self.random.random() < 0.3:
                attrs = MaxPoolAttrs((2, 2), (2, 2), (0,) * 4, (1, 1), indices=True)
                return self.n.op("MaxPool", x, attrs=attrs, outputs=2)[0]
            return self.n.max_pool(x, 3, pads=pads, strides=self.random.choice([1, 2]))
        return self.n.average_pool(x, 3, pads=pads, include_pad=self.random.random() < 0.5)

    def image(self, x: Value) -> Value | None:
        if self.random.random() < 0.4:
            kind = self.random.choice(["ReduceMean", "ReduceMax", "ReduceSum"])
            axes = self.random.choice([(2, 3), (2, 3), (-1,), (1, 2), (1,)])
            return self.n.op(kind, x, _ints(*axes), attrs=ReduceAttrs(self.random.random() < 0.6))
        pads = [
            0,
            0,
            *(self.random.choice([0, 1]) for _ in range(2)),
            0,
            0,
            *(self.random.choice([0, 1]) for _ in range(2)),
        ]
        return self.n.op("Pad", x, _ints(*pads), self.random.choice([None, 0.0, -0.5]), attrs=PadAttrs())

    def shape(self, x: Value) -> Value | None:
        rank, dims = self.rank(x), self.n.dims(x)
        choice = self.random.random()
        if choice < 0.45 and rank > 1:
            perms = {2: [(1, 0)], 3: [(0, 2, 1)], 4: [(0, 2, 3, 1), (0, 3, 1, 2), (0, 1, 3, 2)]}.get(rank)
            return None if perms is None else self.n.op("Transpose", x, attrs=TransposeAttrs(self.random.choice(perms)))
        if choice < 0.6:
            return self.n.op("Flatten", x, attrs=AxisAttrs(1)) if rank > 2 else self.n.op("Unsqueeze", x, _ints(1))
        if choice < 0.75 and 1 in dims[1:]:
            return self.n.op("Squeeze", x, _ints(dims.index(1, 1)))
        if choice < 0.9 and rank > 1:
            batch = self.n.op("Gather", self.n.op("Shape", x), _ints(0))
            rest = [d for d in dims[1:] if isinstance(d, int)]
            if len(rest) != rank - 1:
                return None
            target = self.random.choice([[int(np.prod(rest))], [rest[0], int(np.prod(rest[1:]))]])
            shape = self.n.op("Concat", batch, _ints(*target), attrs=ConcatAttrs(0))
            return self.n.op("Reshape", x, shape, attrs=ReshapeAttrs())
        c = self.static(x, 1) if rank > 1 else None
        if c is None or c % 2:
            return None
        return self.n.op("Split", x, attrs=SplitAttrs(1, 2), outputs=2)[self.random.randrange(2)]

    def decomposed(self, x: Value) -> Value:
        """What exporters write out: SiLU, GELU, hard swish, a softmax, a power."""
        n, choice = self.n, self.random.randrange(5)
        if choice == 0:
            return n.op("Mul", x, n.op("Sigmoid", x))
        if choice == 1:
            return n.op("Mul", n.op("Mul", x, n.op("Add", n.op("Erf", n.op("Div", x, 2**0.5)), 1.0)), 0.5)
        if choice == 2:
            return n.op("Div", n.op("Mul", x, n.op("Min", n.op("Relu", n.op("Add", x, 3.0)), 6.0)), 6.0)
        if choice == 3:
            return n.op("Softmax", x, attrs=SoftmaxAttrs(-1))
        return n.op("Pow", n.op("Tanh", x), self.random.choice([1.0, 2.0, 3.0]))

    def product(self, x: Value) -> Value | None:
        k = self.static(x, -1)
        if k is None or k > 256:
            return None
        if self.rank(x) == 2 and self.random.random() < 0.5:
            return self.n.gemm(x, 6, bias=self.random.random() < 0.6, trans_b=self.random.random() < 0.5, alpha=0.5)
        y = self.n.matmul(x, 6)
        return self.n.op("Add", y, self.n.random(6)) if self.random.random() < 0.6 else y


def random_network(seed: int, steps: int = 24) -> Graph:
    """A network of about ``steps`` random ops; half of the seeds have a symbolic batch "n". Unread values are outputs."""
    m = _Maker(seed)
    batch: DimLike = symbol("n") if seed % 2 else 2
    m.values = [m.n.input(batch, 4, 8, 8)]
    if seed % 3 == 0:
        m.values.append(m.n.input(batch, 4, 8, 8, name="z"))
    while m.n.count < steps:
        m.step()
    used = [v for v in m.values if m.n.graph.uses(v)]
    loose = [v for v in m.values if v not in used]
    return m.n.done(*(loose or m.values[-1:]))
