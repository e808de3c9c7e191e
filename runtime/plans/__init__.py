"""Engines of several plans: by shape, and by the values of inputs."""
