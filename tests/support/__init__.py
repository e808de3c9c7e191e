"""Shared parts of the tests: builders of small graphs, checks that every pass must meet, and stand-ins."""
