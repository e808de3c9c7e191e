"""Fuzzing: targets (``fuzz.targets``), structured mutations of their inputs, and what runs them (``python -m tests.fuzz``)."""
