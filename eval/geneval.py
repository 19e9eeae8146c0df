"""GenEval's rules: `judge` an image, `summarize` a test (they live beside the reward)."""

from flowalign.rewards.geneval_judge import Verdict, judge, summarize

__all__ = ["Verdict", "judge", "summarize"]
