"""Rewrite rules that several passes share."""
