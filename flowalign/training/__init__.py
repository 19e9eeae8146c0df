"""The path of a run: rollout -> prepare -> learn -> report."""
