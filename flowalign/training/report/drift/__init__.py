"""Drift of a model's images from those of the base, on the same prompts and the same noise.

`statistics` measures images, `compare` says how far they have moved, `monitor` samples the base
beside a run. What is said of it is the business of `flowalign.training.report.alarm`.
"""
