"""PyTorch modules through torch's own exporters, and torch.compile. Skipped without torch."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from optdnn.errors import InputError, MissingDependency, ModelError, OptdnnError, UsageError
from optdnn.integrations import pytorch
from optdnn.integrations.pytorch import compile_backend, from_torch

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment, unused-ignore]

needs_torch = pytest.mark.skipif(torch is None, reason="torch is not installed")


def test_without_torch_it_says_what_to_install() -> None:
    if torch is not None:
        pytest.skip("torch is installed")
    with pytest.raises(MissingDependency, match=r"torch is needed to compile a PyTorch module.*\n.*pip install torch"):
        from_torch(None, ())


if torch is not None:

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)
            self.norm = torch.nn.BatchNorm2d(8)
            self.head = torch.nn.Linear(8, 5)

        def forward(self, image: Any) -> Any:
            return self.head(torch.relu(self.norm(self.conv(image))).mean((2, 3)))

    class Keywords(torch.nn.Module):
        def forward(
            self, a: Any, b: Any = None, *, c: Any, scale: float = 1.0, doubled: bool = False, **more: Any
        ) -> Any:
            total = a + 2 * c + more.get("d", 0)
            return (total if b is None else total * b) * scale * (2 if doubled else 1)

    class Two(torch.nn.Module):
        def forward(self, a: Any, b: Any) -> Any:
            return a @ b, (a * 2).to(torch.bfloat16)


def _net() -> Any:
    torch.manual_seed(0)
    return Net().eval()


def _of(module: Any, *args: Any) -> Any:
    with torch.no_grad():
        return module(*args)


@needs_torch
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_a_module_is_compiled(exporter: str) -> None:
    if exporter == "dynamo":
        pytest.importorskip("onnxscript")
    net, shapes = _net(), {"image": "1..2..4x3x8x8"}
    engine = from_torch(net, torch.randn(2, 3, 8, 8), shapes=shapes, exporter=exporter, target="reference")
    assert [s.name for s in engine.inputs] == ["image"]
    for n in (1, 3):
        x = torch.randn(n, 3, 8, 8)
        (y,) = engine.run({"image": x}).values()
        np.testing.assert_allclose(y, _of(net, x).numpy(), rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="outside of 1 to 4"):
        engine.run({"image": torch.randn(5, 3, 8, 8)})


@needs_torch
@pytest.mark.parametrize("times", [1, 2])
def test_differences_are_exported(times: int) -> None:
    """torch's older exporter has no ``diff``, which masks of language models use."""

    class Differences(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            steps = torch.diff(x, n=times, prepend=x[:, :1] - 1, dim=-1)
            return steps, torch.diff(x.float(), n=times, dim=0), (steps != 1).cumsum(-1)

    x = torch.tensor([[3, 5, 4], [7, 7, 9], [0, 2, 8]])
    engine = from_torch(Differences().eval(), x, exporter="torchscript", target="reference")
    for got, want in zip(engine.run({"x": x}).values(), Differences()(x), strict=True):
        np.testing.assert_array_equal(got, want.numpy())


@needs_torch
@pytest.mark.parametrize(
    "given", [{"nonlinearity": "relu"}, {"bidirectional": True, "batch_first": True, "bias": False}]
)
def test_plain_recurrent_layers_are_not_unrolled(given: dict[str, Any]) -> None:
    pytest.importorskip("onnxscript")
    net, x = torch.nn.RNN(6, 8, num_layers=2, **given).eval(), torch.randn(5, 5, 6)
    engine = from_torch(net, x, exporter="dynamo", target="reference")
    assert len(engine.program.steps) < 12
    for got, want in zip(engine.run({"input": x}).values(), _of(net, x), strict=True):
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-5, atol=1e-6)


@needs_torch
def test_several_inputs_and_names() -> None:
    a, b = torch.randn(2, 3), torch.randn(3, 4)
    engine = from_torch(Two().eval(), (a, b), output_names=["product", "twice"], target="reference")
    results = engine.run({"a": a, "b": b})
    np.testing.assert_allclose(results["product"], (a @ b).numpy(), rtol=1e-5, atol=1e-6)
    assert results["twice"].dtype.name == "bfloat16"


@needs_torch
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_keyword_arguments(exporter: str) -> None:
    """Tensors are inputs in the order of the arguments. All other arguments are fixed."""
    if exporter == "dynamo":
        pytest.importorskip("onnxscript")
    a, b, c, d = torch.randn(2, 3), torch.randn(3), torch.randn(2, 1), torch.randn(1, 3)
    given = {"c": c, "scale": 3.0, "doubled": True, "b": b, "d": d}
    shapes = {"a": "1..2..4x3", "c": "1..2..4x1"}
    engine = from_torch(Keywords().eval(), a, kwargs=given, shapes=shapes, exporter=exporter, target="reference")
    assert [s.name for s in engine.inputs] == ["a", "c", "b", "d"]
    for n in (2, 3):
        x, y = torch.randn(n, 3), torch.randn(n, 1)
        (got,) = engine.run({"a": x, "b": b, "c": y, "d": d}).values()
        np.testing.assert_allclose(got, _of(lambda x, y: (x + 2 * y + d) * b * 6, x, y).numpy(), rtol=1e-5, atol=1e-6)
    named = from_torch(
        Keywords().eval(), kwargs={"a": a, "c": c}, input_names=["one", "two"], exporter=exporter, target="reference"
    )
    (got,) = named.run({"one": a, "two": c}).values()
    np.testing.assert_allclose(got, (a + 2 * c).numpy(), rtol=1e-6)


@needs_torch
@pytest.mark.parametrize(
    ("given", "hint"),
    [
        (lambda x: torch.jit.trace(_net(), x), "give the module that was traced or scripted"),
        (lambda x: torch.relu, "give a module whose forward calls it"),
        (lambda x: "weights.pt", "load its weights with load_state_dict"),
    ],
)
def test_objects_that_are_no_module_get_advice(given: Any, hint: str) -> None:
    x = torch.randn(1, 3, 8, 8)
    with pytest.raises(UsageError, match=rf"from_torch takes a torch\.nn\.Module, not \w+\n  hint: .*{hint}"):
        from_torch(given(x), x)


@needs_torch
@pytest.mark.parametrize("batch", [1, "1..2..4"])
def test_an_exported_program_is_compiled(batch: Any) -> None:
    pytest.importorskip("onnxscript")
    x, sizes = torch.randn(2, 3, 8, 8), {0: torch.export.Dim.AUTO}
    program = torch.export.export(_net(), (x,), dynamic_shapes=({},) if batch == 1 else (sizes,))
    shapes = None if batch == 1 else {"image": f"{batch}x3x8x8"}
    engine = from_torch(program, x, shapes=shapes, target="reference")
    for given in [x] if batch == 1 else [x, torch.randn(4, 3, 8, 8)]:
        np.testing.assert_allclose(engine(given), _of(_net(), given), rtol=1e-3, atol=1e-5)


@needs_torch
def test_examples_are_tensors() -> None:
    with pytest.raises(UsageError, match=r"a NumPy array \[2, 3\]\n  hint: give tensors: torch.from_numpy"):
        from_torch(_net(), np.zeros((2, 3)))


@needs_torch
def test_a_branch_on_data_gets_advice() -> None:
    pytest.importorskip("onnxscript")

    class Branch(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x + 1 if x.sum() > 0 else x - 1

    with pytest.raises(ModelError, match=r"torch cannot export Branch .*\n  hint: write a branch .*torch\.where"):
        from_torch(Branch().eval(), torch.ones(2), exporter="dynamo")


@needs_torch
def test_refusals() -> None:
    x = torch.randn(1, 3, 8, 8)
    with pytest.raises(UsageError, match="in training mode"):
        from_torch(Net(), x)
    with pytest.raises(UsageError, match=r"takes a torch.nn.Module, not function"):
        from_torch(_net, x)
    with pytest.raises(UsageError, match=r"no input 'y'.*\n.*image"):
        from_torch(_net(), x, shapes={"y": (1,)})
    with pytest.raises(UsageError, match="2 input_names are given for 1"):
        from_torch(_net(), x, input_names=["a", "b"])
    with pytest.raises(UsageError, match="2 input_names are given for 3"):
        from_torch(Keywords().eval(), (x, x), kwargs={"c": x}, input_names=["a", "b"])
    with pytest.raises(UsageError, match="keyword argument 'c' holds tensors in a tuple"):
        from_torch(Keywords().eval(), x, kwargs={"c": (x, x)})
    with pytest.raises(UsageError, match="exporter 'magic'"):
        from_torch(_net(), x, exporter="magic")
    with pytest.raises(UsageError, match=r"Net does not run on the example inputs: .*4 channels"):
        from_torch(_net(), torch.randn(1, 4, 8, 8), target="reference")
    with pytest.raises(
        UsageError, match=r"Net does not run on the example inputs: .*\n  hint: .*from_torch\(module, x\)"
    ):
        from_torch(_net())


@needs_torch
def test_torch_compile() -> None:
    net = _net()
    compiled = torch.compile(net, backend=compile_backend, options={"target": "reference"})
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        first = compiled(x)
        assert isinstance(first, torch.Tensor)
        torch.testing.assert_close(first, net(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(compiled(x[:1]), net(x[:1]), rtol=1e-4, atol=1e-5)
        net.head.weight.mul_(2)  # a constant of the engine has changed, so a new engine is built
        assert not torch.allclose(net(x), first)
        torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-5)


@needs_torch
def test_torch_compile_is_for_inference() -> None:
    compiled = torch.compile(_net(), backend=compile_backend, options={"target": "reference"})
    torch._dynamo.reset()
    with torch.enable_grad(), pytest.raises(Exception, match="the backend optdnn is for inference"):
        compiled(torch.randn(2, 3, 8, 8))


@needs_torch
@pytest.mark.parametrize("norm_first", [False, True])
def test_torch_compile_of_an_encoder_layer(norm_first: bool) -> None:
    """In inference, torch calls it as one operator, which its exporter does not know."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    activation = "gelu" if norm_first else "relu"
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=norm_first, activation=activation)
    net = layer.eval()
    compiled = torch.compile(net, backend=compile_backend, options={"target": "reference"})
    x, padded = torch.randn(2, 7, 32), torch.arange(7)[None] >= torch.tensor([[7], [4]])
    later = torch.triu(torch.full((7, 7), float("-inf")), 1)
    for masks in ({}, {"src_key_padding_mask": padded}, {"src_mask": later}):
        with torch.no_grad():
            got, want = compiled(x, **masks), net(x, **masks)
        kept = ~padded if "src_key_padding_mask" in masks else torch.ones(2, 7, dtype=torch.bool)
        torch.testing.assert_close(got[kept], want[kept], rtol=1e-4, atol=1e-5)


@needs_torch
def test_torch_compile_with_dynamic_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo then passes sizes as integers, and floats such as a norm's epsilon as tensors."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    monkeypatch.setattr(pytorch, "ENGINES", 2)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16, eps=0.25), torch.nn.GELU()).eval()
    seen: list[Any] = []

    def backend(graph: Any, example: Any, **options: Any) -> Any:
        seen.append(compile_backend(graph, example, **options))
        return seen[-1]

    compiled = torch.compile(net, backend=backend, options={"target": "reference"}, dynamic=True)
    with torch.no_grad():
        for n in (2, 3, 5, 4):
            x = torch.randn(n, 8)
            torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-5)
    assert len(seen[0]._engines) == 2


@needs_torch
def test_torch_compile_by_name() -> None:
    if "optdnn" not in torch.compiler.list_backends():
        pytest.skip("optdnn is not installed here, so torch does not see its entry point")
    torch._dynamo.reset()
    net, x = _net(), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        got = torch.compile(net, backend="optdnn", options={"target": "reference"})(x)
        torch.testing.assert_close(got, net(x), rtol=1e-4, atol=1e-5)


@needs_torch
@pytest.mark.parametrize(
    "given", [{}, {"bias": False, "stride": (1, 2, 1), "padding": 1, "groups": 2, "dilation": (1, 1, 2)}]
)
def test_a_convolution_of_volumes(given: dict[str, Any]) -> None:
    """Torch's translator gives a convolution without a bias a bias of two axes."""
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    net, x = torch.nn.Conv3d(4, 6, 3, **given).eval(), torch.randn(2, 4, 5, 6, 7)
    engine = from_torch(net, x, exporter="dynamo", target="reference")
    (got,) = engine.run({engine.inputs[0].name: x.numpy()}).values()
    np.testing.assert_allclose(got, _of(net, x).numpy(), atol=2e-6)


@needs_torch
@pytest.mark.parametrize(
    ("shape", "out"),
    [
        ((2, 3, 6, 8), (1, 1)),
        ((3, 6, 8), (1, 1)),
        ((2, 3, 6, 8), (3, 2)),
        ((3, 6, 8), (2, 8)),
        ((2, 3, 4, 6, 6), (2, 3, 1)),
    ],
)
def test_adaptive_max_pooling(shape: tuple[int, ...], out: tuple[int, ...]) -> None:
    """Torch's translator does not have it."""
    pytest.importorskip("onnxscript")
    pool = (torch.nn.AdaptiveMaxPool2d if len(out) == 2 else torch.nn.AdaptiveMaxPool3d)(out, return_indices=True)
    torch.manual_seed(0)
    x = torch.randn(*shape)
    engine = from_torch(pool.eval(), x, exporter="dynamo", target="reference")
    got = engine.run({engine.inputs[0].name: x.numpy()})
    for made, expected in zip(got.values(), pool(x), strict=True):
        np.testing.assert_array_equal(made, expected.numpy())


@needs_torch
def test_windows_of_different_sizes_are_refused() -> None:
    pytest.importorskip("onnxscript")
    with pytest.raises(ModelError, match=r"\[7, 8\] to \[2, 2\] has windows of different sizes"):
        from_torch(torch.nn.AdaptiveMaxPool2d(2).eval(), torch.randn(1, 3, 7, 8), exporter="dynamo")


@needs_torch
@pytest.mark.parametrize("true", [False, True])
def test_whether_all_elements_are_true(true: bool) -> None:
    """Torch's translator does not have it."""
    pytest.importorskip("onnxscript")

    class AllTrue(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.where(torch._is_all_true(x > 0), x, -x)

    x = torch.tensor([1.0, 2.0 if true else -2.0])
    engine = from_torch(AllTrue().eval(), x, exporter="dynamo", target="reference")
    (got,) = engine.run({engine.inputs[0].name: x.numpy()}).values()
    np.testing.assert_array_equal(got, _of(AllTrue(), x).numpy())


@needs_torch
def test_cumulative_products() -> None:
    """Torch's translator does not have them: the transmittance of NeRF (Mildenhall et al., 2020)."""
    pytest.importorskip("onnxscript")

    class Products(torch.nn.Module):
        def forward(self, rays: Any, columns: Any, counts: Any, number: Any) -> Any:
            wide = torch.cumprod(counts, -1, dtype=torch.float32)
            return rays.cumprod(1), columns.cumprod(0), counts.cumprod(-1), wide, number.cumprod(0)

    torch.manual_seed(0)
    operands = (
        torch.randn(2, 7),
        torch.randn(5, 3, 2),
        torch.randint(-3, 4, (2, 8), dtype=torch.int32),
        torch.tensor(3.0),
    )
    engine = from_torch(Products().eval(), operands, exporter="dynamo", target="reference")
    got = engine.run({port.name: x.numpy() for port, x in zip(engine.inputs, operands, strict=True)})
    for made, expected in zip(got.values(), Products()(*operands), strict=True):
        assert made.dtype == expected.numpy().dtype
        np.testing.assert_allclose(made, expected.numpy(), rtol=1e-6)


@needs_torch
def test_cumulative_products_over_an_axis_of_unknown_size_are_refused() -> None:
    pytest.importorskip("onnxscript")

    class Products(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.cumprod(x, 1)

    with pytest.raises(ModelError, match=r"cumulative product along axis 1 .* needs an axis of known size"):
        from_torch(Products().eval(), torch.randn(2, 7), exporter="dynamo", shapes={"x": "2x2..7..9"})


@needs_torch
def test_grouped_products_of_experts_get_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise RuntimeError("No ONNX function found for <OpOverload(op='transformers.grouped_mm_fallback')>")

    monkeypatch.setattr("optdnn.integrations.pytorch._by_dynamo", fails)
    with pytest.raises(ModelError, match=r"hint: .*model.set_experts_implementation\('batched_mm'\)"):
        from_torch(_net(), torch.ones(1, 3, 8, 8), exporter="dynamo")


@needs_torch
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("before", ["grouped_mm", "eager"])
def test_experts_are_exported_in_another_form(before: str, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a model of transformers has it; the model is as before then, also if the export fails."""
    seen: list[str] = []

    class Experts(torch.nn.Module):
        config = SimpleNamespace(_experts_implementation=before)

        def set_experts_implementation(self, name: str) -> None:
            self.config._experts_implementation = name

        def forward(self, x: Any) -> Any:
            seen.append(self.config._experts_implementation)
            if fails:
                raise RuntimeError("no")
            return x + 1

    module = Experts().eval()
    with pytest.raises(OptdnnError) if fails else nullcontext():
        from_torch(module, torch.ones(2, 3), exporter="torchscript", target="reference")
    assert set(seen) >= {"batched_mm"}
    assert module.config._experts_implementation == before


@pytest.mark.parametrize("shape", [(3, 5, 8), (2, 3, 4, 5, 8)])
@pytest.mark.parametrize("mask", ["none", "causal", "boolean", "added"])
def test_attention_of_three_and_five_axes(shape: tuple[int, ...], mask: str) -> None:
    """Torch's translator to ONNX supports only four axes."""
    pytest.importorskip("onnxscript")
    given = {"causal": {"is_causal": True}, "boolean": {"attn_mask": torch.ones(5, 5).tril() > 0}}
    given["added"] = {"attn_mask": torch.linspace(-1, 1, 25).reshape(5, 5), "scale": 0.3}

    class Attending(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **given.get(mask, {}))

    torch.manual_seed(0)
    inputs = tuple(torch.randn(*shape) for _ in range(3))
    engine = from_torch(Attending().eval(), inputs, target="reference", exporter="dynamo")
    feeds = {s.name: t.numpy() for s, t in zip(engine.inputs, inputs, strict=True)}
    (got,) = engine.run(feeds).values()
    np.testing.assert_allclose(got, _of(Attending(), *inputs).numpy(), atol=2e-6)
