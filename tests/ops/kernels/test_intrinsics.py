"""What launches that overlap rely on, read from the source: neither the interpreter nor plain launches show it."""

from __future__ import annotations

import ast
from pathlib import Path

from ds4.ops import kernels

TREES = [ast.parse(path.read_text(encoding="utf-8")) for path in Path(kernels.__file__).parent.glob("*.py")]
FUNCTIONS = [node for tree in TREES for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def launched_with_overlap() -> set[str]:
    """Names of the kernels whose launches take `**overlap(...)`."""
    found = set()
    for node in (node for tree in TREES for node in ast.walk(tree)):
        if isinstance(node, ast.Call) and any(
            word.arg is None and isinstance(word.value, ast.Call) and ast.unparse(word.value.func).endswith("overlap")
            for word in node.keywords
        ):
            assert isinstance(node.func, ast.Subscript), ast.unparse(node.func)
            found.add(ast.unparse(node.func.value))
    return found


def test_kernels_that_may_start_early_wait_first() -> None:
    """Before anything else: the kernel before may still write what this one reads, and read what it writes."""
    waiting = [f for f in FUNCTIONS if "PDL" in {a.arg for a in f.args.args} and f.name != "behind"]
    assert len(waiting) > 15
    assert launched_with_overlap() == {f.name for f in waiting}  # others do not know the arguments of such a launch
    for f in waiting:
        first = f.body[1] if ast.get_docstring(f) else f.body[0]
        assert ast.unparse(first) == "behind(PDL)", f.name
