"""Benchmarks and long checks: one harness, a table of workloads, one format of results. ``python -m benchmarks`` lists them."""
