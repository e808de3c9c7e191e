"""Plans of attention of one query over all keys: ``attention_cached.cu`` without new rows. Blocks share the keys of a head."""

from __future__ import annotations

from optdnn.kernels.attention import cached_kernel as cached
from optdnn.kernels.attention.cached_kernel import Config
from optdnn.kernels.attention.problem import HeadView, Problem
from optdnn.kernels.launch import Launch
from optdnn.kernels.quantized.quantized_store import QuantizedStore
from optdnn.runtime.cuda.gpu_facts import GpuFacts


def cached_problem(problem: Problem) -> cached.Problem:
    """The problem as attention over a cache whose rows are all given."""
    p = problem
    return cached.Problem(
        p.batch, p.heads, p.key_heads or p.heads, p.keys, p.features, p.scale, p.dtype, reach=p.reach, softcap=p.softcap,
        sinks=p.sinks, given=True, mask=p.mask is not None,
    )  # fmt: skip


def refuse(problem: Problem, config: Config) -> str | None:
    """Why the configuration cannot run the problem, or None."""
    p = problem
    if p.queries != 1:
        return f"it is for one query, not {p.queries}"
    if p.values != p.features:
        return f"values of {p.values} features with queries of {p.features}"
    if (p.causal or p.reach >= 0) and p.causal_offset != (0 if p.from_end else p.keys - 1):
        return "the query is not at the last key"
    if p.mask_period:
        return "samples share its masks in turn"
    return cached.refuse(cached_problem(p), config)


def order_of_sums(config: Config) -> tuple[int, ...]:
    """Key of the order in which a row is summed: equal keys, equal order."""
    return config.warps, config.splits


def estimate(problem: Problem, config: Config, device: GpuFacts) -> float:
    """Predicted seconds of one dependent launch."""
    return cached.estimate(cached_problem(problem), config, device)


def candidates(problem: Problem, device: GpuFacts, limit: int = 8) -> list[Config]:
    """The configurations to time, best predicted first."""
    return cached.candidates(cached_problem(problem), device, limit)


def launch(problem: Problem, config: Config, gpu: GpuFacts, narrow: QuantizedStore | None = None) -> Launch:
    """The launch. Operands: ``q``, ``k``, ``v``, ``out``, ``mask``, ``lengths`` (int32 [batch]), ``sinks``, and those of
    :func:`.cached_kernel.workspace`. The result is stored in its own type only."""
    assert narrow is None
    p = problem
    none = HeadView(0, 0, 0)
    mask = p.mask or (0, 0, 0)
    places = cached.Places(p.q, none, none, p.k, p.v, p.out, length=4, mask=mask[:2])
    return cached.launch(cached_problem(p), config, gpu, places, starts=False, lengths=p.lengths)
