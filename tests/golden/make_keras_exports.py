"""Writes keras_exports.tar.xz: a Keras decoder block (causal and cross attention, GELU, norms) as tf2onnx writes it.

    pip install tensorflow-cpu tf2onnx && python tests/golden/make_keras_exports.py

Made with TensorFlow 2.21, Keras 3 and tf2onnx 1.17, for a batch of 2 and for any.
"""

from __future__ import annotations

import io
import lzma
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx


def block(tf: Any) -> Any:
    """x (N, 7, 8) attends to itself in causal order, and to m (N, 5, 8)."""
    layers = tf.keras.layers
    x, m = tf.keras.Input((7, 8), name="x"), tf.keras.Input((5, 8), name="m")
    h = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True))
    h = layers.LayerNormalization()(h + layers.MultiHeadAttention(2, 4)(h, m))
    wide = layers.Dense(12, activation=lambda t: tf.nn.gelu(t, approximate=True))(h)
    return tf.keras.Model([x, m], layers.LayerNormalization()(h + layers.Dense(8)(wide)))


def main() -> None:
    import tensorflow as tf  # type: ignore[import-not-found, unused-ignore]
    import tf2onnx  # type: ignore[import-not-found, unused-ignore]

    tf.keras.utils.set_random_seed(0)
    model, packed = block(tf), io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, batch in (("keras.fixed", 2), ("keras.any", None)):
            spec = [tf.TensorSpec((batch, n, 8), tf.float32, name=i) for i, n in (("x", 7), ("m", 5))]
            proto, _ = tf2onnx.convert.from_function(tf.function(lambda x, m: model([x, m])), spec, opset=17)
            for t in proto.graph.initializer:
                a = onnx.numpy_helper.to_array(t)
                if a.dtype == np.float32 and a.ndim == 2:
                    t.CopyFrom(onnx.numpy_helper.from_array((np.round(a * 16) / 16).astype(np.float32), t.name))
            data = proto.SerializeToString(deterministic=True)
            info = tarfile.TarInfo(f"{name}.onnx")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    Path(__file__).with_name("keras_exports.tar.xz").write_bytes(lzma.compress(packed.getvalue(), preset=9))


if __name__ == "__main__":
    main()
