"""The steps of a program, and who runs them on the host."""
