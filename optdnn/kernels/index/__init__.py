"""Operators written as a loop over the coordinates of their result."""
