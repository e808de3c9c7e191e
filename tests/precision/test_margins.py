"""The drop that margins predict: right if the truth is known, and never less than what the samples show."""

from __future__ import annotations

import numpy as np
import pytest

from optdnn.precision.margins import KEPT, Margins, merged
from optdnn.precision.metrics import metric_of
from optdnn.types import Array

CLASSES = 10
POPULATION = 200_000


def near(y: Array, ref: Array, labels: Array | None) -> Margins:
    found = metric_of("top1", labels).margins
    assert found is not None
    return found({"y": y}, {"y": ref}, labels)


def logits(rng: np.random.Generator, n: int, kind: str) -> Array:
    """Scores of class 0 and nine others. ``kind`` gives the margins: "spread" down to zero, or "apart" from it."""
    z = rng.standard_normal((n, CLASSES)).astype(np.float32)
    margin = rng.exponential(5.0, n) if kind == "spread" else 5 + 0.25 * rng.standard_normal(n)
    z[:, 0] = z[:, 1:].max(axis=1) + np.abs(margin)
    return z


def changes(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> Array:
    """Changes unlike a Gaussian of one spread: with heavy tails, or with another size for each sample."""
    if kind == "heavy":
        return rng.standard_t(4, shape) / np.sqrt(2)
    sizes = np.exp(0.7 * rng.standard_normal((shape[0], *[1] * (len(shape) - 1))))
    return rng.standard_normal(shape) * (sizes if kind == "uneven" else 1.0)


@pytest.mark.parametrize("noise", ["gaussian", "heavy", "uneven"])
@pytest.mark.parametrize(("size", "least"), [(0.05, 0.1), (0.2, 1.0), (1.0, 3.0)])
def test_the_expected_drop_is_the_real_one_where_margins_reach_zero(noise: str, size: float, least: float) -> None:
    rng = np.random.default_rng(1)
    ref = logits(rng, POPULATION, "spread")
    y = (ref + size * changes(rng, ref.shape, noise)).astype(np.float32)
    labels = np.zeros(POPULATION, int)
    truth = metric_of("top1", labels).drop({"y": y}, {"y": ref}, labels)
    assert truth > least  # otherwise the case would show nothing
    draws = [rng.integers(0, POPULATION, 1000) for _ in range(100)]
    expected = [near(y[i], ref[i], labels[i]).expected() for i in draws]
    counted = [metric_of("top1", labels).drop({"y": y[i]}, {"y": ref[i]}, labels[i]) for i in draws]
    assert 0.9 * truth < np.mean(expected) < 1.35 * truth
    assert np.std(expected) <= np.std(counted) * 1.02
    if truth < 0.6:  # a few samples of a thousand: the tail is a better estimate than their count
        assert np.std(expected) < 0.85 * np.std(counted)


def test_it_warns_where_samples_are_too_few_to_lose_one() -> None:
    """With 200 samples, a loss of 0.12 points shows in one draw of five. All draws show the expected one."""
    rng = np.random.default_rng(2)
    ref = logits(rng, POPULATION, "spread")
    y = (ref + 0.005 * changes(rng, ref.shape, "heavy")).astype(np.float32)
    labels = np.zeros(POPULATION, int)
    truth = metric_of("top1", labels).drop({"y": y}, {"y": ref}, labels)
    assert 0.02 < truth < 0.2
    draws = [rng.integers(0, POPULATION, 200) for _ in range(50)]
    none_lost = [i for i in draws if metric_of("top1", labels).drop({"y": y[i]}, {"y": ref[i]}, labels[i]) == 0]
    assert len(none_lost) > 25
    found = [near(y[i], ref[i], labels[i]).expected() for i in none_lost]
    assert min(found) > 0.1 * truth
    assert np.mean(found) > 0.5 * truth


def test_samples_that_lie_apart_from_the_border_do_not_end_the_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Margins of 5 +- 0.25, like those of training samples: changes of 1 reach none of them, but those of new samples."""
    rng = np.random.default_rng(3)
    ref = logits(rng, 1000, "apart")
    y = (ref + 0.7 * changes(rng, ref.shape, "gaussian")).astype(np.float32)
    found = near(y, ref, np.zeros(1000, int))
    assert found.lost == 0
    shares = found.shares
    assert found.expected() == pytest.approx(100 * 10 / 1000 * shares[10])
    few = near(y[:100], ref[:100], np.zeros(100, int)).expected()
    assert few > 2 * found.expected()  # with fewer samples, the prediction is more careful
    monkeypatch.setattr("optdnn.precision.margins.LIGHTEST", 0.0)
    assert found.losses() / 10 < 0.02  # points, by the index of these samples


def test_no_drop_is_expected_of_harmless_changes() -> None:
    rng = np.random.default_rng(4)
    ref = logits(rng, 500, "spread")
    ref[:20, 3] = 100.0  # some that fp32 gets wrong
    labels = np.zeros(500, int)
    assert near(ref, ref, labels).expected() == 0.0
    assert near(2 * ref, ref, labels).expected() == 0.0  # the difference between two libraries in fp32; that of fp16
    for size, nothing in ((3e-6, True), (1e-3, False)):  # as two libraries differ in fp32; as fp16 does
        rounded = ref * (1 + size * rng.standard_normal(ref.shape)).astype(np.float32)
        assert (near(rounded, ref, labels).expected() == 0.0) == nothing
    assert near(ref[:0], ref[:0], labels[:0]).expected() == 0.0
    assert near(ref, ref, None).expected() == 0.0


def test_the_scale_of_scores_does_not_matter() -> None:
    rng = np.random.default_rng(5)
    ref = logits(rng, 800, "spread")
    y = (ref + 0.05 * changes(rng, ref.shape, "heavy")).astype(np.float32)
    labels = np.zeros(800, int)
    want = near(y, ref, labels).expected()
    assert want > 0
    assert near(64 * y, 64 * ref, labels).expected() == pytest.approx(want, rel=1e-5)


def test_probabilities_give_the_expectation_of_their_logits() -> None:
    """Near 1, probabilities hardly change: with their own margins, int8 would look harmless."""
    rng = np.random.default_rng(6)
    ref = logits(rng, 1000, "apart")
    y = (ref + 0.5 * changes(rng, ref.shape, "gaussian")).astype(np.float32)
    labels = np.zeros(1000, int)
    want = near(y, ref, labels).expected()
    assert want > 0.2
    assert near(_softmax(y), _softmax(ref), labels).expected() == pytest.approx(want, rel=1e-3)
    # These are no probabilities of a softmax, so they are used as they are.
    assert near(2 * _softmax(y), 2 * _softmax(ref), labels).expected() < 0.6 * want


def _softmax(z: Array) -> Array:
    e = np.exp(z - z.max(axis=1, keepdims=True))
    found: Array = (e / e.sum(axis=1, keepdims=True)).astype(np.float32)
    return found


def test_with_enough_losses_the_expectation_is_their_count() -> None:
    """With hundreds of losses and gains, the expectation is the measured drop, which is net."""
    rng = np.random.default_rng(7)
    n = 4000
    ref = rng.standard_normal((n, CLASSES)).astype(np.float32)
    labels = np.where(rng.random(n) < 0.7, ref.argmax(axis=1), rng.integers(0, CLASSES, n))
    y = (ref + 0.3 * changes(rng, ref.shape, "gaussian")).astype(np.float32)
    found, metric = near(y, ref, labels), metric_of("top1", labels)
    assert found.lost > 100
    assert found.gained > 20
    assert found.expected() == pytest.approx(metric.drop({"y": y}, {"y": ref}, labels))
    agreement = metric_of("top1", None)
    assert near(y, ref, None).expected() == pytest.approx(agreement.drop({"y": y}, {"y": ref}, None))


def test_gains_are_taken_off_and_none_is_promised() -> None:
    """Half of the samples are wrong by a small margin. The candidate's noise makes as many right as wrong: no drop."""
    rng = np.random.default_rng(8)
    margin = rng.uniform(-0.1, 0.1, 20_000)
    ref = np.stack([margin, np.zeros_like(margin)], axis=1).astype(np.float32)
    y = (ref + 0.02 * rng.standard_normal(ref.shape)).astype(np.float32)
    labels = np.zeros(len(ref), int)
    found = near(y, ref, labels)
    assert found.lost > 100
    assert abs(found.expected()) < 1.0 < 100 * found.lost / found.count
    # A few samples that fp32 gets wrong come near the border, and none crosses it: no gain is expected of them.
    few = near(
        np.float32([[3.0, 2.5], [0.99, 1.0]] * 50), np.float32([[3.0, 2.0], [0.0, 1.0]] * 50), np.zeros(100, int)
    )
    assert (few.right, few.lost, few.gained) == (50, 0, 0)
    assert few.expected() == pytest.approx(100 * 4 / 100 * 0.5)  # of 50 samples, the 4 largest shares are a half


def test_samples_that_are_not_finite_are_lost_and_ties_do_not_count() -> None:
    rng = np.random.default_rng(9)
    ref = logits(rng, 300, "apart")
    labels = np.zeros(300, int)
    y = ref.copy()
    y[:30, 4] = np.nan
    found = near(y, ref, labels)
    assert found.lost == 30
    assert found.expected() == pytest.approx(10.0)
    assert near(np.full_like(ref, np.nan), ref, labels).expected() == 100.0
    tied = np.zeros_like(ref)  # argmax gives class 0, with a margin of 0
    assert near(tied, tied, labels).expected() == 0.0
    small = (ref + 0.1 * rng.standard_normal(ref.shape)).astype(np.float32)
    want = near(small, ref, labels).expected()
    for mask in (-np.inf, -1e30):  # a class that is masked
        out = (np.concatenate([a, np.full((300, 1), mask, np.float32)], axis=1) for a in (small, ref))
        assert near(*out, labels).expected() == want > 0
    masked = ref.copy()
    masked[:, 1:] = -np.inf
    assert near(masked, masked, labels).expected() == 0.0


def test_samples_with_ignored_labels_are_never_right() -> None:
    rng = np.random.default_rng(10)
    ref = rng.standard_normal((4, CLASSES, 6, 6)).astype(np.float32)
    labels = ref.argmax(axis=1)
    labels[:, 0] = 255
    found = near(ref, ref, labels)
    assert (found.right, found.count) == (4 * 30, 4 * 36)
    assert found.gained == 0


def test_parts_and_batches_together_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(11)
    ref = logits(rng, 3000, "apart")
    y = (ref + 0.5 * changes(rng, ref.shape, "heavy")).astype(np.float32)
    labels = np.zeros(3000, int)
    whole = near(y, ref, labels)
    assert len(whole.shares) == KEPT
    parts = [near(y[k : k + 700], ref[k : k + 700], labels[k : k + 700]) for k in range(0, 3000, 700)]
    assert merged(parts, 1.0).expected() == whole.expected()
    monkeypatch.setattr("optdnn.precision.margins.TOGETHER", 50)  # five samples at a time
    assert near(y, ref, labels).expected() == whole.expected()
    # A half is judged by the tail of the whole, not by one that begins earlier, as for few samples.
    halves = [near(y[k::2], ref[k::2], labels[k::2]) for k in (0, 1)]
    reported = [merged([h], 0.5).expected() for h in halves]
    assert np.mean(reported) == pytest.approx(whole.expected(), rel=0.1)
    assert np.mean([h.expected() for h in halves]) > 1.2 * whole.expected()
    assert merged([merged([h], 0.5) for h in halves], 1.0).expected() == whole.expected()
