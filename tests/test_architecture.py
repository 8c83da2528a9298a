"""The shape of the source: imports point down, `import ds4` stays light, files stay small, no hidden switches, no
loops in kernels that the compiler misreads."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "ds4"
TOP = "ds4"

# Room (or single module) -> the other rooms that it may import. `ds4` is the package itself: version and public API.
ALLOWED = {
    "errors": set(),
    "process": set(),
    "files": {"errors"},
    "gguf": {"errors", "files"},
    "tokenizer": {"errors", "gguf"},
    "ops": {"errors"},
    "chat": {"errors"},
    "model": {"errors", "gguf", "ops"},
    "engine": {"errors", "gguf", "ops", "model", "tokenizer"},
    "kvstore": {"errors", "gguf", "engine"},
    "quantize": {TOP, "errors", "process", "files", "gguf", "ops", "model", "tokenizer", "chat", "engine"},
    "evals": {"errors", "files", "tokenizer", "chat", "engine"},
    "server": {TOP, "errors", "process", "gguf", "tokenizer", "chat", "engine", "kvstore"},
    "cli": {TOP, "errors", "process", "files", "gguf", "tokenizer", "chat", "engine", "kvstore", "quantize", "evals"},
    "bench": {TOP, "errors", "process", "files", "gguf", "tokenizer", "chat", "engine"},
    TOP: {"errors", "gguf", "tokenizer", "chat", "engine"},
}

# What only the server, the command line and the tests bring along.
HEAVY = ["fastapi", "uvicorn", "pydantic", "prometheus_client", "llguidance", "rich", "typer", "prompt_toolkit"]
HEAVY += ["transformers", "openai", "anthropic", "triton", "numba", "matplotlib"]
LIGHT_ROOMS = ["errors", "files", "gguf", "tokenizer", "ops", "chat", "model", "engine", "kvstore"]

# The modules that may import triton at their top, and be imported only where a CUDA device is used.
TRITON = ("ds4.ops.kernels.", "ds4.model.cuda")

MAX_LINES = 600

# File -> environment variables that it may read: a secret that need not stand in a command line, and where the system
# keeps a user's files.
ENVIRONMENT = {"process.py": {None}, "server/main.py": {"DS4_API_KEY"}, "cli/repl.py": {"XDG_STATE_HOME"}}


def source_files() -> list[Path]:
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 20
    return files


def module_name(file: Path) -> str:
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    """The room of a dotted name: `ds4.gguf.file` -> `gguf`; a name of the package itself (`ds4.load`) -> `ds4`."""
    first = module.split(".")[1] if "." in module else TOP
    return first if (SOURCE / first).is_dir() or (SOURCE / f"{first}.py").is_file() else TOP


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each import of our own, wherever it stands (in functions and for type checks too)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; write it absolutely"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == TOP)


@pytest.mark.parametrize("file", source_files(), ids=module_name)
def test_imports_point_down(file: Path) -> None:
    here = room(module_name(file))
    for line, name in imported(ast.parse(file.read_text(encoding="utf-8"))):
        there = room(name)
        assert there == here or there in ALLOWED[here], f"{file}:{line}: {here} must not import {there} ({name})"


def test_every_room_has_a_place() -> None:
    rooms = {room(module_name(file)) for file in source_files()}
    assert rooms <= set(ALLOWED), "a new room needs a line in ALLOWED, and a place in the list of rooms"


def test_the_allowed_imports_have_no_cycle() -> None:
    """Repeatedly takes away the rooms whose imports are all gone."""
    left = {name: set(below) for name, below in ALLOWED.items()}
    while left:
        free = {name for name, below in left.items() if not below & set(left)}
        assert free, f"these import each other: {sorted(left)}"
        left = {name: below for name, below in left.items() if name not in free}


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_ds4_loads_nothing_heavy() -> None:
    """Nor does the use of any public name; they are imported on first use."""
    loaded = run("import sys, ds4; [getattr(ds4, name) for name in ds4.__all__]; print(*sys.modules)").split()
    assert {"ds4", "ds4.chat"} <= set(loaded)
    assert not set(HEAVY) & set(loaded)


def test_the_engine_and_all_below_work_without_the_heavy_packages() -> None:
    names = [name for name in map(module_name, source_files()) if name == TOP or room(name) in LIGHT_ROOMS]
    names = [name for name in names if not name.startswith(TRITON)] + ["ds4.ops.kernels.planes"]
    assert len(names) > 15
    run(f"""
import importlib, sys
sys.modules.update(dict.fromkeys({HEAVY!r}))  # None there makes an import fail
for name in {names!r}:
    importlib.import_module(name)
""")


def test_chat_needs_the_standard_library_only() -> None:
    for file in sorted((SOURCE / "chat").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                top = name.split(".")[0]
                assert top == TOP or top in sys.stdlib_module_names, f"{file}:{node.lineno}: imports {name}"


def test_no_file_is_long() -> None:
    root = SOURCE.parent.parent
    files = [*source_files(), *sorted((root / "tests").rglob("*.py")), *sorted((root / "tools").rglob("*.py"))]
    lengths = {str(file.relative_to(root)): len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def environment_reads(tree: ast.AST) -> Iterator[tuple[int, str | None]]:
    """Line and variable of each use of the environment; None if the variable is no literal."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}

    def literal(node: ast.AST | None) -> str | None:
        return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None

    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            for alias in node.names:
                if alias.name in ("environ", "environb", "getenv", "getenvb"):
                    yield node.lineno, None
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os"):
            continue
        parent = parents[node]
        if node.attr in ("getenv", "getenvb"):
            yield node.lineno, literal(parent.args[0]) if isinstance(parent, ast.Call) and parent.args else None
        elif node.attr in ("environ", "environb"):
            call = parents.get(parent)
            if isinstance(parent, ast.Subscript):
                yield node.lineno, literal(parent.slice)
            elif (
                isinstance(parent, ast.Attribute) and parent.attr == "get" and isinstance(call, ast.Call) and call.args
            ):
                yield node.lineno, literal(call.args[0])
            else:
                yield node.lineno, None


def test_no_environment_variable_steers_the_program() -> None:
    for file in source_files():
        allowed = ENVIRONMENT.get(file.relative_to(SOURCE).as_posix(), set())
        for line, variable in environment_reads(ast.parse(file.read_text(encoding="utf-8"))):
            assert variable in allowed, f"{file}:{line}: reads {variable or 'the environment'}; make it an option"


def test_no_global_statement() -> None:
    for file in source_files():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            assert not isinstance(node, ast.Global), f"{file}:{node.lineno}: module-level state changes"


def assignments(tree: ast.AST) -> Iterator[tuple[int, str, str | None]]:
    """Line and name of each variable set, in order, and the name of its new value if that is another variable."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=True))
                for name, value in pairs:
                    if isinstance(name, ast.Name) and isinstance(value, ast.Name):
                        found.append((node.lineno, name.id, value.id))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.append((node.lineno, node.id, None))
    plain = {(line, name) for line, name, value in found if value}
    yield from sorted({item for item in found if item[2] or item[:2] not in plain}, key=lambda item: item[:2])


def lost_assignments(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each `a = b` in a loop of a Triton function before which a and b are the same value.

    To find what a loop changes, Triton goes through its body once with the values of before the loop and looks which
    variables then have another value. Here a does not, so it keeps the value of before, whatever becomes of b. The
    interpreter does not show it.
    """
    for function in ast.walk(tree):
        if not (isinstance(function, ast.FunctionDef) and "jit" in "".join(map(ast.unparse, function.decorator_list))):
            continue
        for loop in ast.walk(function):
            if not isinstance(loop, ast.For | ast.While):
                continue
            value_of: dict[str, object] = {}
            for line, name, value in assignments(function):
                if line < loop.lineno:
                    value_of[name] = value_of.get(value, value) if value else (name, line)
            for line, name, value in assignments(loop):
                if value and value_of.get(name, name) == value_of.get(value, value):
                    yield line, name


def test_kernels_lose_no_assignment() -> None:
    for file in source_files():
        for line, name in lost_assignments(ast.parse(file.read_text(encoding="utf-8"))):
            pytest.fail(f"{file}:{line}: Triton ignores this: before the loop, {name} is already this variable's value")


# --- the checks themselves ----------------------------------------------------------------------------------------


def test_the_import_check_sees_every_form() -> None:
    code = (
        "import ds4.server.app\nfrom ds4 import cli, load\ndef f():\n    from ds4.kvstore import store\nimport ds44\n"
    )
    assert [(line, room(name)) for line, name in imported(ast.parse(code))] == [
        (1, "server"),
        (2, "cli"),
        (2, TOP),
        (4, "kvstore"),
    ]


@pytest.mark.parametrize(
    ("code", "variable"),
    [
        ("os.environ['A']", "A"),
        ("os.environ.get('A', 1)", "A"),
        ("os.getenv('A')", "A"),
        ("os.environ[a]", None),
        ("dict(os.environ)", None),
        ("from os import environ", None),
        ("f = os.getenv", None),
    ],
)
def test_the_environment_check_sees_every_form(code: str, variable: str | None) -> None:
    assert [found for _, found in environment_reads(ast.parse(code))] == [variable]


@pytest.mark.parametrize(
    ("before", "inside", "lost"),
    [
        ("a = b", "a = b", ["a"]),
        ("a, c = b, b", "if c > 0:\n            a, d = c, d + 1\n        c = c + 1", ["a"]),
        ("a = b\n    b = b + 1", "a = b", []),
        ("a = b + 0", "a = b", []),
        ("a = b", "a = a + b", []),
        ("a, c = f(b)", "a = c\n        c = c + 1", []),
    ],
)
def test_the_check_of_kernels_sees_what_is_lost(before: str, inside: str, lost: list[str]) -> None:
    code = f"@triton.jit\ndef f(b, n):\n    {before}\n    for i in range(n):\n        {inside}\n    return a"
    assert [name for _, name in lost_assignments(ast.parse(code))] == lost
