"""Where the tools of ds4-tiny live."""

from pathlib import Path

TINY = Path(__file__).parents[2] / "tools" / "tiny"
