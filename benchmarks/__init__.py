"""Benchmarks and long checks: one harness, a table of workloads, one format of results.

``python -m benchmarks`` lists the kinds of measurement, ``python -m benchmarks KIND --help`` the options of one.
"""
