"""Launches: their plans, their waits, and their graphs."""
