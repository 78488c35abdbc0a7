"""The wheel as users have it: installed without a compiler and without a checkout."""

import json
import shutil
import subprocess
import zipfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

import motet
from motet.deploy.child import ChildServer
from motet.engines.native.compiled_kernels import KINDS, file_name
from tests.packages.conftest import ROOT, bare
from tests.patience import PATIENCE_S
from tests.tiny_engine import TINY
from tools.wheel import KERNELS, missing_libraries

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.kernels]  # `make wheel` runs them in spite of their marks

IN_BASH = """
PATH=$PATH:/usr/bin:/bin
motet --install-completion > installed
. ~/.bash_completions/motet.sh
COMP_WORDS=(motet serve --max-num) COMP_CWORD=2
_motet_completion motet
echo "${COMPREPLY[@]}"
"""
FACTS = """
import json, motet
from importlib.metadata import version
from motet.engines.native import compiled_kernels
kinds = [kind for kind in compiled_kernels.KINDS if compiled_kernels.of_kind(kind)]
print(json.dumps([motet.__file__, version("motet"), kinds, compiled_kernels.digest()]))
"""


def run(*command: str, home: Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=bare(home), cwd=home, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_one_wheel_is_for_every_python_from_3_11_on_and_linux_since_2021(wheel: Path) -> None:
    name, number, _, tags = parse_wheel_filename(wheel.name)
    assert (name, str(number)) == ("motet", motet.__version__)
    assert {str(tag) for tag in tags} == {"cp311-abi3-manylinux_2_34_x86_64"}
    assert tags & set(sys_tags())


def test_a_wheel_without_one_kind_of_kernels_is_detected(wheel: Path, tmp_path: Path) -> None:
    assert missing_libraries(wheel) == []
    with zipfile.ZipFile(wheel) as complete, zipfile.ZipFile(tmp_path / "part.whl", "w") as part:
        for name in complete.namelist():
            if "avx2" not in name:
                part.writestr(name, complete.read(name))
    assert missing_libraries(tmp_path / "part.whl") == [f"{KERNELS}/{file_name('avx2')}"]


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    """This includes files that are not Python: without a line in `pyproject.toml` they are missing."""
    source = ROOT / "src"
    files = (path for path in (source / "motet").rglob("*") if path.is_file() and path.suffix not in (".so", ".pyc"))
    expected = {str(path.relative_to(source)) for path in files}
    with zipfile.ZipFile(wheel) as opened:
        packaged = {name for name in opened.namelist() if not name.startswith("motet-") and name[-1] != "/"}
    assert packaged == expected | {f"{KERNELS}/{file_name(kind)}" for kind in KINDS}


def test_the_installed_wheel_loads_its_own_kernels(installed: Path) -> None:
    from motet.engines.native import compiled_kernels

    home = installed.parent
    where, number, kinds, digest = json.loads(run(str(installed / "python"), "-c", FACTS, home=home))
    assert Path(where).is_relative_to(home)
    assert number == motet.__version__ == version("motet")
    assert kinds == [kind for kind in KINDS if compiled_kernels.of_kind(kind)]
    assert digest


def test_the_installed_command_completes_flags_in_bash(installed: Path) -> None:
    assert run("/bin/bash", "-c", IN_BASH, home=installed.parent).split() == [
        "--max-num-seqs",
        "--max-num-batched-tokens",
    ]


@pytest.mark.parametrize(("processor", "kinds"), [("Haswell-v4", ["avx2"]), ("SandyBridge", [])])
def test_a_processor_gets_the_kernels_that_it_can_run(installed: Path, processor: str, kinds: list[str]) -> None:
    """Kernels that it cannot run do no harm when they are checked."""
    if not (emulator := shutil.which("qemu-x86_64")):
        pytest.skip("there is no qemu-x86_64 (Debian's qemu-user), which emulates other processors")
    found = run(emulator, "-cpu", processor, str(installed / "python"), "-c", FACTS, home=installed.parent)
    assert json.loads(found)[2] == kinds


def test_the_installed_command_answers_with_compiled_kernels(installed: Path, folder: Path) -> None:
    """There is no g++ on its path. `--kernels compiled` refuses to start without kernels."""
    home = installed.parent
    assert run(str(installed / "motet"), "version", home=home).strip() == motet.__version__

    def start(command: Sequence[str], **more: Any) -> "subprocess.Popen[str]":
        return subprocess.Popen([str(installed / "motet"), *command[command.index("serve") :]], **more)

    body = {"model": "tiny", "prompt": "a", "n": 3, "max_tokens": 4, "seed": 1, "ignore_eos": True}
    with ChildServer([str(folder), *TINY, "--kernels", "compiled"], environ=bare(home), popen=start) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 12
