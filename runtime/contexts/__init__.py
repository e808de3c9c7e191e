"""One thread's runs of an engine: inputs and outputs, buffers, state."""
