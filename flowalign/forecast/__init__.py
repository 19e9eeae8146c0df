"""What a run will need, before any weight is loaded: memory, time, downloads, and its plan.

`estimate` runs the library's own passes on a model without data (`meter`).
`budget` says whether the memory suffices. `pace` turns operations into hours, at the rates of the
GPUs in `gpus` or at rates that were measured; `costs` knows the rewards.
"""
