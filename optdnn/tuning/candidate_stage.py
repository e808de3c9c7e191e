"""First stage of tuning: the candidates of each problem are compiled, checked and timed alone.

Candidates are tried in waves, in the cost model's order. The first waves show how far the model is off for each tactic.
A problem is closed when its untried candidates, corrected by that error, would gain the network too little.
"""

from __future__ import annotations

from collections.abc import Sequence

from optdnn.runtime.cuda.compile.recipes import recipe_of
from optdnn.runtime.cuda.trials.process import CandidateLost
from optdnn.runtime.cuda.trials.timer import TrialFailed
from optdnn.runtime.measuring.machine import usable_cores
from optdnn.tuning.candidates import SCATTER, Problem, Trial
from optdnn.tuning.session import SPENT, Session
from optdnn.tuning.timing_cache import Candidate
from optdnn.tuning.timing_keys import candidate_key, versions_of

ALONE = 0.6
"""At most this part of the budget goes to candidates alone. The rest is for the whole network."""
WAVE = 6
"""Candidates of a problem per wave."""
WORTH = 5e-4
"""A problem stays open while its untried candidates promise to gain more than this fraction of the network's time."""
ROUGH = 1.5
"""A candidate this many times slower than the best so far is timed roughly."""


class CandidateStage:
    """Times candidates alone, and sets the choices of ``session.tuned`` to the fastest ones."""

    def __init__(self, session: Session):
        self.session = session

    def run(self) -> None:
        """Run waves until all problems are closed, or this stage's part of the budget is spent."""
        session = self.session
        untried = {p.key: list(p.trials) for p in session.tuned.problems if len(p.trials) > 1}
        for key, trials in untried.items():
            self._recall(session.problems[key], trials)
        wave = 0
        while untried:
            wave += 1
            if not self._try_wave(wave, self._next_wave(untried)):
                session.tuned.stopped = SPENT
                break
        self.adopt()

    def adopt(self) -> None:
        """Choose the fastest candidate of each problem. A default that failed is replaced, even if nothing was timed."""
        choices = self.session.tuned.choices
        for problem in self.session.tuned.problems:
            if problem.times:
                choices[problem.key] = problem.best
            elif problem.default in problem.failed and problem.untried is not None:
                choices[problem.key] = problem.untried

    def _next_wave(self, untried: dict[str, list[Trial]]) -> list[tuple[Problem, Trial]]:
        """Take the next candidates of each open problem, the most expensive problem first. Closed problems are removed."""
        problems = self.session.problems
        batch: list[tuple[Problem, Trial]] = []
        for key in sorted(untried, key=lambda k: -problems[k].weight):
            problem = problems[key]
            if not self._promising(problem, untried[key]):
                del untried[key]
                continue
            batch += [(problem, trial) for trial in untried[key][:WAVE]]
            del untried[key][:WAVE]
        return batch

    def _try_wave(self, wave: int, batch: Sequence[tuple[Problem, Trial]]) -> bool:
        """Compile and time a wave. False if the time ran out."""
        session = self.session
        session.say(f"tune: compile {len(batch)} candidates")
        recipes = {r.key(): r for _, trial in batch for r in map(recipe_of, trial.program.kernels)}
        if session.spent(ALONE):
            return False
        session.timer.compile(list(recipes.values()), min(16, usable_cores()))
        started = session.clock()
        for done, (problem, trial) in enumerate(batch):
            if session.spent(ALONE):
                return False
            left = session.remaining(started, done, len(batch))
            self._report(f"wave {wave}, {done}/{len(batch)}{left}", problem)
            if not _hopeless(problem, trial):
                self._try(problem, trial)
        return True

    def _promising(self, problem: Problem, untried: Sequence[Trial]) -> bool:
        """Whether the untried candidates could gain the network enough."""
        if not untried or not problem.times:
            return bool(untried)
        untried = [t for t in untried if not _hopeless(problem, t)]
        if not untried or any(t.seconds is None for t in untried):
            return bool(untried)
        errors = _errors(problem)
        if any(t.choice.tactic not in errors for t in untried):
            return True
        hoped = min(
            (t.seconds or 0.0) * errors[t.choice.tactic] * (1 - SCATTER) - problem.saved_seconds(t.choice)
            for t in untried
        )
        return problem.count * (problem.seconds - hoped) > WORTH * self.session.problem_seconds()

    def _try(self, problem: Problem, trial: Trial) -> None:
        """Check and time one candidate, and keep the outcome."""
        session = self.session
        best = problem.seconds + problem.saved_seconds(trial.choice) if problem.times else float("inf")
        give_up = ROUGH * max(best, 1e-7)
        try:
            seconds = session.timer.trial(problem.key, trial.program, cold=session.cold, give_up=give_up)
        except CandidateLost as lost:
            problem.failed[trial.choice] = lost.message
            name = " + ".join(sorted(problem.op.src)) or problem.op.name
            session.lose(f"{problem.op.kind} {name} by {trial.choice}", lost.message)
            return
        except TrialFailed as failure:
            problem.failed[trial.choice] = failure.message
        else:
            problem.times[trial.choice] = seconds
        versions = versions_of(session.timer.machine, trial.provider)
        times, failed = problem.times.get(trial.choice), problem.failed.get(trial.choice)
        session.cache.note(self._key(problem, trial), Candidate(times, failed, versions))

    def _recall(self, problem: Problem, trials: list[Trial]) -> None:
        """Take known outcomes from the timing cache, and remove their candidates from ``trials``.

        Times that were measured under other versions only rank: their candidates come first.
        """
        machine = self.session.timer.machine
        ranked: list[tuple[float, Trial]] = []
        for trial in list(trials):
            known = self.session.cache.measured(self._key(problem, trial))
            if known is None:
                continue
            trials.remove(trial)
            if known.failed is not None:
                problem.failed[trial.choice] = known.failed
            elif known.seconds is not None and known.versions == versions_of(machine, trial.provider):
                problem.times[trial.choice] = known.seconds
            elif known.seconds is not None:
                ranked.append((known.seconds, trial))
        trials[:0] = [trial for _, trial in sorted(ranked, key=lambda r: r[0])]

    def _key(self, problem: Problem, trial: Trial) -> str:
        """The candidate's key in the timing cache."""
        return candidate_key(self.session.timer.machine, problem.key, trial, cold=self.session.cold)

    def _report(self, where: str, problem: Problem) -> None:
        """A line of progress: the problem's best candidate so far, and the sum over the network."""
        best = f"{problem.best} {problem.seconds * 1e6:.2f} us" if problem.times else "none yet"
        name = min(problem.op.src, default=problem.op.name)
        self.session.say(f"tune: {where}; {name}: {best}; sum {self.session.problem_seconds() * 1e3:.3f} ms")


def _errors(problem: Problem) -> dict[str, float]:
    """Tactic -> the least ratio of measured to predicted time. Each tactic has its own cost model."""
    predicted = {t.choice: t.seconds for t in problem.trials}
    errors: dict[str, float] = {}
    for choice, seconds in problem.times.items():
        if expected := predicted.get(choice):
            ratio = seconds / expected
            errors[choice.tactic] = min(ratio, errors.get(choice.tactic, ratio))
    return errors


def _hopeless(problem: Problem, trial: Trial) -> bool:
    """Whether the library's higher-ranked algorithms were already far slower than the best candidate."""
    times = [s for c, s in problem.times.items() if c.tactic == trial.choice.tactic]
    return trial.provider != "own" and bool(times) and min(times) > ROUGH * problem.seconds
