"""bounded_keys: attention to the tokens that a mask selects; refusals; and the whole of it on a GPU's program."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched, from_text
from support.simulated import check_simulated

from optdnn.ir.evaluate import evaluate
from optdnn.passes.base import PassContext
from optdnn.passes.masked_rows import MaskedRows
from optdnn.passes.pad_rows import PadRows
from optdnn.passes.rules import bounded_keys

GPU = PassContext(target="cuda:sm_90a")
TEXT = """<ir_version: 10, opset_import: ["": 18]>
g (float[1,2,5,8] video, float[1,2,6,8] words, bool[6] mask, float[1,2,4,8] queries) => (OUTPUTS)
<int64[1] flat = {-1}, float half = {0.5}, int64[6] begins = {0, 0, 0, 0, 0, 0},
 int64[1] none = {0}, int64[1] all = {11}, int64[3] folded = {2, -1, 8}>
{ chosen = NonZero(mask) i = Reshape(chosen, flat) part = Gather<axis = 2>(words, i)
  tokens = Concat<axis = 2>(video, part)
"""
TAIL = """scores = MatMul(q, kt) SCALE p = Softmax<axis = -1>(scaled) y = MatMul(p, v) }"""
KEYS = "sized = Reshape(k, folded) turned = Transpose<perm = [0, 2, 1]>(sized) kt = Unsqueeze(turned, none)"


def text(
    *, q: str = "q = Identity(queries)", k: str = "k = Sin(tokens)", v: str = "v = Cos(tokens)", keys: str = KEYS,
    scale: str = "scaled = Mul(scores, half)", outputs: str = "float[1,2,4,8] y", rest: str = "",
) -> str:  # fmt: skip
    tail = TAIL.replace("SCALE", scale)
    return TEXT.replace("OUTPUTS", outputs) + "\n".join((q, k, v, keys, tail.replace("}", rest + "}")))


SELF = {"q": "q = Tanh(tokens)", "outputs": "float[1,2,n,8] y"}


@pytest.mark.parametrize(
    "given",
    [{}, {"scale": "scaled = Identity(scores)"}, SELF, {"k": "k = Identity(tokens)", "v": "v = Identity(tokens)"}],
    ids=["scaled", "plain", "of itself", "one tensor"],
)
def test_all_keys_have_a_mask(given: dict[str, str]) -> None:
    done, _ = check_pass(MaskedRows(), text(**given), changes=1, rules={"bounded_keys": 1}, context=GPU)
    kinds = done.kinds()
    assert (kinds["Less"], kinds["Where"], kinds["Softmax"], kinds["MatMul"]) == (1, 1, 1, 2)
    (softmax,) = done.of_kind("Softmax")
    assert softmax.outputs[0].type.dims[-1] == 11
    assert all(
        op.inputs[0] is not None and "part" in done.op(op.inputs[0]).outputs[0].name for op in done.of_kind("Pad")
    )


@pytest.mark.parametrize("given", [{}, SELF], ids=["cross", "self"])
@pytest.mark.parametrize("count", [0, 1, 6])
def test_any_number_of_keys(given: dict[str, str], count: int) -> None:
    graph, rng = from_text(text(**given)), np.random.default_rng(0)
    after = graph.copy()
    MaskedRows()(after, GPU)
    PadRows()(after, GPU)
    feeds = {op.outputs[0].name: rng.standard_normal(op.outputs[0].type.static_shape) for op in graph.of_kind("Input")}
    feeds = {name: a.astype(np.float32) for name, a in feeds.items()}
    feeds["mask"] = rng.permutation(np.arange(6) < count)
    np.testing.assert_allclose(evaluate(after, feeds)["y"], evaluate(graph, feeds)["y"], atol=1e-5)


@pytest.mark.parametrize("given", [{}, SELF], ids=["cross", "self"])
def test_attention_runs_on_the_gpu(given: dict[str, str]) -> None:
    """A scatter finds the positions, which are repeated up to the largest number. Nothing runs on the processor."""
    if given:
        given = {**SELF, "outputs": "float[1,2,11,8] z", "rest": FILLED}
    program = check_simulated(from_text(text(**given)), "fp32")
    assert not [s.params["kind"] for s in program.steps if s.executor == "host"]


FILLED = """ n = Shape<start = 2, end = 3>(y) left = Sub(all, n) pads = Concat<axis = 0>(begins, left, none) z = Pad(y, pads)"""


def test_queries_beside_known_rows_are_not_copied() -> None:
    """The rows of a Concat of known rows and selected ones are the first ones of a Concat of known rows and all others."""
    graph = from_text(text(**{**SELF, "outputs": "float[1,2,11,8] z", "rest": FILLED}))
    MaskedRows()(graph, GPU)
    report = PadRows()(graph, GPU)
    assert report.changes == 2
    assert {op.outputs[0].type.dims[2] for op in graph.of_kind("Concat") if len(op.outputs[0].type.dims) == 4} == {11}


@pytest.mark.parametrize(
    ("given", "because"),
    [
        ({"k": "k = Sin(part)", "v": "v = Cos(part)"}, "there may be no key"),
        ({"scale": "e = Exp(scores) scaled = Mul(e, scores)"}, "the scores are no product"),
        (
            {"scale": "scaled = Mul(scores, half) z = Exp(scores)", "outputs": "float[1,2,4,8] y, float[1,2,4,n] z"},
            "no product",
        ),
        (
            {"scale": "numbers = Shape(scores) r = Expand(half, numbers) scaled = Mul(scores, r)"},
            "the scores are no product",
        ),
    ],
    ids=["no key", "read twice", "read outside", "numbers for each key"],
)
def test_what_is_refused(given: dict[str, str], because: str) -> None:
    check_refused(MaskedRows(), text(**given), because=because, context=GPU)


def test_too_many_keys_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_keys, "MOST_BYTES", 2 * 4 * 11 * 4 - 1)
    check_refused(MaskedRows(), text(), because="would take too much memory", context=GPU)


@pytest.mark.parametrize(
    "given",
    [
        {"scale": "scaled = Mul(scores, half) z = Exp(p)", "outputs": "float[1,2,4,8] y, float[1,2,4,n] z"},
        {"k": "k = Sin(video)", "v": "v = Cos(video)"},
    ],
    ids=["weights are read", "a known number"],
)
def test_what_is_no_candidate(given: dict[str, str]) -> None:
    check_untouched(MaskedRows(), text(**given), GPU)
