"""Launches: their plans, what they wait for, and their graphs."""
