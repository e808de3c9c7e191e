"""Calls of vendor libraries."""
