"""Comparing engines with models, with other engines and with rivals."""
