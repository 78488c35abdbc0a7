"""Checks that files and functions are small enough to read: fails if one is over the limit.

A file has at most 500 lines, a function 60. In src a function takes at most two arguments by place (besides self or
cls); the others are keyword-only, so that a call says what they are. Free are

- what Python or Triton calls by place: methods like `__call__`, kernels under `@triton.jit`; lambdas;
- tensor maths, which is read like a formula: a function of three tensors or more, such as query, key and value.

A function that another library calls by place, or whose parameters fill it (a command with one a flag), says so on the
line of its `def`: `# sizes: <reason>`. It may take any number of them, and its lines count from the body on.

Run: python tools/sizes.py [--top N]
"""

import argparse
import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "tests", "tools", "bench", "examples")

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_ARGUMENTS_BY_PLACE = 2
MIN_TENSORS_OF_MATHS = 3
EXCUSE = "# sizes: "

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Size:
    """One figure of one file or function."""

    where: str
    what: str
    value: int
    limit: int

    @property
    def over(self) -> bool:
        return self.value > self.limit


def measure(path: Path, *, name: str) -> Iterator[Size]:
    """Yields the sizes of a file and of every function in it."""
    text = path.read_text()
    lines = text.splitlines()
    yield Size(name, "lines", len(lines), MAX_FILE_LINES)
    for function, is_bound in functions_in(ast.parse(text)):
        where = f"{name}:{function.lineno} {function.name}"
        excused = EXCUSE in lines[function.lineno - 1]
        first_line = function.body[0].lineno if excused else function.lineno
        last_line = function.end_lineno or first_line
        yield Size(where, "function lines", last_line - first_line + 1, MAX_FUNCTION_LINES)
        if name.startswith("src/") and not excused and not is_called_by_place(function):
            by_place = len(function.args.posonlyargs) + len(function.args.args) - is_bound
            yield Size(where, "arguments by place", by_place, MAX_ARGUMENTS_BY_PLACE)


def functions_in(node: ast.AST) -> Iterator[tuple[Function, bool]]:
    """Every function below a node, and True with it if its first parameter is self or cls."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            is_static = "staticmethod" in map(ast.unparse, child.decorator_list)
            yield child, isinstance(node, ast.ClassDef) and not is_static
        yield from functions_in(child)


def is_called_by_place(function: Function) -> bool:
    """True if a function may take all arguments by place, as the top of this file says."""
    if "triton.jit" in map(ast.unparse, function.decorator_list):
        return True
    annotations = [ast.unparse(arg.annotation) for arg in function.args.args if arg.annotation]
    if sum("torch.Tensor" in annotation for annotation in annotations) >= MIN_TENSORS_OF_MATHS:
        return True
    return function.name.startswith("__") and function.name.endswith("__") and function.name != "__init__"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--top", type=int, default=0, help="also show the N largest of each kind")
    top = parser.parse_args().top
    sizes = [
        size
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for size in measure(path, name=str(path.relative_to(ROOT)))
    ]
    for what in ("lines", "function lines", "arguments by place"):
        largest = sorted((s for s in sizes if s.what == what), key=lambda s: -s.value)
        for size in largest[:top]:
            print(f"{size.value:5} {what:18} {size.where}")
    too_large = [size for size in sizes if size.over]
    for size in too_large:
        print(f"{size.where}: {size.value} {size.what}, at most {size.limit}", file=sys.stderr)
    files = sum(s.what == "lines" for s in sizes)
    print(f"sizes: {files} files, {sum(s.value for s in sizes if s.what == 'lines')} lines, {len(too_large)} too large")
    return 1 if too_large else 0


if __name__ == "__main__":
    sys.exit(main())
