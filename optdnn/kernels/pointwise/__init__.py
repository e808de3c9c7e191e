"""Pointwise operators, epilogues and prologues."""
