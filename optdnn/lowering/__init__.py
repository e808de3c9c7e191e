"""Lowering: from an optimized graph to a program."""
