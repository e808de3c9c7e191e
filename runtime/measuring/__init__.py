"""Latencies, accuracy, and facts about the machine."""
