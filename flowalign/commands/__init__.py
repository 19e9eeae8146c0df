"""The commands, one file each. Only they wire the parts of a run together."""
