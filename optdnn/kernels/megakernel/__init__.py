"""The family of megakernels: products of a few rows and attention over a cache, job after job, in one persistent launch."""
