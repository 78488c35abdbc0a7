"""`tools/layers.py` finds wrong imports and cycles, and the imports of the command line and the API load no torch.

`make check` runs the tool over the source.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.layers import (
    KNOWN_CYCLES,
    SOURCE,
    Graph,
    Import,
    cycles_in,
    find_wrong,
    import_graph,
    imports_of,
    layer_of,
    longest_chain,
    wrong,
    wrong_cycles,
)

HEAVY = ("torch", "transformers", "nixl", "nixl_cu13", "ray", "opentelemetry.sdk")
LIGHT = (
    *("motet", "motet.api.app", "motet.text", "motet.metrics.prometheus", "motet.transfer.figures"),
    *(
        "motet.models.model_source",
        "motet.cli.main",
        "motet.cli.servers",
        "motet.deploy.ray.worker",
        "motet.deploy.ray.options",
    ),
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
        ("routing.router", "motet.transfer.backends.nixl"),
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
def test_an_import_from_a_higher_layer_is_refused(importer: str, target: str) -> None:
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
def test_an_import_from_a_lower_layer_is_allowed(importer: str, target: str) -> None:
    assert wrong(Import(importer, target, line=1)) is None


def test_imports_inside_functions_and_relative_ones_are_found(tmp_path: Path) -> None:
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


def write_package(folder: Path, files: dict[str, str]) -> Graph:
    """Writes these modules of a package, and returns their graph."""
    for name, text in files.items():
        file = folder / "motet" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return import_graph(folder)


def test_the_graph_has_imports_at_the_top_of_modules_including_those_for_types(tmp_path: Path) -> None:
    graph = write_package(
        tmp_path,
        {
            "text/__init__.py": "",
            "text/stop.py": "import re\nfrom motet.types import Finish\n",
            "text/choice.py": "from motet.text import stop\nif TYPE_CHECKING:\n    import motet.text.group\n",
            "text/group.py": "def f():\n    from motet.text.choice import Choice\n",
            "types.py": "class Finish:\n    import motet.text.stop\n",
        },
    )
    assert graph == {
        "text": set(),
        "text.stop": {"types"},
        "text.choice": {"text.stop", "text.group"},
        "text.group": set(),
        "types": {"text.stop"},
    }


CYCLES: Graph = {
    "a": {"b"},
    "b": {"c"},
    "c": {"b", "d"},
    "d": {"e"},
    "e": {"f"},
    "f": {"d", "g"},
    "g": set(),
}


def test_modules_that_import_each_other_are_found_and_no_others() -> None:
    assert cycles_in(CYCLES) == [{"b", "c"}, {"d", "e", "f"}]


def test_a_new_cycle_is_refused_with_the_order_of_its_imports() -> None:
    assert wrong_cycles(CYCLES, known={frozenset("bc"): "a reason"}) == [
        "d, e, f import each other: d -> e -> f -> d",
    ]


def test_a_known_cycle_that_has_been_opened_is_refused() -> None:
    known = dict.fromkeys([frozenset("bc"), frozenset("def"), frozenset("ab")], "a reason")
    assert wrong_cycles(CYCLES, known=known) == [
        "KNOWN_CYCLES has a, b, which are no such cycle: remove the entry",
    ]


def test_known_cycles_have_a_reason() -> None:
    assert all(KNOWN_CYCLES.values())


def test_the_depth_of_a_folder_is_its_longest_chain_of_imports() -> None:
    graph = {
        "api.app": {"api.chat", "api.body"},
        "api.chat": {"text.stop", "api.plan"},
        "api.plan": {"api.body"},
        "api.body": {"errors"},
        "text.stop": {"api.body"},
        "errors": set(),
    }
    assert longest_chain(graph, folder="api") == ["api.app", "api.chat", "api.plan", "api.body"]
    assert longest_chain(graph, folder="") == ["api.app", "api.chat", "api.plan", "api.body", "errors"]


@pytest.mark.slow
def test_importing_loads_nothing_heavy() -> None:
    """One process imports all modules: if they load a package together, one of them loads it. Ray would take
    seconds."""
    code = (
        "import importlib, sys\n"
        f"for module in {LIGHT}:\n"
        "    importlib.import_module(module)\n"
        f"    print(module, [name for name in {HEAVY} if name in sys.modules])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [f"{module} []" for module in LIGHT]
