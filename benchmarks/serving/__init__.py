"""The parts of ``python -m benchmarks serve``: clients in processes of their own, and a plain server to compare with."""
