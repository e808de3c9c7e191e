"""The steps of a program, and their executors on the host."""
