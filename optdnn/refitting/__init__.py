"""New weights in a built engine: the record of its network, the model that it may hold, and its decisions."""
