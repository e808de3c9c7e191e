"""New weights in a built engine: what it records of its network, the model that it may hold, and its decisions."""
