"""Matrix products of floats."""
