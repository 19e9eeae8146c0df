"""Drift of a model's images from those of the base, on the same prompts and the same noise."""
