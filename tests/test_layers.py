"""`tools/layers.py` finds wrong imports, and the imports of the command line and the API load no torch.

`make check` runs the tool over the source.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.layers import SOURCE, Import, find_wrong, imports_of, layer_of, wrong

HEAVY = ("torch", "transformers", "nixl", "ray", "opentelemetry.sdk")
LIGHT = (
    *("motet", "motet.api.app", "motet.text", "motet.metrics.prometheus", "motet.transfer.figures"),
    *("motet.models.model_source", "motet.cli", "motet.deploy.ray.worker", "motet.deploy.ray.options"),
)


def test_every_module_belongs_to_a_layer() -> None:
    modules = [path.relative_to(SOURCE / "motet") for path in (SOURCE / "motet").rglob("*.py")]
    names = [".".join(m.with_suffix("").parts) for m in modules if m.name != "__init__.py"]
    assert [name for name in names if layer_of(name) is None] == []


@pytest.mark.parametrize(
    ("importer", "target"),
    [
        ("text.choice", "motet.api.app"),
        ("engines.native.loop", "motet.text.stop_strings"),
        ("api.chat", "motet.engines.native.client"),
        ("api.chat", "motet.deploy.server"),
        ("routing.router", "motet.transfer.nixl"),
        ("types", "motet.engine"),
        ("deploy.server", "motet.cli.main"),
        ("api.chat", "torch"),
        ("text.tokenizer", "transformers.AutoTokenizer"),
        ("deploy.ray.worker", "ray.serve"),
        ("somewhere.new", "motet.types"),
        ("deploy.server", "motet.testing.fake_engine"),
        ("", "motet.api"),
    ],
)
def test_an_import_that_looks_up_is_refused(importer: str, target: str) -> None:
    assert wrong(Import(importer, target, line=1))


@pytest.mark.parametrize(
    ("importer", "target"),
    [
        ("api.chat", "motet.text.choice"),
        ("api.chat", "motet.engine.Engine"),
        ("routing.router", "motet.transfer.ticket.Ticket"),
        ("engines.native.loop", "torch.nn"),
        ("deploy.server", "motet.engines.native.client"),
        ("deploy.ray.deployments", "ray.serve"),
        ("cli.app", "motet.__version__"),
        ("engines.native.loop", "motet"),
        ("text.choice", "motet.types.Finish"),
    ],
)
def test_an_import_that_looks_down_is_allowed(importer: str, target: str) -> None:
    assert wrong(Import(importer, target, line=1)) is None


def test_imports_inside_functions_and_relative_ones_are_seen(tmp_path: Path) -> None:
    file = tmp_path / "motet" / "text" / "choice.py"
    file.parent.mkdir(parents=True)
    file.write_text("def f():\n    import torch\n    from . import stop\n    from motet.api import app\n")
    found = [(i.importer, i.target, i.line) for i in imports_of(file, source=tmp_path)]
    assert found == [
        ("text.choice", "torch", 2),
        ("text.choice", "a relative import", 3),
        ("text.choice", "motet.api.app", 4),
    ]
    assert len(find_wrong(tmp_path)) == 3


@pytest.mark.slow
def test_importing_loads_nothing_heavy() -> None:
    """One process imports all: what they do not load together, none of them loads. Ray would take seconds."""
    code = (
        "import importlib, sys\n"
        f"for module in {LIGHT}:\n"
        "    importlib.import_module(module)\n"
        f"    print(module, [name for name in {HEAVY} if name in sys.modules])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [f"{module} []" for module in LIGHT]
