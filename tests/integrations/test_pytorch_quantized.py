"""Networks quantized by PyTorch's own tools: scales are kept, and products run on 8 bits. Skipped without torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import optdnn
from optdnn.integrations.pytorch import from_torch

torch = pytest.importorskip("torch", reason="torch is not installed")


class FakeQuantized(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
    """A convolution after quantization-aware training: asymmetric activations, weights by channel."""

    def __init__(self, channels: int, filters: int, activation: tuple[float, int]):
        super().__init__()
        self.conv = torch.nn.Conv2d(channels, filters, 3, padding=1)
        self.activation = activation
        self.register_buffer("scale", self.conv.weight.detach().abs().amax((1, 2, 3)) / 127)
        self.register_buffer("zero", torch.zeros(filters, dtype=torch.int32))

    def forward(self, x: Any) -> Any:
        x = torch.fake_quantize_per_tensor_affine(x, *self.activation, 0, 255)
        w = torch.fake_quantize_per_channel_affine(self.conv.weight, self.scale, self.zero, 0, -128, 127)
        return torch.nn.functional.conv2d(x, w, self.conv.bias, padding=1)


def kinds(engine: optdnn.Engine) -> list[Any]:
    return [step.params["op"]["kind"] for step in engine.program.steps]  # type: ignore[index, call-overload]


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("target", ["cpu", "simulate"])
def test_fake_quantization(exporter: str, target: str) -> None:
    if exporter == "dynamo":
        pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    first, second = FakeQuantized(3, 32, (0.03, 128)), FakeQuantized(32, 32, (0.01, 0))
    net, x = torch.nn.Sequential(first, torch.nn.ReLU(), second).eval(), torch.randn(2, 3, 8, 8)
    engine = from_torch(net, x, exporter=exporter, target=target)
    (got,) = engine.run({engine.inputs[0].name: x}).values()
    with torch.no_grad():
        want = net(x).numpy()
    # A value on the border between two steps may be rounded either way: the difference is a step times a weight.
    assert np.abs(got - want).max() <= 0.01 * float(second.conv.weight.detach().abs().max()) + 1e-5
    if target == "simulate":
        assert kinds(engine).count("QuantizedConv") == 2


def test_torchao() -> None:
    """Post-training quantization by torch.export (pt2e), with the quantizer for x86."""
    pytest.importorskip("onnxscript")
    pytest.importorskip("torchao", reason="torchao is not installed")
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    torch.manual_seed(0)
    layers = [
        torch.nn.Conv2d(3, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(32, 32, 3, padding=1),
        torch.nn.ReLU(),
    ]
    net = torch.nn.Sequential(
        *layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(32, 10)
    ).eval()
    x, quantizer = torch.randn(2, 3, 8, 8), x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(torch.export.export(net, (x,)).module(), quantizer)
    prepared(x)
    converted = convert_pt2e(prepared)
    model = torch.onnx.export(converted, (x,), dynamo=True, verbose=False).model_proto
    engine = optdnn.build(model, target="simulate")
    (got,) = engine.run({engine.inputs[0].name: x}).values()
    want = converted(x).detach().numpy()
    assert np.abs(got - want).max() <= 0.02 * np.abs(want).max()
    assert kinds(engine).count("QuantizedConv") == 3
