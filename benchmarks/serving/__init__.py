"""The parts of ``python -m benchmarks serve``: clients in separate processes, and a plain server to compare with."""
