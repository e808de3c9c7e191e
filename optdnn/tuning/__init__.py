"""Tuning: candidates are checked and timed, and a build uses the fastest."""
