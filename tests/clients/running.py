"""How a client is run, what a scripted model says to it, and how its requests are kept."""

import datetime
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from motet.testing.fake_engine import Script
from tests.clients.installed import Client
from tests.clients.recorder import Recorder
from tests.tiny_tokenizer import fake_answer

TIMEOUT_S = 240


def run(command: Sequence[str], environ: Mapping[str, str], folder: Path) -> str:
    """Runs a command without input, and returns what it wrote. Fails if its exit code is not 0."""
    done = subprocess.run(
        command, env=environ, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def saying(*texts: str) -> Script:
    """Makes each request the next text, in every choice, and requests that come later the last text."""
    given: dict[str, str] = {}
    return lambda request, start: fake_answer(
        given.setdefault(request.request_id, texts[min(len(given), len(texts) - 1)])
    )


def keep(recorder: Recorder, client: Client, *, home: Path, recordings: Path | None) -> None:
    """Checks that the client asked and nothing was refused, and writes what it asked if the run makes recordings."""
    assert recorder.exchanges and recorder.refused() == []
    if recordings is not None:
        source = {"client": client.name, "version": client.version, "recorded": str(datetime.date.today())}
        recorder.save(recordings / f"{client.key}.json", source, hidden=str(home))
