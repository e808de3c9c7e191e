"""Text generation: what the inputs of a language model's engine are, steps on each target, and the generator above them."""
