"""Full caches, lengths beyond the capacity, and tokens outside of the vocabulary give an error before anything is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.decoder import VOCABULARY, decoder, empty, states

import optdnn
from optdnn.errors import InputError
from optdnn.runtime.cuda.usable import why_not

CAPACITY = 8
GPU = pytest.param(
    "cuda:sm_90a", marks=[pytest.mark.gpu, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]
)


@pytest.fixture(scope="module", params=["simulate", "cpu"])
def bound(request: pytest.FixtureRequest) -> Any:
    """A decoder after one token, and the arrays that it reads: the position and the token."""
    model = decoder(capacity=CAPACITY)
    how: dict[str, Any] = {"threads": 1} if request.param == "cpu" else {"tactics": "heuristic"}
    at, token = np.zeros(1, np.int64), np.zeros((1, 1), np.int64)
    context: Any = optdnn.build(model, target=request.param, **how).context()
    made = context.bind({"token": token, "at": at, **empty(model, 0)}, state=states())
    made.run()
    return made, at, token


@pytest.mark.parametrize(
    ("position", "number", "because"),
    [
        (CAPACITY, 1, f"'at' holds {CAPACITY}; TensorScatter .* takes 0 to {CAPACITY - 1}"),
        (1 << 40, 1, f"'at' holds {1 << 40}; TensorScatter"),
        (-1, 1, "'at' holds -1; TensorScatter"),
        (1, VOCABULARY, f"'token' holds {VOCABULARY}; Gather .* takes -{VOCABULARY} to {VOCABULARY - 1}"),
    ],
)
def test_the_state_stays_as_it_was(bound: Any, position: int, number: int, because: str) -> None:
    made, at, token = bound
    before = {n: np.array(a) for n, a in made.state.items()}
    at[:], token[:] = position, number
    with pytest.raises(InputError, match=because):
        made.run()
    after = {n: np.array(a) for n, a in made.state.items()}
    assert all(before[n].tobytes() == after[n].tobytes() for n in before)
    at[:], token[:] = 1, 1
    made.run()


def group_query_attention(rows: int = 1) -> onnx.ModelProto:
    """One GroupQueryAttention whose lengths are an input."""
    heads, groups, size = 4, 2, 16
    sizes = {"q": [2, rows, heads * size], "k": [2, rows, groups * size], "v": [2, rows, groups * size]}
    sizes |= {key: [2, groups, CAPACITY, size] for key in ("past_k", "past_v")}
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in sizes.items()]
    inputs.append(helper.make_tensor_value_info("lengths", TensorProto.INT32, [2]))
    results = {"y": sizes["q"], "new_k": sizes["past_k"], "new_v": sizes["past_v"]}
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in results.items()]
    total = numpy_helper.from_array(np.array(CAPACITY, np.int32), "total")
    node = helper.make_node(
        "GroupQueryAttention", [*sizes, "lengths", "total"], list(results), "gqa", domain="com.microsoft",
        num_heads=heads, kv_num_heads=groups,
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(
        helper.make_graph([node], "g", inputs, outputs, [total]), opset_imports=opsets, ir_version=10
    )


@pytest.mark.parametrize("target", ["simulate", "cpu", GPU])
@pytest.mark.parametrize("rows", [1, 3])
def test_lengths_beyond_the_capacity(target: str, rows: int) -> None:
    how: dict[str, Any] = {"threads": 1} if target == "cpu" else {"tactics": "heuristic"}
    engine = optdnn.build(group_query_attention(rows), target=target, **how)
    rng = np.random.default_rng(0)
    feeds = {s.name: rng.standard_normal(s.shape).astype(np.float32) for s in engine.inputs if s.dtype.kind == "f"}
    engine.run({**feeds, "lengths": np.array([CAPACITY - 1, rows - 1], np.int32)})
    for wrong in (CAPACITY, 1000):
        with pytest.raises(
            InputError, match=rf"'lengths' holds {wrong}; TensorScatter gqa takes -\d+ to {CAPACITY - 1}"
        ):
            engine.run({**feeds, "lengths": np.array([wrong, 2], np.int32)})
