"""Convolutions of floats, and the operators that share a launch with them."""
