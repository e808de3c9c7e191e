"""expert_rows: rows in groups whose sizes depend on data select their matrices."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched, from_text
from support.simulated import check_simulated

from optdnn.ir.evaluate import evaluate
from optdnn.passes.base import PassContext
from optdnn.passes.masked_rows import MaskedRows
from optdnn.passes.rules import expert_rows

GPU = PassContext(target="cuda:sm_90a")
W = [f"float[4,3] w{k} = {{{', '.join(str((7 * k + 3 * i) % 11 - 5.0) for i in range(12))}}}" for k in range(3)]
TEXT = f"""<ir_version: 10, opset_import: ["": 18]>
g (float[9,4] x, int64[3] sizes) => (float[rows,3] y)
<{", ".join(W)}, float[3] b0 = {{1, 2, 3}}, float[3] b1 = {{-1, 0, 2}}, float[3] b2 = {{4, 1, 1}}>
{{ p, q, r = Split<axis = 0>(x, sizes) u = PRODUCT0 v = PRODUCT1 w = PRODUCT2 y = Concat<axis = 0>(u, v, w) }}"""
FORMS = {"MatMul": "MatMul({0}, w{1})", "Gemm": "Gemm({0}, w{1}, b{1})", "transposed": "Gemm<transB = 1>({0}, w{1})"}


def text(form: str = "MatMul") -> str:
    found = TEXT
    for k, part in enumerate("pqr"):
        found = found.replace(f"PRODUCT{k}", FORMS[form].format(part, k))
    return found.replace("float[4,3] w", "float[3,4] w") if form == "transposed" else found


@pytest.mark.parametrize("form", FORMS)
def test_groups_become_one_product(form: str) -> None:
    graph = from_text(text(form))
    after = graph.copy()
    assert [f.rule for f in MaskedRows()(after, GPU).fired] == ["expert_rows"]
    kinds = after.kinds()
    biased = int(form == "Gemm")
    assert (kinds["MatMul"], kinds["Gather"], kinds.get("Add", 0)) == (1, 1 + biased, biased)
    assert not {"Split", "Gemm"} & kinds.keys()
    rng = np.random.default_rng(0)
    for sizes in ([3, 3, 3], [0, 9, 0], [0, 0, 9], [9, 0, 0], [2, 0, 7], [0, 4, 5]):
        feeds = {"x": rng.standard_normal((9, 4)).astype(np.float32), "sizes": np.array(sizes)}
        np.testing.assert_allclose(evaluate(after, feeds)["y"], evaluate(graph, feeds)["y"], rtol=1e-5, atol=1e-6)


def counted() -> str:
    """The sizes are numbers that do not depend on the data, which no pass knows."""
    given = (
        text()
        .replace(
            "{ p, q, r = Split<axis = 0>(x, sizes)",
            """{ zero = Sub(x, x) sum = ReduceSum<keepdims = 0>(zero, axes)
      n = Cast<to = 7>(sum) some = Add(n, base) p, q, r = Split<axis = 0>(x, some)""",
        )
        .replace(", int64[3] sizes)", ")")
    )
    return given.replace("<float[4,3] w0", "<int64[2] axes = {0, 1}, int64[3] base = {2, 3, 4}, float[4,3] w0", 1)


def test_exact_in_float64() -> None:
    check_pass(MaskedRows(), counted(), changes=1, rules={"expert_rows": 1}, context=GPU)


def test_no_group_runs_on_the_cpu() -> None:
    program = check_simulated(from_text(counted()), "fp32")
    assert {s.executor for s in program.steps} <= {"cuda", "view"}


def test_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_refused(
        MaskedRows(),
        text().replace("float[9,4] x", "float[n,4] x"),
        because="the number of rows is not known",
        context=GPU,
    )
    read = text().replace("float[rows,3] y)", "float[rows,3] y, float[more,3] v)")
    check_refused(MaskedRows(), read, because="differ in form", context=GPU)
    mixed = text().replace(FORMS["MatMul"].format("q", 1), FORMS["Gemm"].format("q", 1))
    check_refused(MaskedRows(), mixed, because="differ in form", context=GPU)
    monkeypatch.setattr(expert_rows, "MOST", 2)
    check_refused(MaskedRows(), text(), because="with all 3 matrices would take longer", context=GPU)
    monkeypatch.setattr(expert_rows, "ROW", 4)  # the kernels that read matrices in place take these rows
    check_refused(MaskedRows(), text(), because="with all 3 matrices would take longer")
    assert MaskedRows()(from_text(text()), GPU).changes == 1


def test_other_splits_are_no_candidates() -> None:
    known = (
        text()
        .replace(", int64[3] sizes)", ")")
        .replace("<float[4,3] w0", "<int64[3] sizes = {2, 3, 4}, float[4,3] w0", 1)
    )
    check_untouched(MaskedRows(), known, GPU)
    check_untouched(MaskedRows(), text().replace("Concat<axis = 0>(u, v, w)", "Concat<axis = 0>(v, u, w)"), GPU)
