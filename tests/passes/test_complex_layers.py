"""complex_layers: the four real layers of a complex one, and sums of layers that stay as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.dim import symbol
from optdnn.ir.graph import Graph, Value
from optdnn.ops.conv import ConvAttrs, ConvTransposeAttrs
from optdnn.ops.gemm import GemmAttrs
from optdnn.passes.complex_layers import ComplexLayers

KINDS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


class Layer:
    """A real layer of 3 channels to 4, applied to any value."""

    def __init__(self, n: Net, kind: str, bias: bool = True, group: int = 1):
        self.n, self.kind = n, kind
        shape = {"Conv": (4, 3 // group, 3, 3), "ConvTranspose": (3, 4, 3, 3), "Gemm": (4, 3), "MatMul": (3, 4)}[kind]
        self.weight, self.bias = n.random(*shape), n.random(4) if bias else None
        pads, ones = (1,) * 4, (1, 1)
        self.attrs: Any = {
            "Conv": ConvAttrs(strides=ones, pads=pads, dilations=ones, group=group),
            "ConvTranspose": ConvTransposeAttrs(strides=ones, pads=pads, dilations=ones, output_padding=(0, 0)),
            "Gemm": GemmAttrs(transB=True),
        }.get(kind)

    def __call__(self, x: Value) -> Value:
        n, bias = self.n, [] if self.bias is None else [self.bias]
        if self.kind != "MatMul":
            return n.op(self.kind, x, self.weight, *bias, attrs=self.attrs)
        y = n.op("MatMul", x, self.weight)
        return n.op("Add", y, *bias) if bias else y


def parts(n: Net, kind: str, batch: Any = 2) -> tuple[Value, Value]:
    shape = {"Gemm": (batch, 3), "MatMul": (batch, 5, 3)}.get(kind, (batch, 3, 6, 6))
    return n.input(*shape, name="a"), n.input(*shape, name="b")


def complex_layer(n: Net, kind: str, *, turned: bool = False, bias: tuple[bool, bool] = (True, True)) -> Graph:
    a, b = parts(n, kind)
    r, i = (Layer(n, kind, one) for one in bias)
    real, imaginary = n.op("Sub", r(a), i(b)), n.op("Add", *((i(a), r(b)) if turned else (r(b), i(a))))
    return n.done(n.op("Tanh", real), n.op("Relu", imaginary))


@pytest.mark.parametrize("bias", [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_complex_layer(kind: str, turned: bool, bias: tuple[bool, bool]) -> None:
    graph = complex_layer(Net(np.float64), kind, turned=turned, bias=bias)
    kinds = {"Concat": 1, kind: 1, "Split": 1, "Tanh": 1, "Relu": 1}
    kinds |= {"Add": 1} if kind == "MatMul" and any(bias) else {}
    after, _ = check_pass(ComplexLayers(), graph, changes=1, kinds=kinds)
    assert [o.type.dims[-1 if kind in ("Gemm", "MatMul") else 1] for o in after.of_kind("Split")[0].outputs] == [4, 4]


def test_a_conjugated_layer_of_any_batch() -> None:
    n = Net(np.float64)
    a, b = parts(n, "Conv", symbol("N", 1))
    r, i = Layer(n, "Conv"), Layer(n, "Conv")
    graph = n.done(n.op("Add", r(a), i(b)), n.op("Sub", r(b), i(a)))
    check_pass(ComplexLayers(), graph, changes=1, kinds={"Concat": 1, "Conv": 1, "Split": 1}, sizes={"N": 2})


def test_layers_with_other_weights_are_refused() -> None:
    n = Net(np.float64)
    a, b = parts(n, "Gemm")
    p, q, r, s = (Layer(n, "Gemm") for _ in range(4))
    graph = n.done(n.op("Add", p(a), q(b)), n.op("Add", r(a), s(b)))
    check_refused(ComplexLayers(), graph, because="other weights than those of the other value")


def test_one_sum_is_refused() -> None:
    n = Net(np.float64)
    a, b = parts(n, "Conv")
    graph = n.done(n.op("Sub", Layer(n, "Conv")(a), Layer(n, "Conv")(b)))
    check_refused(ComplexLayers(), graph, because="no other sum")


def test_values_of_other_types_are_refused() -> None:
    n = Net(np.float64)
    a, b = n.input(2, 3, name="a"), n.input(1, 3, name="b")
    layers = [Layer(n, "Gemm") for _ in range(2)]
    check_untouched(ComplexLayers(), n.done(*(n.op("Add", r(a), i(b)) for r, i in (layers, layers[::-1]))))
    n = Net(np.float64)
    a, b = n.input(2, 3, name="a"), n.input(2, 5, name="b")
    other = n.op("Gemm", b, n.random(4, 5), attrs=GemmAttrs(transB=True))
    check_refused(ComplexLayers(), n.done(n.op("Add", Layer(n, "Gemm")(a), other)), because="differ in geometry")


def test_grouped_convolutions_are_no_candidates() -> None:
    n = Net(np.float64)
    a, b = parts(n, "Conv")
    w = n.random(6, 1, 3, 3), n.random(6, 1, 3, 3)
    attrs = ConvAttrs(strides=(1, 1), pads=(1,) * 4, dilations=(1, 1), group=3)
    r, i = (lambda x, w=w[k]: n.op("Conv", x, w, attrs=attrs) for k in (0, 1))
    check_untouched(ComplexLayers(), n.done(n.op("Sub", r(a), i(b)), n.op("Add", r(b), i(a))))


def test_layers_that_others_read_are_no_candidates() -> None:
    n = Net(np.float64)
    a, b = parts(n, "Conv")
    r, i = Layer(n, "Conv"), Layer(n, "Conv")
    first = r(a)
    graph = n.done(n.op("Sub", first, i(b)), n.op("Tanh", first))
    check_untouched(ComplexLayers(), graph)
