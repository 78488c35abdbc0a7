"""Runs clients, scripts the output of their model, and saves their requests."""

import datetime
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from motet.testing.fake_engine import Script
from tests.clients.installed import Client
from tests.clients.recorder import Recorder
from tests.tiny_tokenizer import fake_answer

TIMEOUT_S = 240


def run(command: Sequence[str], environ: Mapping[str, str], folder: Path, *, timeout_s: float = TIMEOUT_S) -> str:
    """Runs a command without input, and returns its output. Fails if its exit code is not 0."""
    done = subprocess.run(
        command, env=environ, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def script_of(*texts: str) -> Script:
    """Returns a script in which every choice of a request has the next text, and later requests get the last text."""
    given: dict[str, str] = {}
    return lambda request, start: fake_answer(
        given.setdefault(request.request_id, texts[min(len(given), len(texts) - 1)])
    )


def save_requests(recorder: Recorder, client: Client, *, home: Path, recordings: Path | None) -> None:
    """Checks that the client sent requests and none was refused. Saves the requests if the run makes recordings."""
    assert recorder.exchanges and recorder.refused() == []
    if recordings is not None:
        source = {"client": client.name, "version": client.version, "recorded": str(datetime.date.today())}
        recorder.save(recordings / f"{client.key}.json", source, hidden=str(home))
