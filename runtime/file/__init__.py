"""The engine file: its format, and the checks of what it holds."""
