"""`flowalign doctor`: what is wrong with a run or a reward, before training starts.

Three ideas, each a file that knows only those before it: count (memory and operations, by running
the real code on tensors without data: `meter`, `count`), time (the rates of a GPU: `pace`), advise
(what does not fit, and what to change: `advise`). Beside them, what is wrong with the numbers of a
config (`plan`), and what a few images show (`live`). docs/doctor.md explains each finding.
"""
