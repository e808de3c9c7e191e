"""Other programs' interfaces: PyTorch, ONNX Runtime, the ONNX backend, DALI, Ray."""
