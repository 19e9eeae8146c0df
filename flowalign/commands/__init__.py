"""The commands, one file each. Only they wire the parts of a run together."""

from pathlib import Path

CONFIGS = Path(__file__).parent / "configs"
SD35 = CONFIGS / "sd35_medium"  # has configs for all stages
