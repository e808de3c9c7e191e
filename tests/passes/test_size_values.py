"""follows_from_sizes: values that are constants at given sizes."""

from __future__ import annotations

from support.net import Net

from optdnn.dim import symbol
from optdnn.ir.graph import Value
from optdnn.passes.support.size_values import follows_from_sizes


def test_values_of_sizes_and_constants() -> None:
    n = Net()
    x = n.input(2, symbol("n"))
    sizes = n.op("Shape", x)
    positions = n.op("Mul", n.op("Size", x), sizes)
    mixed = n.op("Reshape", x, sizes)
    graph = n.done(positions, mixed)
    assert follows_from_sizes(graph, sizes)
    assert follows_from_sizes(graph, positions)
    assert not follows_from_sizes(graph, x)
    assert not follows_from_sizes(graph, mixed)


def test_a_value_that_takes_many_operators() -> None:
    def chain(count: int) -> tuple[Net, Value]:
        n = Net()
        y = n.op("Shape", n.input(2, symbol("n")))
        for _ in range(count):
            y = n.op("Neg", y)
        return n, y

    for count, found in ((250, True), (260, False)):
        n, y = chain(count)
        assert follows_from_sizes(n.done(y), y) is found
