"""The sizes of a network's profiles, and whether the network takes them. An error says which sizes it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from optdnn.dim import DimLike, evaluate
from optdnn.dim_text import lone
from optdnn.errors import OptdnnError
from optdnn.ir.bound import bound, has_bodies
from optdnn.ir.graph import Graph
from optdnn.ranges import DimRange, Profile
from optdnn.shapes.plan_sizes import working

Shapes = dict[str, tuple[int, ...]]

OPTIMUM_AND_ENDS = ("opt", "max", "min")


def check_profiles(graph: Graph) -> None:
    """Check that a network takes the optimum and both ends of its profiles. Targets whose programs take all sizes need it:
    their libraries would report the error only when such an input runs.

    A profile with a dimension that is left open is not checked: there is no size to try. Nor is a graph with bodies
    (:func:`optdnn.ir.bound.bound` does not take it). Raises ShapeError, with sizes that the network takes.
    """
    shapes_given = [graph.op(i).outputs[0].type.shape for i in graph.inputs]
    if has_bodies(graph) or None in shapes_given:
        return
    symbols = {name for shape in shapes_given for d in shape or () if (name := lone(d)) is not None}
    for k, profile in enumerate(graph.profiles):
        if not symbols <= profile.keys():
            continue
        for which in OPTIMUM_AND_ENDS:
            shapes = sized(graph, profile, which)
            with located(graph, k, shapes, partial(bound, graph)):
                bound(graph, shapes)


@contextmanager
def located(symbolic: Graph, k: int, shapes: Shapes, fits: Callable[[Shapes], object]) -> Iterator[None]:
    """An error in a ``with`` block of this names the profile ``k``, the sizes, and sizes that the network takes: those for which
    ``fits`` raises no OptdnnError."""
    try:
        yield
    except OptdnnError as error:
        error.message = f"profile {k}, at {shown(shapes)}: {error.message}"
        error.hint = error.hint or _better_sizes(symbolic, symbolic.profiles[k], fits)
        error.args = (error.message,)
        raise


def _better_sizes(symbolic: Graph, profile: Profile, fits: Callable[[Shapes], object]) -> str | None:
    """A hint at ranges that the network takes; None where it takes the given ones, as far as shapes go."""

    def taken(sizes: Mapping[str, int]) -> None:
        fits(_shapes(symbolic, sizes))

    found = working(profile, taken)
    if found == profile:
        return None
    if found is None:
        return "give sizes that the model takes: --shape NAME=MIN..OPT..MAX for each dimension that varies"
    ports = [symbolic.op(i).outputs[0] for i in symbolic.inputs]
    given = [f"--shape {p.name}={shape_text(p.type.dims, lambda name: range_text(found[name]))}" for p in ports]
    return "the model takes " + " ".join(given)


def shape_text(shape: Sequence[DimLike], range_of: Callable[[str], str]) -> str:
    """A shape in the syntax of ``--shape``. ``range_of`` gives the text of a symbol; ? is a size that follows from others."""

    def text(d: DimLike) -> str:
        if isinstance(d, int):
            return str(d)
        name = lone(d)
        return "?" if name is None else range_of(name)

    return "x".join(map(text, shape)) or "scalar"


def range_text(r: DimRange) -> str:
    """A range in the syntax of ``--shape``."""
    return str(r.opt) if r.min == r.max else str(r)


def shown(shapes: Mapping[str, Sequence[int]]) -> str:
    """Shapes as errors and progress name them."""
    return ", ".join(f"{name}={'x'.join(map(str, dims)) or 'scalar'}" for name, dims in shapes.items())


def sized(graph: Graph, profile: Profile, which: str) -> Shapes:
    """The shapes of the inputs at the "opt", "min" or "max" of a profile with a range for each dimension."""
    return _shapes(graph, {name: getattr(r, which) for name, r in profile.items()})


def _shapes(graph: Graph, sizes: Mapping[str, int]) -> Shapes:
    ports = [graph.op(i).outputs[0] for i in graph.inputs]
    return {p.name: tuple(evaluate(d, sizes) for d in p.type.dims) for p in ports}
