"""The small files that a tokenizer is made of, on their way from a server to a gateway."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from motet.engines.wire import TOKENIZER_FILES
from motet.text.tokenizer import Tokenizer


def read_files(folder: Path) -> dict[str, bytes]:
    """Those of a model's folder."""
    return {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}


def load_files(files: Mapping[str, bytes], *, chat_template: str | None) -> Tokenizer:
    """The libraries read folders: they get one, and nothing of it is left when this returns."""
    with TemporaryDirectory(prefix="motet-") as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        return Tokenizer.load(Path(folder), chat_template=chat_template)
