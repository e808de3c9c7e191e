"""The family of megakernels: products of a few rows and attention over a cache, as a sequence of jobs in one persistent launch."""
