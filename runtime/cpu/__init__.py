"""The CPU libraries that run an optimized graph: OpenVINO and ONNX Runtime, behind one small interface."""
