"""counted_masks: masks up to the longest length get the size of what they mask; refusals."""

from __future__ import annotations

import pytest
from support.check import check_pass, check_refused, check_untouched, from_text
from support.simulated import check_simulated

from optdnn.passes.counted_masks import CountedMasks

CONSTANTS = """int64 zero = {0}, int64 one = {1}, int64 six = {6}, int64[1] two = {2}, int64[1] first = {0}, int64[1] last = {1},
    float minus = {-1000.0}, float nothing = {0.0}, float three = {3.0}, int64[2] flat = {2, 7}, int64[3] images = {1, 2, 7}"""

BROADCAST = "mask = Less(places, at) y = Where(mask, scores, minus)"
EXPANDED = """n1 = Unsqueeze(n, first) target = Concat<axis = 0>(two, n1) wide = Expand(places, target)
    mask = GreaterOrEqual(wide, at) y = Where(mask, minus, scores)"""
TURNED = "row = Unsqueeze(places, first) mask = Less(row, at) y = Where(mask, scores, minus)"
RESHAPED = """mask = GreaterOrEqual(places, at) addend = Where(mask, minus, nothing) whole = Reshape(addend, flat)
    y = Add(scores, whole)"""


def masked(
    rest: str, *, start: str = "zero", step: str = "one", level: float = -1000.0, outputs: str = "", source: str = ""
) -> str:
    """Scores of 2 rows, whose positions from a length on are masked. ``rest`` computes y from ``places`` and ``at``, the lengths.

    The limit n of the range is 7 if a number exceeds ``level``, else 1. ``source``: another range of places.
    """
    limit = """hot = Greater(numbers, level) ones = Cast<to = 7>(hot) most = ReduceMax<keepdims = 0>(ones)
        more = Mul(most, six) n = Add(more, one)"""
    return f"""<ir_version: 9, opset_import: ["": 17]>
    g (float[2,1] numbers, float[2,7] scores) => (float[2,7] y{outputs}) <{CONSTANTS}, float level = {{{level}}}>
    {{ {limit} lengths = Mul(numbers, three) at = Cast<to = 7>(lengths)
       {source or f"places = Range({start}, n, {step})"} {rest} }}"""


@pytest.mark.parametrize(
    "rest", [BROADCAST, EXPANDED, TURNED, RESHAPED], ids=["broadcast", "expand", "unsqueeze", "reshape"]
)
def test_a_mask_gets_the_size_of_what_it_masks(rest: str) -> None:
    graph, _ = check_pass(CountedMasks(), masked(rest), changes=1, rules={"counted_mask": 1})
    assert not graph.of_kind("Range")
    assert all(output.type.is_static for op in graph.ops() for output in op.outputs)


@pytest.mark.parametrize("rest", [BROADCAST, EXPANDED, TURNED], ids=["broadcast", "expand", "unsqueeze"])
def test_every_position_reads_a_range_of_one_element(rest: str) -> None:
    check_pass(CountedMasks(), masked(rest, level=1000.0), changes=1)


def test_nothing_is_left_on_the_cpu() -> None:
    program = check_simulated(from_text(masked(EXPANDED)), tolerance=1e-5)
    assert not program.meta["host"]["operators"]


SHAPE_READ = "size = Shape(places) y = Relu(scores)"
OTHER_TARGET = """m = Unsqueeze(most, first) target = Concat<axis = 0>(two, m) wide = Expand(places, target)
    mask = Less(wide, at) y = Where(mask, scores, minus)"""
OTHER_AXIS = """n1 = Unsqueeze(n, first) seven = Add(six, one) s1 = Unsqueeze(seven, first) target = Concat<axis = 0>(n1, s1)
    wide = Expand(places, target) mask = Less(wide, at) y = Where(mask, scores, minus)"""
TWO_SIZES = BROADCAST + " part = Slice(scores, first, two, last) z = Where(mask, part, minus)"


@pytest.mark.parametrize(
    ("rest", "outputs", "because"),
    [
        (SHAPE_READ, ", int64[1] size", "reads it, whose result has no known size"),
        (OTHER_TARGET, "", "reads it, whose result has no known size"),
        (OTHER_AXIS, "", "reads it, whose result has no known size"),
        (TWO_SIZES, ", float[2,2] z", "do not ask for one known size"),
    ],
    ids=["its size is read", "another target", "another axis", "two sizes"],
)
def test_refusals(rest: str, outputs: str, because: str) -> None:
    check_refused(CountedMasks(), masked(rest, outputs=outputs), because=because)


@pytest.mark.parametrize(
    "text",
    [
        masked(BROADCAST, start="one"),
        masked(BROADCAST, step="six"),
        masked(
            "mask = Less(places, at) y = Where(mask, scores, minus)",
            source="seven = Add(six, one) places = Range(zero, seven, one)",
        ),
    ],
    ids=["another start", "another step", "a known size"],
)
def test_others_stay(text: str) -> None:
    check_untouched(CountedMasks(), text)
