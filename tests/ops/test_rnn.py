"""Recurrent layers against ONNX Runtime; layouts, partial operands, old opsets, export, every refusal."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from onenode import Case, check_case, check_export, import_case, normal, op_flops, run
from support.sweep import all_pairs

from optdnn.errors import RunError, ShapeError
from optdnn.ir.evaluate import evaluate
from optdnn.ops.definition import OpDef
from optdnn.ops.fused import plain_attrs
from optdnn.ops.rnn import DEFS, LSTMAttrs
from optdnn.ops.table import OPDEFS
from optdnn.runtime.reference.run import run_kernel
from optdnn.types import FP16, FP64

T, N, WIDTH, H = 5, 3, 4, 6
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def layer(
    op: str, direction: str = "forward", *, opset: int = 22, use: str = "blhcp", dtype: Any = np.float32, **attrs: Any
) -> Case:
    """A layer with the optional operands named in ``use``: bias, lengths, initial h, initial c, peepholes."""
    g, d = GATES[op], 2 if direction == "bidirectional" else 1

    def random(*shape: int, seed: int) -> np.ndarray:
        return normal(*shape, seed=seed, dtype=dtype) * dtype(0.6)

    lens = np.array([T, 2, 1], np.int32)
    optional = [
        ("b", random(d, 2 * g * H, seed=4)),
        ("l", lens),
        ("h", random(d, N, H, seed=5)),
        ("c", random(d, N, H, seed=6)),
        ("p", random(d, 3 * H, seed=7)),
    ]
    if op != "LSTM":
        optional = optional[:3]
    operands = [random(T, N, WIDTH, seed=1), random(d, g * H, WIDTH, seed=2), random(d, g * H, H, seed=3)]
    operands += [v if key in use else None for key, v in optional]
    while operands[-1] is None:
        operands.pop()
    given = {"hidden_size": H, "direction": direction, **attrs}
    return Case(op, operands, given, opset, outputs=3 if op == "LSTM" else 2, constants=(1, 2))


@all_pairs(
    {
        "use": ["", "b", "bh", "blhc", "l"],
        "op": GATES,
        "direction": ["forward", "reverse", "bidirectional"],
    }
)
def test_directions_and_optional_operands(op: str, direction: str, use: str) -> None:
    check_case(layer(op, direction, use=use), symbolic={0: (0,)})


@pytest.mark.parametrize("opset", [7, 14, 22])
@pytest.mark.parametrize("linear", [0, 1])
def test_gru_reset_gate(opset: int, linear: int) -> None:
    check_case(layer("GRU", "bidirectional", opset=opset, linear_before_reset=linear))


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_lstm_peepholes_and_coupled_gates(direction: str) -> None:
    check_case(layer("LSTM", direction, use="bhcp"))
    check_case(
        layer("LSTM", direction, use="bhc", input_forget=1), "reference" if direction == "none" else "onnxruntime"
    )


@pytest.mark.parametrize("op", GATES)
def test_clip_bounds_the_operands_of_activations(op: str) -> None:
    case = layer(op, use="b", clip=0.25)
    check_case(case)
    loose = run(import_case(layer(op, use="b")), case.fed)[0]
    assert np.abs(loose - run(import_case(case), case.fed)[0]).max() > 0.05


@pytest.mark.parametrize(
    ("name", "alpha", "beta"),
    [
        ("Affine", 0.5, 0.25),
        ("Elu", 1.5, None),
        ("HardSigmoid", 0.3, 0.4),
        ("LeakyRelu", 0.1, None),
        ("Relu", None, None),
        ("ScaledTanh", 1.5, 0.5),
        ("Softplus", None, None),
        ("Softsign", None, None),
        ("ThresholdedRelu", 0.2, None),
    ],
)
def test_activations(name: str, alpha: float | None, beta: float | None) -> None:
    attrs: dict[str, Any] = {"activations": [name]}
    attrs |= {} if alpha is None else {"activation_alpha": [alpha]}
    attrs |= {} if beta is None else {"activation_beta": [beta]}
    check_case(layer("RNN", use="bh", **attrs))


def test_parameters_go_to_the_activations_that_take_them_in_order() -> None:
    names = ["Sigmoid", "LeakyRelu", "HardSigmoid", "Sigmoid", "Tanh", "LeakyRelu"]
    attrs = {"activations": names, "activation_alpha": [0.3, 0.25, 0.05], "activation_beta": [0.4]}
    graph = check_case(layer("LSTM", "bidirectional", use="b", **attrs))
    a: LSTMAttrs = graph.of_kind("LSTM")[0].attrs
    assert a.alphas == pytest.approx((0, 0.3, 0.25, 0, 0, 0.05))
    assert a.betas == pytest.approx((0, 0, 0.4, 0, 0, 0))


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("direction", ["reverse", "bidirectional"])
def test_batch_first(op: str, direction: str) -> None:
    case = layer(op, direction, use="bhc")
    expected = run(import_case(case), case.fed)
    first = [x if i not in (0, 5, 6) else x.transpose(1, 0, 2) for i, x in enumerate(case.inputs)]
    batched = Case(op, first, {**case.attrs, "layout": 1}, 14, case.outputs, case.constants)
    perms = [(2, 0, 1, 3), (1, 0, 2), (1, 0, 2)]
    check_case(batched, [y.transpose(p) for y, p in zip(expected, perms, strict=False)])


def test_fewer_outputs_and_the_default_hidden_size() -> None:
    case = layer("LSTM", use="b")
    del case.attrs["hidden_size"]  # type: ignore[attr-defined]
    case.outputs = 1
    graph = check_case(
        case, run(import_case(layer("LSTM", use="b")), case.fed)[:1]
    )  # ONNX Runtime requires the attribute
    assert graph.of_kind("LSTM")[0].attrs.hidden_size == H


def test_half_precision_rounds_once() -> None:
    case = layer("GRU", dtype=np.float16)
    exact = layer("GRU", dtype=np.float16)
    exact.inputs = [x.astype(FP64) if x.dtype == FP16 else x for x in exact.inputs if x is not None]
    for got, wide in zip(run(import_case(case), case.fed), run(import_case(exact), exact.fed), strict=True):
        assert got.dtype == FP16
        np.testing.assert_allclose(got.astype(FP64), wide, atol=1e-3)


@pytest.mark.parametrize(("op", "direction"), list(product(GATES, ["forward", "bidirectional"])))
def test_export(op: str, direction: str) -> None:
    case = layer(op, direction, use="blhc")
    case.constants = ()
    check_export(case)


def test_export_of_flags_and_activation_parameters() -> None:
    names = ["HardSigmoid", "LeakyRelu"]
    case = layer("GRU", activations=names, activation_alpha=[0.3, 0.1], linear_before_reset=1, clip=1.5)
    (node,) = (n for n in check_export(case).graph.node if n.op_type == "GRU")
    attrs = {a.name: a for a in node.attribute}
    assert list(attrs["activation_alpha"].floats) == pytest.approx([0.3, 0.1])
    assert list(attrs["activation_beta"].floats) == pytest.approx([0.5])
    assert (attrs["linear_before_reset"].i, attrs["clip"].f) == (1, 1.5)


@all_pairs(
    {
        "constant": [False, True],
        "lens": [[0, 2, T], [0, 0, 0]],
        "op": GATES,
        "direction": ["forward", "reverse", "bidirectional"],
    }
)
def test_the_last_states_of_no_steps_are_zeros(op: str, direction: str, lens: list[int], constant: bool) -> None:
    case = layer(op, direction, use="blhc")
    case.inputs = [*case.inputs[:4], np.array(lens, np.int32), *case.inputs[5:]]
    case.constants = (1, 2, 4) if constant else (1, 2)
    graph = check_case(case, symbolic={0: (0,)})
    assert not any(y[:, 0].any() for y in run(graph, case.fed)[1:])


def test_lengths_that_are_known_to_be_positive_cost_nothing() -> None:
    case = layer("GRU", use="blh")
    assert set(import_case(case).kinds()) - {"GRU"}, "the lengths are an operand"
    case.constants = (1, 2, 4)
    assert set(import_case(case).kinds()) == {"GRU"}
    case = layer("GRU", use="blh")
    case.outputs = 1
    assert set(import_case(case).kinds()) == {"GRU"}, "nobody reads the last state"


@pytest.mark.parametrize("op", GATES)
def test_the_last_states_of_sequences_without_steps_are_zeros(op: str) -> None:
    case = layer(op, use="bhc")
    case.inputs = [np.zeros((0, N, WIDTH), np.float32), *case.inputs[1:]]
    for y in run(import_case(case), case.fed):
        assert not y.any()


def test_cost_counts_the_products() -> None:
    graph = import_case(layer("LSTM", use="b"))
    (op,) = graph.of_kind("LSTM")
    assert op_flops(graph, op) == T * N * H * 4 * (2 * (WIDTH + H) + 5)


@pytest.mark.parametrize("wrong", [T + 1, -1])
def test_lengths_beyond_the_sequence(wrong: int) -> None:
    case = layer("LSTM", use="blh")
    operands = list(case.inputs)
    operands[4] = np.array([wrong] + [T] * (N - 1), np.int32)
    with pytest.raises(ShapeError, match=rf"sequence_lens holds {wrong} for sequences of {T}"):
        import_case(Case("LSTM", operands, case.attrs, outputs=case.outputs, constants=[4]))
    fed = Case("LSTM", operands, case.attrs, outputs=case.outputs)
    with pytest.raises(RunError, match="sequence_lens holds"):
        evaluate(import_case(fed), fed.fed)


@pytest.mark.parametrize("definition", DEFS, ids=lambda d: d.kind)
@pytest.mark.parametrize(
    ("slot", "shape", "dtype", "message"),
    [
        (0, (T, N), np.float32, "input must have 3 dimensions"),
        (0, (T, N, WIDTH), np.int32, "must be floating-point"),
        (1, (1, 5, WIDTH), np.float32, "weights W is"),
        (2, (1, 5, H), np.float32, "recurrent weights R is"),
        (3, (1, 7), np.float32, "bias B is"),
        (3, None, np.float64, "bias B is fp64"),
        (4, (N + 1,), np.int32, "sequence_lens is"),
        (4, (N,), np.float32, "it must hold integers"),
        (5, (2, N, H), np.float32, "initial_h is"),
    ],
)
def test_operands_that_contradict(definition: OpDef, slot: int, shape: Any, dtype: Any, message: str) -> None:
    case = layer(definition.kind, use="blh")
    old = case.inputs[slot]
    assert old is not None
    operands = list(case.inputs)
    operands[slot] = np.zeros(old.shape if shape is None else shape, dtype)
    with pytest.raises(ShapeError, match=message):
        import_case(Case(definition.kind, operands, case.attrs, outputs=case.outputs))


@pytest.mark.parametrize(
    ("attrs", "message"),
    [
        ({"direction": "both"}, "direction is 'both'"),
        ({"activations": ["Tanh", "Relu"]}, "activations of direction forward has 2 entries, 1 are needed"),
        ({"activations": ["Swish"]}, "'Swish' is unknown"),
        ({"activation_alpha": [0.5]}, "activation_alpha has 1 values more"),
    ],
)
def test_attributes_that_are_refused(attrs: dict[str, Any], message: str) -> None:
    case = layer("RNN", use="b")
    with pytest.raises(ShapeError, match=message):
        import_case(Case("RNN", case.inputs, {**case.attrs, **attrs}, outputs=2))


@pytest.mark.parametrize("op", GATES)
def test_products_that_are_made_already(op: str) -> None:
    """The meaning of a step in a GPU program: one infinite gate does not affect the others."""
    case = layer(op, use="b")
    x, w, r, b = (np.asarray(v) for v in case.inputs[:4])
    attrs = plain_attrs(OPDEFS[op], import_case(case).of_kind(op)[0].attrs)
    want = run_kernel(op, [x, w, r, b], attrs)
    made = (x.reshape(T * N, WIDTH) @ w[0].T).reshape(T, N, -1)
    for got, expected in zip(run_kernel(op, [made, None, r, b], attrs), want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    made[0, 0, 0] = np.inf
    assert np.isfinite(run_kernel(op, [made, None, r, b], attrs)[0]).all()
