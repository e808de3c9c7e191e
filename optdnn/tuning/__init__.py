"""Tuning: candidates are timed, and the fastest right ones are kept."""
