"""Float kernels that give 8-bit results, on a GPU: every launch does what its step means, to one step of the result."""

from __future__ import annotations

from typing import Any

import pytest
from support.needs import why_no_hopper
from support.quantized_nets import NARROWED
from support.simulated import feeds_of

from optdnn.config import BuildOptions
from optdnn.lower_cuda import lower_cuda
from optdnn.passes.base import PassContext
from optdnn.passes.fold_quantized import FoldQuantized
from optdnn.runtime.cuda.check import check_steps
from optdnn.runtime.engine import Engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(why_no_hopper() is not None, reason=why_no_hopper() or "")]


@pytest.mark.parametrize("name", NARROWED)
def test_every_launch_does_what_its_step_means(name: str) -> None:
    graph = NARROWED[name]()
    FoldQuantized()(graph, PassContext(target="cuda:sm_90a"))
    program = lower_cuda(graph, BuildOptions(target="cuda:sm_90a"), "cuda:sm_90a", {})
    context: Any = Engine(program).context()
    assert not [e for e in check_steps(context, feeds_of(graph)) if not e.error < 4e-3]
