"""`flowalign doctor`: what is wrong with a run or a reward, before training starts.

Three ideas, each a file that knows only those before it: count (memory and operations, by running
the real code on tensors without data: `meter`, `count`), time (the rates of a GPU: `pace`), advise
(what does not fit, and what to change: `advise`). Beside them, what a few images show (`live`).
`flowalign.checks` finds what is wrong with the config. docs/doctor.md explains each finding.
"""
