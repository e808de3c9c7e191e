"""Candidates measured side by side, each in a separate process."""
