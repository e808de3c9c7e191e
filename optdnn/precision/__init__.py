"""Automatic precision: which op in which precision, so that the engine is as fast as it can be within a bound on accuracy."""
