"""One form for equal graphs: no-ops disappear, reshapes and transposes merge, convolutions and pools absorb padding.

This pass leaves arithmetic alone, so that decomposed activations and normalizations can be recognized after it;
``canonicalize_arithmetic`` runs after these.
"""

from __future__ import annotations

from optdnn.passes.base import RulePass
from optdnn.passes.rules.input_sizes import InputTarget
from optdnn.passes.rules.noop import Idempotent, NoOp, UnusedIndices
from optdnn.passes.rules.select import SelectIsWhere
from optdnn.passes.rules.shape import ConstantTarget, GemmTranspose, ReshapeChain, TransposeChain, TransposeIsReshape
from optdnn.passes.rules.transpose import SinkTranspose
from optdnn.passes.rules.window import PadConv, PadPool


class Canonicalize(RulePass):
    name = "canonicalize"
    rules = (
        NoOp(),
        Idempotent(),
        UnusedIndices(),
        ConstantTarget(),  # before chains: a target that is constant is one less to refuse
        ReshapeChain(),
        InputTarget(),  # after chains: an outer Reshape may spare the inner one its target
        TransposeChain(),  # before sinking: two neighbours merge where they are
        TransposeIsReshape(),
        GemmTranspose(),
        SinkTranspose(),
        SelectIsWhere(),
        PadConv(),
        PadPool(),
    )
