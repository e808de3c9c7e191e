"""Pictures in, answers out: what an engine's pictures and answers are, reading files, and streams of them through an engine."""
