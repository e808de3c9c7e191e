"""The language of generated kernel text, and the kernels that a file may hold."""
