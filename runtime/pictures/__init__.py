"""Pictures in, answers out: the engine's port for pictures, files, and streams of them through an engine."""
