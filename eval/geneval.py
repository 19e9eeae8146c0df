"""GenEval's rules: `judge` an image, `summarize` a test (the module is the reward's)."""

from flowalign.rewards.geneval_judge import Verdict, judge, summarize

__all__ = ["Verdict", "judge", "summarize"]
