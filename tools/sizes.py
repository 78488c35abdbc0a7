"""Checks the sizes of folders, files, functions and classes. Fails if one is over its limit.

A file has at most 500 lines, and a function 60. A folder of src has at most 15 modules, a folder of bench 12. In src a
function takes at most two positional arguments (after self or cls). Its other parameters are keyword-only, so that
calls name them. There are two exceptions:

- functions that Python or Triton calls with positional arguments: methods like `__call__`, kernels under `@triton.jit`,
  lambdas
- tensor operations that are read like a formula: functions of three or more tensors, such as query, key and value

A function can be exempted by a comment on the line of its `def`: `# sizes: <reason>`. Such a function is called by
another library with positional arguments, or is a command with one parameter for each flag. It takes any number of
positional arguments, and its lines are counted from the start of its body.

A class of src with behaviour has at most 12 attributes and 20 methods. A class has behaviour if it has a method with a
body, except properties, methods that Python calls (`__init__`) and pydantic validators. Its attributes are the fields
declared in its body and the attributes that its methods assign on self. Its methods are all functions in its body.
Inheritance is at most two deep, except for errors. No two classes of src have the same name.

`TODAY` has the current figures of all that is over a limit. They may only get smaller. An entry that is larger than the
true figure is an error too, so a change that makes a class smaller lowers or removes its entry.

Run: python tools/sizes.py [--top N] [--protocols]
"""

import argparse
import ast
import gc
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "tests", "tools", "bench", "examples")

MAX_FILES = {"src": 15, "bench": 12}
"""Maximum number of modules in a folder, without `__init__.py`."""
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_ARGUMENTS_BY_PLACE = 2
MIN_TENSORS_OF_MATHS = 3
MAX_ATTRIBUTES = 12
MAX_METHODS = 20
MAX_DEPTH = 2
EXCUSE = "# sizes: "

ERRORS = "motet.errors"
LIBRARY_BASES = (
    *("motet.api.http.schema.Schema", "motet.api.http.schema.OpenSchema"),
    "motet.api.openai.openai_request.OpenAIRequest",
)
"""Bases that are not a level of inheritance: pydantic's BaseModel with the project's settings, and the list of bases
that the bodies of chats and completions share."""
PROPERTIES = ("property", "cached_property", "functools.cached_property")
VALIDATORS = ("model_validator", "field_validator", "model_serializer", "field_serializer")

TODAY: Mapping[str, Mapping[str, int]] = {
    "attributes": {
        "Declaration": 20,
        "PackedModel": 14,
        "Service": 21,
        "VLLMGroup": 16,
    },
    "methods": {
        "VLLMGroup": 21,
    },
    "classes deep": {},
    "classes of this name": {
        "SamplingParams": 2,  # vLLM's name, which programs import from `motet`, and the parameters of a group
    },
}

Function = ast.FunctionDef | ast.AsyncFunctionDef
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
"""Fields with statements, of modules and statements."""


@dataclass(frozen=True)
class Size:
    """One figure of a folder, file, function or class."""

    where: str
    what: str
    value: int
    limit: int
    key: str = ""
    """Name of the folder or class in `TODAY`."""

    @property
    def over(self) -> bool:
        return self.value > self.limit


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def measure(path: Path, *, name: str) -> Iterator[Size]:
    """Yields the sizes of a file and of every function in it."""
    lines = path.read_text().splitlines()
    yield Size(name, "lines", len(lines), MAX_FILE_LINES)
    for function, is_bound in functions_in(parsed(path)):
        where = f"{name}:{function.lineno} {function.name}"
        excused = EXCUSE in lines[function.lineno - 1]
        first_line = function.body[0].lineno if excused else function.lineno
        last_line = function.end_lineno or first_line
        yield Size(where, "function lines", last_line - first_line + 1, MAX_FUNCTION_LINES)
        if name.startswith("src/") and not excused and not is_called_by_place(function):
            by_place = len(function.args.posonlyargs) + len(function.args.args) - is_bound
            yield Size(where, "arguments by place", by_place, MAX_ARGUMENTS_BY_PLACE)


def statements(node: ast.AST) -> list[tuple[ast.AST, ast.AST]]:
    """Returns every statement below a node, each with the node around it."""
    found = []
    waiting = [node]
    while waiting:
        around = waiting.pop()
        children = [child for block in BLOCKS for child in getattr(around, block, ())]
        found += [(child, around) for child in children]
        waiting += children
    return found


def functions_in(tree: ast.AST) -> Iterator[tuple[Function, bool]]:
    """Yields every function below a node, with True if its first parameter is self or cls."""
    for function, around in statements(tree):
        if isinstance(function, Function):
            is_static = any(isinstance(one, ast.Name) and one.id == "staticmethod" for one in function.decorator_list)
            yield function, isinstance(around, ast.ClassDef) and not is_static


def is_called_by_place(function: Function) -> bool:
    """Returns True for the two exceptions in the docstring of this module."""
    if "triton.jit" in map(ast.unparse, function.decorator_list):
        return True
    annotations = [ast.unparse(arg.annotation) for arg in function.args.args if arg.annotation]
    if sum("Tensor" in re.findall(r"\w+", annotation) for annotation in annotations) >= MIN_TENSORS_OF_MATHS:
        return True
    return function.name.startswith("__") and function.name.endswith("__") and function.name != "__init__"


def folder_sizes(names: Iterable[str]) -> Iterator[Size]:
    """Yields the number of modules in each folder that has a limit."""
    modules = Counter(str(Path(name).parent) for name in names if not name.endswith("/__init__.py"))
    for folder, count in sorted(modules.items()):
        limit = MAX_FILES.get(folder.partition("/")[0])
        if limit is not None:
            yield Size(folder, "files", count, limit, key=folder)


@dataclass(frozen=True)
class Class:
    """One class of src."""

    name: str
    module: str
    where: str
    node: ast.ClassDef
    bases: Sequence[str]
    """Full names of the base classes."""

    @property
    def full_name(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def is_protocol(self) -> bool:
        return any(base.endswith(".Protocol") for base in self.bases)

    @property
    def methods(self) -> list[Function]:
        return [node for node in self.node.body if isinstance(node, Function)]

    @property
    def attributes(self) -> set[str]:
        """Fields declared in the body, and attributes that methods assign on self."""
        declared = {
            node.target.id
            for node in self.node.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id != "_"
            if not ast.unparse(node.annotation).startswith("ClassVar")
        }
        assigned = {
            node.attr
            for method in self.methods
            for node in ast.walk(method)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if isinstance(node.value, ast.Name) and node.value.id == "self"
        }
        return declared | assigned

    @property
    def has_behaviour(self) -> bool:
        return not self.is_protocol and any(map(is_behaviour, self.methods))


def is_behaviour(method: Function) -> bool:
    """Returns True if a method has a body and is called by users of the class."""
    decorators = [ast.unparse(decorator).partition("(")[0] for decorator in method.decorator_list]
    is_special = method.name.startswith("__") and method.name.endswith("__")
    is_declared = any(name in (*PROPERTIES, *VALIDATORS) or name.endswith(".setter") for name in decorators)
    does = [node for node in method.body if not isinstance(node, ast.Pass) and not is_constant(node)]
    return bool(does) and not is_special and not is_declared


def is_constant(statement: ast.stmt) -> bool:
    """Returns True for a docstring and for `...`."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def classes_of(path: Path, *, source: Path) -> Iterator[Class]:
    """Yields the classes of a file, with the full names of their bases."""
    module = ".".join(path.relative_to(source).with_suffix("").parts)
    nodes = [node for node, _ in statements(parsed(path))]
    known = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            names = [ast.unparse(base.value if isinstance(base, ast.Subscript) else base) for base in node.bases]
            bases = [known.get(name.partition(".")[0], f"{module}.{name}") for name in names]
            where = f"{path.relative_to(source.parent)}:{node.lineno} {node.name}"
            yield Class(node.name, module, where, node, bases)


def class_sizes(classes: Sequence[Class]) -> Iterator[Size]:
    """Yields for each class its attributes, its methods, its depth, and the number of classes with its name."""
    names = Counter(one.name for one in classes)
    by_name = {one.full_name: one for one in classes}
    for one in classes:
        if one.has_behaviour:
            yield Size(one.where, "attributes", len(one.attributes), MAX_ATTRIBUTES, key=one.name)
            yield Size(one.where, "methods", len(one.methods), MAX_METHODS, key=one.name)
        ancestors = longest_line(one, by_name)
        if not any(ancestor.module == ERRORS for ancestor in ancestors):
            where = " < ".join([one.where, *(ancestor.name for ancestor in ancestors[1:])])
            yield Size(where, "classes deep", len(ancestors), MAX_DEPTH, key=one.name)
        yield Size(one.where, "classes of this name", names[one.name], 1, key=one.name)


def longest_line(one: Class, by_name: Mapping[str, Class]) -> list[Class]:
    """Returns a class and its ancestors in the project, along the longest line."""
    bases = [by_name[base] for base in one.bases if base in by_name and base not in LIBRARY_BASES]
    return [one, *max((longest_line(base, by_name) for base in bases), key=len, default=[])]


def problems_of(sizes: Iterable[Size], *, today: Mapping[str, Mapping[str, int]] = TODAY) -> list[str]:
    """Returns a line for each size over its limit, and for each entry of `today` above the true figure."""
    problems = []
    largest: dict[tuple[str, str], Size] = {}
    for size in sizes:
        ceiling = today.get(size.what, {}).get(size.key, size.limit)
        if size.value > ceiling:
            problems.append(f"{size.where}: {size.value} {size.what}, at most {ceiling}")
        place = size.what, size.key
        largest[place] = max(size, largest.get(place, size), key=lambda size: size.value)
    for what, ceilings in today.items():
        for key, ceiling in ceilings.items():
            size_now = largest.get((what, key))
            value = size_now.value if size_now else 0
            if value < ceiling:
                correction = f"lower it to {value}" if size_now and size_now.over else "remove it"
                problems.append(f"tools/sizes.py: TODAY has {ceiling} {what} for {key}, now {value}: {correction}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--top", type=int, default=0, help="also show the N largest of each kind")
    parser.add_argument("--protocols", action="store_true", help="also list the Protocol classes of src")
    options = parser.parse_args()
    gc.disable()  # syntax trees have many small objects, and most of the time would be garbage collection
    paths = {str(path.relative_to(ROOT)): path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))}
    classes = [
        one for name, path in paths.items() if name.startswith("src/") for one in classes_of(path, source=ROOT / "src")
    ]
    sizes = [size for name, path in paths.items() for size in measure(path, name=name)]
    sizes += [*folder_sizes(paths), *class_sizes(classes)]
    for what in dict.fromkeys(size.what for size in sizes):
        largest = sorted((size for size in sizes if size.what == what), key=lambda size: -size.value)
        for size in largest[: options.top]:
            print(f"{size.value:5} {what:20} {size.where}")
    protocols = [one.where for one in classes if one.is_protocol]
    if options.protocols:
        print(*protocols, sep="\n")
    problems = problems_of(sizes)
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    lines = sum(size.value for size in sizes if size.what == "lines")
    print(f"sizes: {len(paths)} files, {lines} lines, {len(protocols)} protocols, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
