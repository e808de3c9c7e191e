"""Decisions of support vector machines: a warp for each row sums the pairs' kernel values and counts their votes.

The classes' probabilities are coupled by the iterations of libsvm (see :mod:`optdnn.runtime.reference.vectors`), in fp64, by each lane.
"""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Op, Value
from optdnn.kernels.builder import Builder
from optdnn.kernels.index.index_kernel import IndexKernel, emit_index_kernel, needed, operand_at, operands_of, shape_at
from optdnn.kernels.pointwise.expressions import CPP

LANES = 32
MOST_CLASSES = 12
"""Most classes whose matrix of pairs a lane keeps."""
UNROLLED = 6
"""Most classes whose matrix is in registers. Larger ones are in local memory: unrolled loops would take long to compile."""
ITERATIONS, TOLERANCE, LEAST = 100, 0.005, 1e-7
"""libsvm's most iterations, bound of the error times the number of classes, and least probability of a pair."""
LAUNCH_S, VALUE_S, COUPLING_S = 1.5e-6, 20e-9, 0.25e-6
"""Seconds of a launch, of a value that a lane adds, and of a class's part of the coupling for each other class (an estimate)."""


def _coupling(count: int) -> str:
    """C++ that computes the probabilities ``share`` from the symmetric matrix ``q`` of the pairs."""
    return f"""
        bool open = true;
        for (int step = 0; step < {ITERATIONS} && open; step++) {{
            double qp[{count}], pqp = 0.0, error = 0.0;
            {_unroll(count)}
            for (int t = 0; t < {count}; t++) {{
                double sum = 0.0;
                #pragma unroll
                for (int j = 0; j < {count}; j++) sum += q[t * {count} + j] * share[j];
                qp[t] = sum;
                pqp += share[t] * sum;
            }}
            #pragma unroll
            for (int t = 0; t < {count}; t++) error = max_nan(error, fabs(qp[t] - pqp));
            open = error >= {TOLERANCE / count};
            {_unroll(count)}
            for (int t = 0; t < {count} && open; t++) {{
                const double own = q[t * {count} + t], change = (pqp - qp[t]) / own, whole = 1.0 + change;
                pqp = (pqp + change * (change * own + 2.0 * qp[t])) / (whole * whole);
                share[t] += change;
                #pragma unroll
                for (int j = 0; j < {count}; j++) {{
                    qp[j] = (qp[j] + change * q[t * {count} + j]) / whole;
                    share[j] /= whole;
                }}
            }}
        }}"""


def _unroll(count: int) -> str:
    """The line before a loop over so many classes."""
    return "#pragma unroll" if count <= UNROLLED else ""


def _svm_decision(b: Builder, op: Op) -> None:
    k, coefficients, rho = (needed(b, op, i) for i in range(3))
    a, shift = operand_at(b, op, 3), operand_at(b, op, 4)
    per_class = op.attrs.vectors_per_class
    count = len(per_class)
    pairs = count * (count - 1) // 2
    starts = b.constant(np.cumsum([0, *per_class]).astype(np.int32), f"{op.outputs[0].name}.starts")
    winner, decisions, shares = (b.target(Value(op.id, i)) for i in range(3))
    coupled = a is not None and shift is not None
    unroll = _unroll(count)
    pair = f"""const double raw = 1.0 / (1.0 + exp(value * double(widen(p.a[at_a(pair)])) + double(widen(p.shift[at_shift(pair)]))));
                const double r = min_nan(max_nan(raw, {LEAST}), {1 - LEAST});
                q[i * {count} + i] += (1.0 - r) * (1.0 - r);
                q[j * {count} + j] += r * r;
                q[i * {count} + j] = r * (r - 1.0);
                q[j * {count} + i] = r * (r - 1.0);""" if coupled else ""  # fmt: skip
    lines = f"""double votes[{count}], share[{count}], q[{count * count if coupled else 1}];
        #pragma unroll
        for (int i = 0; i < {count}; i++) votes[i] = 0.0;
        #pragma unroll
        for (int i = 0; i < {count * count if coupled else 1}; i++) q[i] = 0.0;
        int pair = 0;
        {unroll}
        for (int i = 0; i < {count}; i++) {{
            {unroll}
            for (int j = i + 1; j < {count}; j++) {{
                double value = 0.0;
                for (i64 s = p.starts[i] + o1; s < p.starts[i + 1]; s += {LANES}) value += double(widen(p.k[at_k(o0, s)])) * double(widen(p.coefficients[at_coefficients(j - 1, s)]));
                for (i64 s = p.starts[j] + o1; s < p.starts[j + 1]; s += {LANES}) value += double(widen(p.k[at_k(o0, s)])) * double(widen(p.coefficients[at_coefficients(i, s)]));
                #pragma unroll
                for (int step = 1; step < {LANES}; step *= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
                value += double(widen(p.rho[at_rho(pair)]));
                votes[i] += value > 0.0 ? 1.0 : 0.0;
                votes[j] += value > 0.0 ? 0.0 : 1.0;
                {pair}
                if (o1 == 0) p.decisions[at_decisions(o0, pair)] = narrow<{CPP[decisions.dtype]}>(float(value));
                pair++;
            }}
        }}
        #pragma unroll
        for (int i = 0; i < {count}; i++) share[i] = {f"{1 / count}" if coupled else f"votes[i] / {max(pairs, 1)}.0"};
        {_coupling(count) if coupled else ""}
        int best = 0;
        double most = votes[0];
        #pragma unroll
        for (int i = 0; i < {count}; i++) {{
            best = votes[i] > most ? i : best;
            most = max_nan(most, votes[i]);
            if (o1 == 0) p.shares[at_shares(o0, i)] = narrow<{CPP[shares.dtype]}>(float(share[i]));
        }}
        if (o1 == 0) p.winner[at_winner(o0)] = best;"""  # fmt: skip
    tensors = {"k": k, "coefficients": coefficients, "rho": rho, "a": a, "shift": shift, "starts": starts}
    writes = {"winner": winner, "decisions": decisions, "shares": shares}
    emit_index_kernel(b, op, (k.shape[0], LANES), tensors, writes, lines, reads=operands_of(b, op))


def _limits(b: Builder, op: Op) -> str | None:
    count = len(op.attrs.vectors_per_class)
    if op.input(3) is not None and count > MOST_CLASSES:
        return f"a thread keeps the pairs of at most {MOST_CLASSES} classes, not of {count}"
    return None


class VotesKernel(IndexKernel):
    """One launch for the sums, the votes and the probabilities."""

    def seconds(self, b: Builder, op: Op) -> float | None:
        count, vectors = len(op.attrs.vectors_per_class), shape_at(b, op, 0)[1]
        summed = -(-vectors // LANES) * (count - 1)
        return LAUNCH_S + summed * VALUE_S + (count * count * COUPLING_S if op.input(3) is not None else 0.0)


TACTIC = VotesKernel({"SVMDecision": _svm_decision}, _limits)
