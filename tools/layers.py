"""Checks that layers look down only: fails if a module imports what its layer may not see.

The table below is the architecture. A layer sees itself, the layers that its row names, and `EVERYBODY_SEES`. No layer
sees `testing`, which is for tests and benchmarks. Only the modules in `ONLY_IN` may import heavy packages, so that the
command line starts quickly and `import motet` loads no torch. Imports inside functions count too.

Run: python tools/layers.py
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"

EVERYBODY_SEES = ("types", "metrics.stats", "ids", "errors", "settings", "log", "block_names")

BELOW_API = (
    "policies",
    "text",
    "grammar",
    "engine",
    "engines.upstream.text_source",
    "engines.wire",
    "transfer.ticket",
    "metrics",
    "models.checkpoint",
    "models.folder",
    "tracing",
)
API_SHARED = ("api.http", "api.known_groups", "api.served", "api.service")
API_GENERATION = (*API_SHARED, "api.generation")

LAYERS: dict[str, tuple[str, ...]] = {
    "types": ("transfer.ticket", "tracing.context"),
    "metrics.stats": ("transfer.figures", "metrics.declare"),
    "tracing": (),
    "tracing.context": (),
    "ids": (),
    "errors": (),
    "settings": ("metrics.declare", "transfer.ticket"),
    "log": (),
    "block_names": (),
    "kv_events": (),
    "metrics": (),
    "metrics.declare": (),
    "metrics.routing": ("metrics.declare", "transfer.ticket"),
    "transfer": (),
    "transfer.ticket": (),
    "transfer.orders": ("transfer.ticket",),
    "transfer.figures": ("transfer.orders",),
    "models": (),
    "models.folder": (),
    "models.checkpoint": ("models.folder",),
    "engine": ("transfer.ticket", "models.checkpoint"),
    "engines.wire": ("engine", "models.checkpoint", "transfer.ticket"),
    "engines.http": (),
    "engines.openai": ("engines.http", "engines.wire"),
    "engines.far": ("engines.wire",),
    "engines.remote": (
        "tracing.context",
        "engine",
        "engines.far",
        "engines.http",
        "engines.openai",
        "engines.wire",
        "models.checkpoint",
        "transfer.ticket",
    ),
    "engines.upstream": ("engine", "engines.http", "engines.openai", "engines.wire", "tracing.context"),
    "engines.upstream.text_source": ("engines.wire", "tracing.context"),
    "engines.vllm": (
        "engine",
        "engines.far",
        "engines.http",
        "engines.openai",
        "engines.wire",
        "metrics.routing",
        "tracing.context",
        "transfer.ticket",
    ),
    "engines.native": (
        "engine",
        "engines.wire",
        "transfer",
        "kv_events",
        "grammar",
        "text.tokenizer",
        "models.checkpoint",
        "models.folder",
        "models.weights",
    ),
    "policies": (),
    "text": ("policies", "engine", "transfer.ticket"),
    "grammar": ("text.tokenizer",),
    "routing": (
        "engine",
        "engines.upstream.text_source",
        "transfer.ticket",
        "metrics.declare",
        "metrics.routing",
        "tracing",
    ),
    # Inside api: http, then what all routes share, then generation, then the dialects; app and openapi see all of it.
    "api": BELOW_API,
    "api.http": ("engines.wire", "metrics", "tracing", "transfer.ticket"),
    "api.known_groups": ("api.http",),
    "api.served": ("engine", "engines.upstream.text_source", "grammar", "text"),
    "api.service": (*API_SHARED, "api.trainers.incoming_weights", *BELOW_API),
    "api.generation": (*API_SHARED, *BELOW_API),
    "api.texts": (*API_GENERATION, *BELOW_API),
    "api.openai": (*API_GENERATION, "api.texts", *BELOW_API),
    "api.anthropic": (*API_GENERATION, "api.openai", *BELOW_API),
    "api.vllm": (*API_GENERATION, "api.openai", *BELOW_API),
    "api.trainers": (*API_SHARED, *BELOW_API),
    "api.sglang": (*API_GENERATION, "api.trainers", *BELOW_API),
    "api.worker": (*API_GENERATION, "api.trainers", *BELOW_API),
    "api.operators": (*API_SHARED, *BELOW_API),
    "api.page": API_SHARED,
    "deploy": ("api", "text", "engine", "engines", "routing", "transfer", "metrics", "models", "kv_events", "tracing"),
    "__main__": ("cli",),
    "weights": ("models.checkpoint",),
    "testing": ("engine", "transfer", "kv_events"),
    "cli": ("deploy", "api", "text", "engine", "engines", "routing", "transfer", "metrics", "models", "tracing"),
}

ONLY_IN: dict[str, tuple[str, ...]] = {
    "torch": ("engines.native", "models.convert", "weights"),
    "transformers": ("engines.native", "models.convert"),
    "triton": ("engines.native.cuda.kernels",),
    "aiohttp": ("engines.http",),
    "zmq": ("engines.native", "transfer", "kv_events"),
    "nixl": ("transfer",),
    "llguidance": ("grammar",),
    "re2": ("policies",),
    "openai_harmony": ("text.harmony",),
    "opentelemetry": ("tracing.export",),
    "ray": tuple(f"deploy.ray.{module}" for module in ("app", "deployments", "foreground", "request_router")),
    "fastapi": ("api", "deploy"),
    "starlette": ("api",),
    "uvicorn": ("deploy",),
    "typer": ("cli",),
    "rich": ("cli",),
}


@dataclass(frozen=True)
class Import:
    """Module `importer` imports `target`; names of our own modules are without the leading `motet.`."""

    importer: str
    target: str
    line: int


def imports_of(path: Path, *, source: Path = SOURCE) -> Iterator[Import]:
    """Yields every import in a file, also those inside functions."""
    parts = path.relative_to(source).with_suffix("").parts
    importer = ".".join(part for part in parts[1:] if part != "__init__")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(importer, alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield Import(importer, "a relative import", node.lineno)
                continue
            for alias in node.names:
                # `from motet.text import choice` names a module too.
                yield Import(importer, f"{node.module}.{alias.name}", node.lineno)


def is_in(module: str, layer: str) -> bool:
    return module == layer or module.startswith(layer + ".")


def layer_of(module: str) -> str | None:
    return max((layer for layer in LAYERS if is_in(module, layer)), key=len, default=None)


def wrong(imported: Import) -> str | None:
    """Returns what is wrong with an import; None if nothing is."""
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
        return "the package itself stays empty"
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
        for path in sorted(source.rglob("*.py"))
        for imported in imports_of(path, source=source)
        if (reason := wrong(imported))
    ]


def main() -> int:
    problems = find_wrong()
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"layers: {sum(1 for _ in SOURCE.rglob('*.py'))} modules, {len(problems)} wrong imports")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
