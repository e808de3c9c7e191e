"""Dynamic shapes: plans for ranges of sizes, and the profiles they are made for."""
