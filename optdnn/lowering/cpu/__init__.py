"""The cpu target: which library runs which part of a network, and what it may not run."""
