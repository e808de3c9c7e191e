"""What passes have in common: patterns, facts, guards, precision."""
