"""Operators that move elements: views, gathers, padding."""
