"""A real Prometheus that scrapes one server, every second by default."""

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from bench.servers.ports import free_port
from tests.hosts.servers import eventually
from tests.patience import PATIENCE_S

DEPLOY = Path(__file__).parents[2] / "deploy" / "prometheus"

Series = dict[str, str]
"""The labels of one series."""


def program(name: str) -> str:
    """Returns the path of `prometheus` or `promtool`. Skips the test if it is not installed."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian's package prometheus)")
    return found


def promtool(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [program("promtool"), *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=PATIENCE_S)


@dataclass(frozen=True)
class Prometheus:
    http: httpx.Client

    def query(self, expression: str) -> list[Series]:
        """Returns the series of an expression. Fails if the expression is invalid."""
        answer = self.http.post("/api/v1/query", data={"query": expression}).json()
        assert answer["status"] == "success", f"{expression}: {answer['error']}"
        return [one["metric"] for one in answer["data"]["result"]]

    def names(self) -> set[str]:
        """Returns the names of all scraped metrics."""
        return set(self.http.get("/api/v1/label/__name__/values").json()["data"])

    def errors_of_rules(self) -> dict[str, str]:
        """Returns the error of each evaluated alert; an empty string if it has none."""
        groups = self.http.get("/api/v1/rules").json()["data"]["groups"]
        return {
            one["name"]: one.get("lastError", "")
            for group in groups
            for one in group["rules"]
            if one["health"] != "unknown"
        }

    def until(self, expression: str) -> Sequence[Series]:
        """Waits until an expression has series, and returns them."""
        return eventually(lambda: self.query(expression), bool)


@contextmanager
def reading(target: str, folder: Path, *, every_s: int = 1) -> Iterator[Prometheus]:
    """Runs Prometheus with the configuration in `deploy`, for a server at `target`, with this scrape interval."""
    text = (DEPLOY / "prometheus.yml").read_text()
    text, changes = re.subn(
        r"scrape_interval: \w+", f"scrape_interval: {every_s}s\n  evaluation_interval: {every_s}s", text
    )
    text, more = re.subn(r'targets: \["[\d.:]+"\]', f'targets: ["{target}"]', text)
    text, rules = re.subn(r"- rules.yml", f"- {DEPLOY / 'rules.yml'}", text)
    assert (changes, more, rules) == (1, 1, 1)
    config, log, port = folder / "prometheus.yml", folder / "log", free_port()
    config.write_text(text)
    arguments = [f"--config.file={config}", f"--storage.tsdb.path={folder}", f"--web.listen-address=127.0.0.1:{port}"]
    with log.open("w") as output, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as http:
        process = subprocess.Popen([program("prometheus"), *arguments], stdout=output, stderr=output)
        try:
            eventually(lambda: is_ready(http), bool)
            yield Prometheus(http)
        except AssertionError as error:
            error.add_note(log.read_text()[-2000:])
            raise
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def grafana_query(expression: str, *, rate_s: int) -> str:
    """Returns an expression as Grafana sends it: for all servers, models and workers, with this rate interval."""
    return re.sub(r"\$(server|model|worker)\b", ".*", expression).replace("$__rate_interval", f"{rate_s}s")


def is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/-/ready").status_code == 200
    except httpx.TransportError:
        return False
