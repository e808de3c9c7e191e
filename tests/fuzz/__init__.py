"""Fuzzing: targets (``fuzz.targets``), structured mutations of their inputs, and the programs that run them (``python -m
tests.fuzz``)."""
