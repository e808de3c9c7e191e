"""Pooling."""
