"""One form for what can be written in many: no-ops go, reshapes and transposes merge, padding goes into its window.

This pass leaves arithmetic alone, so that decomposed activations and normalizations can be recognized after it;
``canonicalize_arithmetic`` runs after these.
"""

from __future__ import annotations

from optdnn.passes.base import RulePass
from optdnn.passes.canonicalize_noop import Idempotent, NoOp, UnusedIndices
from optdnn.passes.canonicalize_shape import (
    ConstantTarget,
    GemmTranspose,
    ReshapeChain,
    TransposeChain,
    TransposeIsReshape,
)
from optdnn.passes.canonicalize_transpose import SinkTranspose
from optdnn.passes.canonicalize_window import PadConv, PadPool
from optdnn.passes.input_sizes import InputTarget
from optdnn.passes.select import SelectIsWhere


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
