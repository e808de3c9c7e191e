"""Fuzzing targets, a module each.

A module has ``seeds()``: inputs to begin with; ``mutate(data, rng)``: a changed input; ``one_input(data)``: the trial, which
raises where optdnn is at fault; and ``COVERED``: the packages whose coverage guides atheris.
"""
