"""Makes the modules of tools, those of tools/tiny and the harness of the server tests importable."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
TOOLS = TESTS.parent / "tools"
sys.path[:0] = [str(path) for path in (Path(__file__).parent, TOOLS / "tiny", TOOLS, TESTS / "server")]
