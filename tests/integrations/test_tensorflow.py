"""Keras and TensorFlow models through tf2onnx.

Their pinned dependencies conflict with others, so these tests need a separate environment:

    python3 -m venv tf && tf/bin/pip install tensorflow-cpu tf2onnx -e '.[cpu]'
    tf/bin/pytest tests/integrations/test_tensorflow.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import optdnn


@pytest.fixture(scope="module")
def tf() -> Any:
    pytest.importorskip("tf2onnx", reason="tf2onnx is not installed")
    return pytest.importorskip("tensorflow", reason="TensorFlow is not installed")


@pytest.mark.parametrize("target", ["reference", "simulate", "cpu"])
def test_a_keras_model(tf: Any, target: str) -> None:
    import tf2onnx

    if target == "cpu":
        pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    layers = tf.keras.layers
    tf.keras.utils.set_random_seed(0)
    inputs = tf.keras.Input((16, 16, 3), name="image")
    x = layers.Conv2D(8, 3, padding="same", use_bias=False)(inputs)
    x = layers.Activation("relu")(layers.BatchNormalization()(x))
    x = layers.DepthwiseConv2D(3, strides=2, padding="same")(x)
    x = layers.GlobalAveragePooling2D()(x)
    model = tf.keras.Model(inputs, layers.Dense(5, activation="softmax")(x))
    spec = (tf.TensorSpec((None, 16, 16, 3), tf.float32, name="image"),)
    proto, _ = tf2onnx.convert.from_function(tf.function(lambda image: model(image)), spec, opset=17)
    engine = optdnn.build(proto, target=target, shapes={"image": "1..2..4x16x16x3"})
    pictures = np.random.default_rng(0).standard_normal((3, 16, 16, 3)).astype(np.float32)
    (got,) = engine.run({"image": pictures}).values()
    np.testing.assert_allclose(got, model(pictures).numpy(), rtol=1e-4, atol=1e-5)
