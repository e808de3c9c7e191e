"""Measuring an engine on a GPU."""
