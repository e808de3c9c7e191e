"""The language of generated kernel text, and what of it a file may hold."""
