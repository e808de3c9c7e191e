"""fuse_rotary: each way an exporter turns queries and keys becomes one op; what is no rotation stays, and says why."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.shared import needs_shared_graphs, shared_network

from optdnn.importers.onnx import import_model
from optdnn.passes.base import PassContext, run_pipeline
from optdnn.passes.fuse_rotary import FuseRotary
from optdnn.passes.pipelines import PIPELINE

ANGLES = np.random.default_rng(2).standard_normal((5, 2))
BOTH = np.concatenate([ANGLES, ANGLES], 1)


def tensor(array: Any) -> str:
    return ", ".join(map(str, np.asarray(array).reshape(-1).tolist()))


SLICED = """a = Slice(x, zero, two, last)  b = Slice(x, two, end, last)"""
TURNED = "n = Neg(b)  r = Concat<axis=-1>(n, a)"
TABLES = "c = Cos(angles)  s = Sin(angles)"
SUM = "xc = Mul(x, c)  rs = Mul(r, s)  y = Add(xc, rs)"


def model(body: str, angles: Any = BOTH, shape: str = "[1,1,5,4]") -> str:
    return f"""<ir_version: 10, opset_import: ["" : 21]>
    rotary (float[2,3,5,4] x, float[2,5,2] turn, int64[2,5] at) => (float[2,3,5,4] y)
    <float{shape} angles = {{{tensor(angles)}}}, int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] two = {{2}},
     int64[1] last = {{3}},
     int64[1] end = {{9223372036854775807}},
     float minus = {{-1}}, float half = {{0.5}}>
    {{ {body} }}"""


FORMS = {
    "llama": f"{SLICED} {TURNED} {TABLES} {SUM}",
    "chunked": f"a, b = Split<axis=-1, num_outputs=2>(x) {TURNED} {TABLES} {SUM}",
    "the other way round": f"""{SLICED} n = Mul(minus, b)  r = Concat<axis=3>(n, a) {TABLES} xc = Mul(c, x) rs = Mul(s, r)
        y = Add(rs, xc)""",
    "angles of an input": f"""{SLICED} {TURNED} w = Concat<axis=-1>(turn, turn) c0 = Cos(w) c1 = Mul(c0, half)
        c = Unsqueeze(c1, one) s0 = Sin(w) s1 = Mul(s0, half) s = Unsqueeze(s1, one) {SUM}""",
    "rows of a table": f"""{SLICED} {TURNED} four = Constant<value_ints=[5,4]>() t = Reshape(angles, four) g = Gather(t, at)
        w = Unsqueeze(g, one) c = Cos(w) s = Sin(w) {SUM}""",
}


@pytest.mark.parametrize("name", FORMS)
def test_exported_forms(name: str) -> None:
    graph, _ = check_pass(FuseRotary(), model(FORMS[name]), changes=1)
    kinds = graph.kinds()
    assert kinds["RotaryEmbedding"] == 1
    assert not {"Neg", "Add"} & kinds.keys()
    assert kinds.get("Concat", 0) == (name == "angles of an input")


def test_tables_without_a_batch() -> None:
    check_pass(FuseRotary(), model(FORMS["llama"], shape="[5,4]"), changes=1)


REFUSED = {
    "the halves of c are not known to be equal": model(
        FORMS["llama"], np.random.default_rng(5).standard_normal((5, 4))
    ),
    "is not one angle per position": model(FORMS["llama"], np.tile(BOTH, (3, 1)), "[1,3,5,4]"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refused(why: str) -> None:
    check_refused(FuseRotary(), REFUSED[why], because=why)


OTHERS = {
    "not negated": f"{SLICED} n = Abs(b)  r = Concat<axis=-1>(n, a) {TABLES} {SUM}",
    "first half negated": f"{SLICED} n = Neg(a)  r = Concat<axis=-1>(n, b) {TABLES} {SUM}",
    "thirds": f"a = Slice(x, zero, one, last)  b = Slice(x, one, end, last) {TURNED} {TABLES} {SUM}",
    "halves of something else": f"z = Abs(x) a = Slice(z, zero, two, last)  b = Slice(z, two, end, last) {TURNED} {TABLES} {SUM}",
}


@pytest.mark.parametrize("name", OTHERS)
def test_no_rotation(name: str) -> None:
    check_untouched(FuseRotary(), model(OTHERS[name]))


@needs_shared_graphs
def test_one_node_per_rotation_in_llama(tmp_path: Any) -> None:
    """Two layers turn queries and keys; their angles are computed once."""
    model = shared_network("llama.dyn", tmp_path)
    graph = import_model(model, shapes={v.name: (2, 24) for v in model.graph.input})
    run_pipeline(graph, PIPELINE(3, "cuda:sm_90a"), PassContext("cuda:sm_90a"), verify=True)
    kinds = graph.kinds()
    assert kinds["RotaryEmbedding"] == 4
    assert kinds["Attention"] == 2
    assert not {"Neg", "Concat", "Slice", "Pointwise"} & kinds.keys()
