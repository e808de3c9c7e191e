"""The engine file: its format, and the checks of its contents."""
