"""Generators give the tokens that a computation without caches gives, for each form of model, on each target."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from generating import CAPACITY, MORE, PROMPTS, engine, expected, model

import optdnn
from optdnn.errors import InputError, RunError, UsageError
from optdnn.generation.generator import HostCaches, OneTokenPrefill
from optdnn.generation.lengths import StepLengths
from optdnn.generation.ports import Counter, ports_of
from optdnn.models import trained
from optdnn.types import Array, TensorSpec

pytest.importorskip("onnxruntime", reason="the cpu extra is not installed")

CUDA = pytest.param("cuda", marks=pytest.mark.hopper)
DRAWN: dict[str, Any] = {"temperature": 0.9, "top_k": 12, "top_p": 0.95, "seed": 5}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OneTokenPrefill)
        yield


@pytest.mark.parametrize(
    ("form", "target", "sample"),
    [
        ("llama", "reference", False), ("llama", "cpu", True), ("llama", "simulate", True), ("phi2", "reference", True),
        ("mistral", "simulate", False), ("growing", "reference", False), ("growing", "cpu", True), ("decoder", "reference", True),
        ("lengths", "reference", False),
        ("decoder", "simulate", False),
        *(pytest.param(form, "cuda", sample, marks=pytest.mark.hopper)
          for form in ("llama", "decoder") for sample in (True, False)),
        *(pytest.param(form, "cuda", True, marks=pytest.mark.hopper) for form in ("phi2", "mistral")),
    ],
)  # fmt: skip
def test_one_sequence(form: str, target: str, sample: bool) -> None:
    """Greedy and sampled tokens, and a conversation that continues."""
    generator = optdnn.Generator(engine(form, target, sample=sample))
    for prompt in PROMPTS[::2]:
        assert generator.generate(prompt, max_new_tokens=6) == expected(form, prompt, 6)
    prompt = PROMPTS[2]
    first = generator.generate(prompt, max_new_tokens=5, **DRAWN)
    assert first == expected(form, prompt, 5, **DRAWN)
    assert generator.lengths == (len(prompt) + 5,)
    assert generator.generate(MORE[0], max_new_tokens=3, extend=True) == expected(form, prompt + first + MORE[0], 3)


@pytest.mark.parametrize(
    ("form", "target", "sample"),
    [
        ("llama", "reference", False), ("llama", "simulate", True), ("growing", "reference", True), ("lengths", "simulate", True),
        pytest.param("llama", "cuda", True, marks=pytest.mark.hopper),
        pytest.param("phi2", "cuda", False, marks=pytest.mark.hopper),
    ],
)  # fmt: skip
def test_a_batch_of_lengths(form: str, target: str, sample: bool) -> None:
    """Sequences of a batch are independent: their lengths, settings and ends differ."""
    generator = optdnn.Generator(engine(form, target, batch=3, sample=sample))
    plain = [expected(form, p, 7) for p in PROMPTS]
    stops = (plain[0][2], plain[2][4])
    seen: list[tuple[int, int]] = []
    found = generator.generate(
        PROMPTS, max_new_tokens=7, stop_tokens=stops, temperature=[0, 1.2, 0], top_p=[1, 0.9, 1], seed=[1, 2, 3],
        on_token=lambda b, token: seen.append((b, token)),
    )  # fmt: skip
    wanted = [expected(form, p, 7, stops=stops, temperature=t, top_p=q, seed=s)
              for p, t, q, s in zip(PROMPTS, (0, 1.2, 0), (1, 0.9, 1), (1, 2, 3), strict=True)]  # fmt: skip
    assert found == wanted
    assert len(found[0]) < 7
    assert [[t for b, t in seen if b == k] for k in range(3)] == found
    assert generator.lengths == tuple(len(p) + len(f) for p, f in zip(PROMPTS, found, strict=True))
    again = generator.generate(MORE, max_new_tokens=3, extend=True)
    assert again == [expected(form, p + f + m, 3) for p, f, m in zip(PROMPTS, found, MORE, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["reference", "simulate", CUDA])
def test_a_stream_that_is_left_early(target: str) -> None:
    generator = optdnn.Generator(engine("llama", target))
    whole = expected("llama", PROMPTS[0], 8)
    stream = generator.stream(PROMPTS[0], max_new_tokens=30)
    assert [next(stream) for _ in range(4)] == whole[:4]
    assert generator.lengths == (len(PROMPTS[0]) + 4,)
    assert generator.generate([2], max_new_tokens=2, extend=True) == expected("llama", [*PROMPTS[0], *whole[:4], 2], 2)
    assert list(stream) == [], "the call after it has ended it"
    generator.reset()
    assert generator.lengths == ()
    assert generator.generate(PROMPTS[0], max_new_tokens=8, extend=True) == whole, "nothing was held"


@pytest.mark.slow
def test_fewer_prompts_than_the_engine_takes() -> None:
    generator = optdnn.Generator(engine("lengths", "simulate", batch=3))
    assert generator.generate(PROMPTS[:2], max_new_tokens=3) == [expected("llama", p, 3) for p in PROMPTS[:2]]
    assert len(generator.lengths) == 2
    with pytest.raises(InputError, match="4 prompts are given; the engine takes 3 sequences"):
        generator.generate([[1]] * 4, max_new_tokens=1)


def test_elastic_caches_are_enlarged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optdnn.generation.generator.LEAST_CAPACITY", 8)
    generator = optdnn.Generator(engine("llama", "reference"))
    assert generator.capacity is None
    prompt = PROMPTS[0]
    first = generator.generate(prompt, max_new_tokens=3)
    held: Any = generator._steps
    assert held.capacity == 8
    assert generator.generate([1, 2, 3], max_new_tokens=2, extend=True) == expected(
        "llama", [*prompt, *first, 1, 2, 3], 2
    )
    held = generator._steps
    assert held.capacity == 16
    bounded = optdnn.Generator(engine("llama", "reference"), capacity=10)
    with pytest.raises(InputError, match="need 11 positions; the caches have 10"):
        bounded.generate(PROMPTS[0], max_new_tokens=9)


def test_prompts_are_read_in_few_steps_of_few_lengths() -> None:
    """Steps are powers of two, with padding: 9 tokens are a step of 16, 20 tokens one of 16 and one of 4. Less room gives
    smaller steps."""
    generator = optdnn.Generator(engine("llama", "simulate"))
    lengths = generator._lengths
    assert (
        lengths.step(9, 60),
        lengths.step(20, 60),
        lengths.step(4, 60),
        lengths.step(9, 12),
        lengths.step(5, 6),
    ) == (16, 16, 4, 8, 5)
    with pytest.raises(InputError, match="no room to pad"):
        lengths.step(3, 0)
    prompt = [t % 80 for t in range(37)]
    assert generator.generate(prompt, max_new_tokens=2) == expected("llama", prompt, 2)


def test_steps_have_lengths_that_a_profile_takes() -> None:
    ranges = [{"n": SimpleNamespace(min=a, max=b)} for a, b in ((1, 1), (16, 24))]
    made = SimpleNamespace(profiles=ranges, target="cuda:sm_90a")
    ports = SimpleNamespace(tokens=SimpleNamespace(shape=("b", "n"), name="t"), caches=())
    lengths = StepLengths(made, ports)  # type: ignore[arg-type]
    assert lengths.most == 24
    assert [lengths.step(n, 60) for n in (1, 3, 16, 20, 90)] == [1, 16, 16, 16, 16]
    assert lengths.step(20, 15) == 1, "there is no room to pad it"
    assert lengths.step(9, 9, exact=True) == 1


def test_a_full_cache_refuses_before_anything_is_written() -> None:
    generator = optdnn.Generator(engine("llama", "simulate"))
    first = generator.generate(PROMPTS[0], max_new_tokens=4)
    steps: Any = generator._steps
    before = {n: a.copy() for n, a in steps._caches.items()}
    for prompt, count in (([1] * (CAPACITY - 6), 1), ([1], CAPACITY - 6)):
        with pytest.raises(
            InputError, match=rf"after 7 earlier ones and {count} new ones need {CAPACITY + 1} positions"
        ):
            generator.generate(prompt, max_new_tokens=count, extend=True)
    assert all((before[n] == a).all() for n, a in steps._caches.items())
    assert generator.generate([1], max_new_tokens=2, extend=True) == expected("llama", [*PROMPTS[0], *first, 1], 2)
    full = [t % 80 for t in range(CAPACITY)]
    assert generator.generate(full, max_new_tokens=1) == expected("llama", full, 1), "the last position is used"


@pytest.mark.slow
def test_padding_without_room_is_refused_before_anything_is_written() -> None:
    """The longest sequence is full before the prompt of another one has been read."""
    generator = optdnn.Generator(engine("llama", "simulate", batch=3))
    long = [t % 80 for t in range(CAPACITY - 4)]
    first = generator.generate([long, [7], [9]], max_new_tokens=1)
    with pytest.raises(InputError, match="no room to pad"):
        generator.generate([[1, 2, 3], [5] * 30, [4]], max_new_tokens=1, extend=True)
    assert generator.lengths == (len(long) + 1, 2, 2)
    again = generator.generate([[1], [2], [3]], max_new_tokens=1, extend=True)
    assert again == [
        expected("llama", p + f + [m], 1) for p, f, m in zip((long, [7], [9]), first, (1, 2, 3), strict=True)
    ]


def test_a_failure_takes_the_caches_with_it() -> None:
    generator = optdnn.Generator(engine("llama", "reference"))
    generator.generate(PROMPTS[0], max_new_tokens=2)
    steps: Any = generator._steps
    for array in steps._caches.values():
        array[...] = np.nan
    with pytest.raises(RunError, match="hold NaN"):
        generator.generate([1], max_new_tokens=2, extend=True)
    assert generator.lengths == ()
    assert generator.generate(PROMPTS[0], max_new_tokens=2) == expected("llama", PROMPTS[0], 2)


@pytest.mark.parametrize(
    ("prompt", "more", "error", "message"),
    [
        ([3, 80], {}, InputError, "prompt 0 holds token 80; the vocabulary has 80"),
        ([-1], {}, InputError, "prompt 0 holds token -1"),
        ([], {}, InputError, "prompt 0 is empty"),
        ([[1], [2]], {}, InputError, "2 prompts are given; the engine takes 1 sequences"),
        ("text", {}, UsageError, "a list of tokens, not text"),
        ([1.5], {}, UsageError, "a list of tokens"),
        ([1], {"max_new_tokens": 0}, UsageError, "max_new_tokens must be a positive integer, not 0"),
        ([1], {"stop_tokens": 2}, UsageError, "stop_tokens must be a list of tokens, not 2"),
        ([1], {"temperature": -0.5}, UsageError, "temperature must be 0 or more, not -0.5"),
        ([1], {"temperature": float("nan")}, UsageError, "temperature must be"),
        ([1], {"top_k": 1.5}, UsageError, "top_k must be"),
        ([1], {"top_p": 0}, UsageError, "top_p must be above 0 and at most 1, not 0"),
        ([1], {"top_p": [0.5, 0.5]}, UsageError, "top_p has 2 numbers for 1 sequences"),
        ([1], {"seed": 1 << 64}, UsageError, "seed must be an integer of 64 bits"),
        ([1], {"temperature": "hot"}, UsageError, "temperature must be"),
    ],
)  # fmt: skip
def test_calls_that_do_not_fit(prompt: Any, more: dict[str, Any], error: type[Exception], message: str) -> None:
    generator = optdnn.Generator(engine("llama", "simulate"))
    with pytest.raises(error, match=message):
        generator.generate(prompt, **{"max_new_tokens": 3, **more})
    assert generator.lengths == ()


def test_a_cache_that_does_not_fit_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = optdnn.Generator(engine("llama", "simulate"))

    def no_memory(*arguments: Any) -> None:
        raise MemoryError("Unable to allocate 128 GiB")

    monkeypatch.setattr("optdnn.generation.generator.HostSteps", no_memory)
    with pytest.raises(RunError, match=r"a cache of 3 positions does not fit in memory: Unable to allocate"):
        generator.generate([1], max_new_tokens=3)


def test_caches_beyond_the_machines_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optdnn.generation.steps.memory_bytes", lambda: 1000)
    generator = optdnn.Generator(engine("llama", "simulate"))
    with pytest.raises(RunError, match=r"the caches of \d+ positions take 0\.0 GiB; the machine has 0\.0 GiB"):
        generator.generate([1], max_new_tokens=3)
    monkeypatch.setattr("optdnn.generation.steps.memory_bytes", lambda: None)
    assert len(generator.generate([1], max_new_tokens=3)) == 3


def test_lengths_that_an_engine_cannot_tell_apart() -> None:
    """The cache grows, and there is no mask: sequences of a batch must have equal lengths."""
    made = onnx.ModelProto()
    made.CopyFrom(model("growing"))
    generator = optdnn.Generator(
        optdnn.build(made, target="reference", values={"position_ids": [[0]]}, shapes={"input_ids": (None, 1)})
    )
    with pytest.raises(InputError, match="prompts of different lengths \\(1 to 2 tokens\\)"):
        generator.generate([[1], [2, 3]], max_new_tokens=1)
    generator.generate([[1], [2]], max_new_tokens=1)
    with pytest.raises(UsageError, match="extend takes a prompt for each of the 2 sequences held, not 1"):
        generator.generate([1], max_new_tokens=1, extend=True)
    with pytest.raises(UsageError, match="stream takes one prompt"):
        generator.stream([[1], [2]], max_new_tokens=1)  # type: ignore[list-item]


def test_one_number_of_positions_held_is_that_of_all_sequences() -> None:
    """Also with a mask. A single number for the positions after a step is the largest."""
    ports = ports_of(
        engine("llama", "reference"), dict.fromkeys(("tokens", "mask", "positions", "held", "logits")), None
    )
    assert ports.ragged
    one = TensorSpec("one", np.dtype(np.int64), ())
    assert not replace(ports, counters=(Counter(one, with_length=False, more=0),)).ragged
    assert replace(ports, counters=(Counter(one, with_length=True, more=0),)).ragged


def test_states_of_a_fixed_size_beside_caches_are_refused() -> None:
    """A convolution's last positions (LFM 2), or caches of windows (Gemma 2): padded prompts would change them."""
    made = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        model (int64[b, n] input_ids, float[b, 2, p, 4] past_key, float[b, 2, 3] past_conv)
            => (float[b, n, 9] logits, float[b, 2, t, 4] present_key, float[b, 2, 3] present_conv)
            <float[1, 9] w = {1, 2, 3, 4, 5, 6, 7, 8, 9}, int64[8] pads = {0, 0, 0, 0, 0, 0, 1, 0}> {
            logits = Gather(w, input_ids)  present_conv = Neg(past_conv)  present_key = Pad(past_key, pads) }""")
    with pytest.raises(UsageError, match=r"past_conv: .* is a state of a fixed size"):
        optdnn.Generator(optdnn.build(made, target="reference"))


def test_engines_that_generate_nothing() -> None:
    plain = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        scores (int64[b, n] input_ids, float[b, n] extra) => (float[b, n] logits)
        { c = Cast<to = 1>(input_ids) logits = Add(c, extra) }""")
    made = optdnn.build(plain, target="reference")
    with pytest.raises(UsageError, match="no key-value cache"):
        optdnn.Generator(made)
    with pytest.raises(UsageError, match="tokens='ids': the engine has no such port"):
        optdnn.Generator(made, tokens="ids")
    with pytest.raises(UsageError, match="no such output or input"):
        optdnn.Generator(made, state={"present": "past"})
    decoding = engine("decoder", "reference")
    with pytest.raises(UsageError, match=r"begin: int64\[1\], whose role is unknown"):
        optdnn.Generator(optdnn.build(_renamed("at", "begin"), target="reference"))
    assert optdnn.Generator(optdnn.build(_renamed("at", "begin"), target="reference"), held="begin").capacity == 32
    with pytest.raises(UsageError, match="have 32 positions, not 16"):
        optdnn.Generator(decoding, capacity=16)
    with pytest.raises(UsageError, match="capacity must be a positive integer"):
        optdnn.Generator(decoding, capacity=0)
    with pytest.raises(UsageError, match="at least 4 tokens a step"):
        optdnn.Generator(engine("llama", "simulate", rows=4))


def _renamed(name: str, to: str) -> onnx.ModelProto:
    made = onnx.ModelProto()
    made.CopyFrom(model("decoder"))
    for port in made.graph.input:
        port.name = to if port.name == name else port.name
    for node in made.graph.node:
        node.input[:] = [to if n == name else n for n in node.input]
    return made


def test_a_slow_prefill_is_reported() -> None:
    with pytest.warns(OneTokenPrefill, match=r"one token a step.*--shape token="):
        shown = repr(optdnn.Generator(engine("decoder", "reference")))
    assert "fixed caches, 32 positions; sampling in the engine; prompts one token a step; 0 sequences held" in shown


@pytest.mark.parametrize("sample", [True, False])
def test_logits_without_a_token(sample: bool) -> None:
    broken = onnx.ModelProto()
    broken.CopyFrom(model("growing"))
    (head,) = (w for w in broken.graph.initializer if w.name == "head")
    weights: Array = onnx.numpy_helper.to_array(head).copy()
    weights[:, 3] = np.nan
    head.CopyFrom(onnx.numpy_helper.from_array(weights, "head"))
    generator = optdnn.Generator(optdnn.build(broken, target="reference", sample="logits" if sample else None))
    with pytest.raises(RunError, match="the logits of sequence 0 hold NaN"):
        generator.generate([1, 2], max_new_tokens=2)


def test_a_model_that_takes_fewer_positions() -> None:
    generator = optdnn.Generator(optdnn.build(trained.language().path, target="reference"))
    with pytest.raises(RunError, match=r"hint: the caches hold 256 positions; .* --capacity 256"):
        generator.generate([5] * 250, max_new_tokens=10)
    with pytest.raises(InputError, match="need 259 positions; the caches have 256"):
        optdnn.Generator(generator.engine, capacity=256).generate([5] * 250, max_new_tokens=10)


def test_a_path_is_loaded(tmp_path: Any) -> None:
    engine("llama", "simulate").save(tmp_path / "model.engine")
    generator = optdnn.Generator(tmp_path / "model.engine")
    assert generator.vocabulary == 80
    assert generator.generate(PROMPTS[0], max_new_tokens=3) == expected("llama", PROMPTS[0], 3)


@pytest.mark.hopper
def test_growing_caches_on_a_gpu_are_reported() -> None:
    ranged = optdnn.DimRange(0, 4, 32)
    shapes = {"input_ids": (1, optdnn.DimRange(1, 1, 4)), "past_key_values.0.key": (1, None, ranged, None)}
    made = optdnn.build(model("growing"), target="cuda", tactics="heuristic", shapes=shapes)
    with pytest.warns(HostCaches, match="each length has its own plan"):
        generator = optdnn.Generator(made)
    assert generator.generate(PROMPTS[0], max_new_tokens=3) == expected("growing", PROMPTS[0], 3)


@pytest.mark.hopper
@pytest.mark.parametrize("form", ["llama", "decoder"])
def test_caches_on_a_gpu_are_written_where_they_are(form: str) -> None:
    """Also in fp16, in which the engine and the host draw the same tokens."""
    found = []
    for sample in (True, False):
        generator = optdnn.Generator(engine(form, "cuda", sample=sample, half=True))
        found.append([generator.generate(p, max_new_tokens=12, temperature=0.8, seed=2) for p in PROMPTS])
        steps: Any = generator._steps
        assert all(steps._caches[0][n] is steps._caches[1][n] for n in steps._caches[0])
    assert found[0] == found[1]


@pytest.mark.slow
def test_engines_of_several_devices_keep_the_caches() -> None:
    found = []
    for devices in (1, 2):
        generator = optdnn.Generator(optdnn.build(model("decoder"), target="simulate", devices=devices))
        found.append([generator.generate(prompt, max_new_tokens=6) for prompt in ([3, 4, 5], [7])])
    assert found[0] == found[1]


@pytest.mark.hopper
def test_plans_of_prompts_may_not_keep_caches_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan for one token keeps the caches in place. Steps of more tokens write elsewhere, and the results are copied."""
    from optdnn.generation.gpu_steps import GpuSteps

    kept, asked = GpuSteps._in_place, []

    def some(self: GpuSteps, inputs: dict[str, Any]) -> dict[str, str]:
        asked.append(inputs[self.ports.tokens.name].shape[1])
        return kept(self, inputs) if asked[-1] == 1 else {}

    monkeypatch.setattr(GpuSteps, "_in_place", some)
    generator = optdnn.Generator(engine("lengths", "cuda"))
    prompt = [t % 80 for t in range(11)]
    assert generator.generate(prompt, max_new_tokens=4) == expected("lengths", prompt, 4)
    assert max(asked) > 1
