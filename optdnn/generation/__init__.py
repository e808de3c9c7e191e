"""Text generation: the roles of an engine's inputs, steps on each target, and the generator above them."""
