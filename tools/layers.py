"""Checks that layers import only from lower layers, and that imports have no cycles. Fails if a check finds an error.

`LAYERS` is the architecture. A layer is a module or package. It may import from itself, from the layers in its row, and
from `EVERYBODY_SEES`. No layer may import `testing`, which is for tests and benchmarks. Only the modules in `ONLY_IN`
may import heavy packages, so that the command line starts quickly and `import motet` loads no torch. Imports inside
functions are checked too.

A cycle is a chain of imports at the top of modules that leads back to its first module. Imports under
`if TYPE_CHECKING` count as well, because the modules of such a cycle can only be understood together.

Run: python tools/layers.py [--depth FOLDER]
"""

import argparse
import ast
import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"

EVERYBODY_SEES = (
    "types",
    "engine_info",
    "sampling_defaults",
    "metrics.stats",
    "ids",
    "errors",
    "settings",
    "log",
    "loop_budget",
    "system",
    "session_ids",
    "block_names",
    "merge",
)

BELOW_API = (
    "batch.lines",
    "control",
    "policies",
    "text",
    "grammar",
    "engine",
    "engine_orders",
    "engines.upstream.text_source",
    "engines.wire",
    "transfer.ticket",
    "metrics",
    "models.adapter_file",
    "models.checkpoint",
    "models.folder",
    "models.gguf_files.gguf_header",
    "models.memory_file",
    "models.safetensors_header",
    "models.trainer_group",
    "tracing",
)
API_SHARED = (
    *("api.control_bodies", "api.http", "api.known_groups", "api.served", "api.tensor_bodies", "api.service"),
    "api.batches.store",
)
API_GENERATION = (*API_SHARED, "api.generation")

LAYERS: dict[str, tuple[str, ...]] = {
    "types": ("transfer.ticket", "tracing.context"),
    "engine_info": ("transfer.ticket",),
    "sampling_defaults": ("transfer.ticket",),
    "metrics.stats": ("transfer.figures", "metrics.declare"),
    "tracing": (),
    "tracing.context": (),
    "ids": (),
    "errors": (),
    "settings": ("metrics.declare", "transfer.ticket"),
    "log": (),
    "loop_budget": (),
    "session_ids": (),
    "block_names": (),
    "system": (),
    "merge": (),
    "kv_events": (),
    "metrics": (),
    "metrics.declare": (),
    "metrics.routing": ("metrics.declare", "transfer.ticket"),
    "transfer": (),
    "transfer.ticket": (),
    "transfer.orders": ("transfer.ticket",),
    "transfer.figures": ("transfer.orders",),
    "models": (),
    "models.regular_files": (),
    "models.safetensors_header": ("models.regular_files",),
    "models.gguf_files.gguf_header": ("models.regular_files", "models.safetensors_header"),
    "models.folder": ("models.gguf_files.gguf_header", "models.regular_files", "models.safetensors_header"),
    "models.adapter_file": ("models.regular_files", "models.safetensors_header"),
    "models.memory_file": ("models.regular_files",),
    "models.checkpoint": ("models.folder", "models.memory_file", "models.safetensors_header"),
    "engine_orders": ("models.checkpoint", "transfer.ticket"),
    "engine": ("engine_orders", "transfer.ticket"),
    "engines.wire": ("engine", "transfer.ticket"),
    "engines.refusals": ("engines.wire",),
    "engines.http": ("engines.refusals",),
    "engines.openai": ("engines.wire",),
    "engines.server_engine": ("engines.wire",),
    "engines.remote": (
        "tracing.context",
        "engine",
        "engine_orders",
        "engines.server_engine",
        "engines.http",
        "engines.refusals",
        "engines.wire",
        "models.checkpoint",
        "transfer.ticket",
    ),
    "engines.upstream": (
        "engine",
        "engines.http",
        "engines.openai",
        "engines.refusals",
        "engines.wire",
        "tracing.context",
    ),
    "engines.upstream.text_source": ("engines.wire", "tracing.context"),
    "engines.vllm": (
        "engine",
        "engines.server_engine",
        "engines.http",
        "engines.openai",
        "engines.refusals",
        "engines.wire",
        "metrics.routing",
        "tracing.context",
        "transfer.ticket",
    ),
    "engines.native": (
        "engine",
        "engine_orders",
        "engines.wire",
        "transfer",
        "kv_events",
        "grammar",
        "text.tokenizer",
        "models.adapter_file",
        "models.checkpoint",
        "models.folder",
        "models.gguf_files.gguf_header",
        "models.memory_file",
        "models.file_reading",
        "models.safetensors_header",
        "models.trainer_group",
        "models.weight_digest",
    ),
    "batch": ("engines.http", "engines.refusals"),
    "batch.lines": (),
    "policies": (),
    "text": ("policies", "engine", "transfer.ticket"),
    "grammar": ("text.tokenizer", "text.tools.patterns"),
    "routing": (
        "engine",
        "engines.upstream.text_source",
        "transfer.ticket",
        "metrics.declare",
        "metrics.routing",
        "tracing",
    ),
    "control": (
        "engine",
        "engine_orders",
        "engines.server_engine",
        "engines.wire",
        "routing",
        "metrics.routing",
        "models",
    ),
    # Inside api: http, then what all routes share, then generation, then the dialects; app and openapi see all of it.
    "api": BELOW_API,
    "api.http": ("engines.wire", "metrics", "tracing", "transfer.ticket"),
    "api.known_groups": ("api.http",),
    "api.tensor_bodies": ("engines.wire", "models.checkpoint", "models.memory_file", "models.safetensors_header"),
    "api.served": ("api.http.long_work", "engine", "engines.upstream.text_source", "grammar", "text"),
    "api.batches.records": (),
    "api.batches.store": (
        "api.http",
        "metrics.batch_figures",
        "api.batches.records",
        "api.batches.folder",
        "api.batches.usage",
    ),
    "api.batches.tables": ("api.batches.records",),
    "api.batches.folder": ("api.batches.records", "api.batches.tables", "batch.line_file"),
    "api.batches.usage": (),
    "api.batches": (
        *API_SHARED,
        "batch.lines",
        "batch.line_file",
        "batch.line_reader",
        "engines.refusals",
        "metrics.batch_figures",
    ),
    "api.service": (*API_SHARED, *BELOW_API),
    "api.control_bodies": (*API_SHARED, *BELOW_API),
    "api.generation": (*API_SHARED, *BELOW_API),
    "api.texts": (*API_GENERATION, *BELOW_API),
    "api.openai": (*API_GENERATION, "api.texts", *BELOW_API),
    "api.anthropic": (*API_GENERATION, "api.openai", *BELOW_API),
    "api.vllm": (*API_GENERATION, "api.openai", "api.anthropic", *BELOW_API),
    "api.trainers": (*API_SHARED, *BELOW_API),
    "api.sglang": (*API_GENERATION, "api.trainers", *BELOW_API),
    "api.worker": (*API_GENERATION, *BELOW_API),
    "api.operators": (*API_SHARED, *BELOW_API),
    "api.page": API_SHARED,
    "deploy": (
        "api",
        "control",
        "text",
        "engine",
        "engine_orders",
        "engines",
        "routing",
        "transfer",
        "metrics",
        "models",
        "kv_events",
        "tracing",
    ),
    "__main__": ("cli",),
    "inspect_provider": (),
    "llm": (
        "deploy.child",
        "engines.openai",
        "engines.refusals",
        "models.model_source",
        "models.progress",
        "models.progress_bars",
        "models.smollm2",
    ),
    "weights": ("models.adapter_file", "models.checkpoint", "models.memory_file"),
    "testing": ("engine", "engine_orders", "transfer", "kv_events", "models.adapter_file", "models.checkpoint"),
    "cli": (
        "batch",
        "deploy",
        "api",
        "text",
        "engine",
        "engines",
        "routing",
        "transfer",
        "metrics",
        "models",
        "tracing",
    ),
}

ONLY_IN: dict[str, tuple[str, ...]] = {
    "torch": ("engines.native", "models.convert", "weights"),
    "transformers": ("engines.native", "models.convert", "llm.tokenizers"),
    "triton": ("engines.native.cuda.kernels",),
    "aiohttp": ("batch.sender", "engines.http"),
    "zmq": ("engines.native", "transfer", "kv_events"),
    "nixl": ("transfer",),
    "nixl_cu13": ("transfer",),
    "llguidance": ("grammar",),
    "re2": ("grammar", "policies"),
    "referencing": ("grammar",),
    "openai_harmony": ("text.harmony",),
    "opentelemetry": ("tracing.export",),
    "ray": tuple(f"deploy.ray.{module}" for module in ("app", "deployments", "foreground", "request_router")),
    "fastapi": ("api", "deploy"),
    "starlette": ("api",),
    "psutil": ("system.machine",),
    "uvicorn": ("deploy",),
    "typer": ("cli",),
    "rich": ("cli", "llm.progress_bar", "models.progress_bars"),
    "prompt_toolkit": ("cli",),
}

KNOWN_CYCLES: dict[frozenset[str], str] = {}
"""Cycles that are allowed: their modules, with the reason. A change that removes a cycle also removes its entry."""

Graph = Mapping[str, set[str]]
"""Modules, each with the modules that it imports at its top. Names are without the leading `motet.`."""


@dataclass(frozen=True)
class Import:
    """Module `importer` imports `target`. Names of Motet's modules are without the leading `motet.`."""

    importer: str
    target: str
    line: int
    at_top: bool = True
    """False if the import is inside a function."""


@cache
def all_imports(source: Path) -> Mapping[Path, Sequence[Import]]:
    """Returns the imports of each file."""
    gc.disable()  # syntax trees have many small objects, and most of the time would be garbage collection
    return {path: list(imports_of(path, source=source)) for path in sorted(source.rglob("*.py"))}


def imports_of(path: Path, *, source: Path = SOURCE) -> Iterator[Import]:
    """Yields every import in a file, including imports inside functions."""
    importer = module_of(path, source=source)
    for node, at_top in import_statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(importer, alias.name, node.lineno, at_top)
        elif node.level:
            yield Import(importer, "a relative import", node.lineno, at_top)
        else:
            for alias in node.names:
                # `from motet.text import choice` names a module too.
                yield Import(importer, f"{node.module}.{alias.name}", node.lineno, at_top)


def module_of(path: Path, *, source: Path) -> str:
    """Returns the name of a file's module without the leading `motet.`; a package has the name of its folder."""
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(part for part in parts[1:] if part != "__init__")


def import_statements(node: ast.AST, *, at_top: bool = True) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Yields the import statements below a node, each with False if it is inside a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, at_top
        elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from import_statements(child, at_top=at_top and not is_function)


def is_in(module: str, layer: str) -> bool:
    return layer == "" or module == layer or module.startswith(layer + ".")


def layer_of(module: str) -> str | None:
    return max((layer for layer in LAYERS if is_in(module, layer)), key=len, default=None)


def wrong(imported: Import) -> str | None:
    """Returns the reason why an import is wrong, or None if it is right."""
    importer, target = imported.importer, imported.target
    if target == "a relative import":
        return "imports are absolute here"
    package = target.partition(".")[0]
    if package != "motet":
        allowed = ONLY_IN.get(package)
        if allowed is not None and not any(is_in(importer, place) for place in allowed):
            return f"{package} may be imported only in {', '.join(allowed)}"
        return None
    if target in ("motet", "motet.__version__"):
        return None
    module = target.removeprefix("motet.")
    if importer == "":
        return (
            None if is_in(module, "llm") else "the package itself imports nothing but the Python API, for type checkers"
        )
    layer = layer_of(importer)
    if layer is None:
        return "the importing module is in no layer: add it to the table in tools/layers.py"
    if any(is_in(module, seen) for seen in (layer, *LAYERS[layer], *EVERYBODY_SEES)):
        return None
    return f"{layer} may not see {module}"


def find_wrong(source: Path = SOURCE) -> list[str]:
    """Returns a line for each wrong import, as `path:line: what`."""
    return [
        f"{path.relative_to(source.parent)}:{imported.line}: {imported.importer} imports {imported.target}: {reason}"
        for path, imports in all_imports(source).items()
        for imported in imports
        if (reason := wrong(imported))
    ]


def import_graph(source: Path = SOURCE) -> Graph:
    """Returns the modules of the package, each with the modules that it imports at its top."""
    graph: dict[str, set[str]] = {module_of(path, source=source): set() for path in all_imports(source)}
    for imported in chain.from_iterable(all_imports(source).values()):
        module = imported.target.removeprefix("motet.")
        if module not in graph:
            module = module.rpartition(".")[0]  # the last part is a class or function of the module
        if imported.at_top and module in graph and module not in ("", imported.importer):
            graph[imported.importer].add(module)
    return graph


def reachable(graph: Graph, start: str) -> set[str]:
    """Returns the modules that a module imports, directly or indirectly."""
    found: set[str] = set()
    todo = [start]
    while todo:
        new = graph[todo.pop()] - found
        found |= new
        todo += new
    return found


def cycles_in(graph: Graph) -> list[frozenset[str]]:
    """Returns the groups of modules that import each other, directly or indirectly."""
    reached = {module: reachable(graph, module) for module in graph}
    groups = {frozenset(other for other in below if module in reached[other]) for module, below in reached.items()}
    return sorted((group for group in groups if group), key=sorted)


def longest_chain(graph: Graph, *, folder: str) -> list[str]:
    """Returns the longest chain of imports among the modules of a folder, from the highest module to the lowest.
    Imports of a cycle do not count."""
    in_cycle = {module: group for group in cycles_in(graph) for module in group}
    inside = {
        module: sorted(target for target in targets - in_cycle.get(module, frozenset()) if is_in(target, folder))
        for module, targets in graph.items()
        if is_in(module, folder)
    }
    chains: dict[str, list[str]] = {}
    for module in TopologicalSorter(inside).static_order():
        chains[module] = [module, *max((chains[target] for target in inside[module]), key=len, default=[])]
    return max(chains.values(), key=len, default=[])


def wrong_cycles(graph: Graph, *, known: Mapping[frozenset[str], str] = KNOWN_CYCLES) -> list[str]:
    """Returns a line for each cycle that is not in `known`, and for each entry of `known` that is not a cycle."""
    cycles = cycles_in(graph)
    new = [sorted(group) for group in cycles if group not in known]
    gone = [sorted(group) for group in known if group not in cycles]
    return [
        *(f"{', '.join(group)} import each other: {' -> '.join(one_cycle(graph, group))}" for group in new),
        *(f"KNOWN_CYCLES has {', '.join(group)}, which are no such cycle: remove the entry" for group in gone),
    ]


def one_cycle(graph: Graph, group: Sequence[str]) -> list[str]:
    """Returns the modules of a cycle in the order in which they import each other; the first one is also the last."""
    try:
        TopologicalSorter({module: sorted(graph[module].intersection(group)) for module in group}).prepare()
    except CycleError as error:
        importers_last: list[str] = error.args[1]
        return importers_last[::-1]
    raise AssertionError(f"no cycle in {group}")


def print_depth(folder: str) -> None:
    module = folder.rstrip("/").removeprefix("src/").removeprefix("motet").lstrip("/").replace("/", ".")
    modules = longest_chain(import_graph(), folder=module)
    print(f"depth of {folder}: {len(modules)}, the longest chain of imports")
    print(*modules, sep="\n  -> ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", metavar="FOLDER", help="print the longest chain of imports inside motet/FOLDER")
    options = parser.parse_args()
    if options.depth:
        print_depth(options.depth)
        return 0
    graph = import_graph()
    imports, cycles = find_wrong(), wrong_cycles(graph)
    print(*imports, *cycles, sep="\n", file=sys.stderr, end="\n" if imports or cycles else "")
    print(f"layers: {len(graph)} modules, {len(imports)} wrong imports, {len(cycles)} wrong cycles")
    return 1 if imports or cycles else 0


if __name__ == "__main__":
    sys.exit(main())
