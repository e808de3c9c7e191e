"""Products, convolutions and pools of 8-bit values."""
