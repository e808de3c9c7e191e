"""Fuzzing targets, one module each.

A module has ``seeds()``: the first inputs; ``mutate(data, rng)``: a changed input; ``one_input(data)``: the trial, which raises
an error if optdnn has a fault; and ``COVERED``: the packages whose coverage guides atheris.
"""
