"""The cpu target: libraries for the parts of a network, and the operators that they must not run."""
