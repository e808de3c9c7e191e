"""Products with packed weights."""
