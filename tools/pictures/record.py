"""Records a run for the animation: eight choices of one prompt, whose engine is killed while it generates them.

Starts a cell of the default model with a prefill and two decode engines, sends the request once without a kill and once
with one, and fails unless the eight texts are the same. Writes tools/pictures/kill.json.

Run: python -m tools.pictures.record
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

import httpx

from motet.deploy.child import ChildServer
from tools.pictures.kill import RECORD, RecordedDelta, RecordedRun

SERVED = ("smollm2", "--prefill", "1", "--decode", "2", "--bypass-tokens", "0", "--admin-key", "secret")
ADMIN = {"Authorization": "Bearer secret"}
PROMPT = "Describe the sea in one sentence."
N, MAX_TOKENS, TEMPERATURE = 8, 48, 0.6
KILL_AFTER_TOKENS = 9
"""Number of tokens of each choice after which the engine is killed."""


@dataclass
class Answers:
    """The choices of one stream, and the time of each delta."""

    worker: str = ""
    texts: list[str] = field(default_factory=lambda: [""] * N)
    deltas: list[RecordedDelta] = field(default_factory=list)
    killed_s: float = 0.0


def chunks(response: httpx.Response) -> Iterator[dict[str, object]]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def stream(http: httpx.Client, seed: int, *, kill: bool) -> Answers:
    """Reads the choices of one request. With `kill`, kills their engine as soon as all have some tokens."""
    body = {
        "messages": [{"role": "user", "content": PROMPT}], "n": N, "seed": seed, "max_tokens": MAX_TOKENS,
        "temperature": TEMPERATURE, "stream": True,
    }  # fmt: skip
    answers, start = Answers(), time.perf_counter()
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        answers.worker = response.headers["x-motet-worker"]
        for chunk in chunks(response):
            for choice in chunk["choices"]:  # type: ignore[attr-defined]
                if text := choice["delta"].get("content"):
                    answers.texts[choice["index"]] += text
                    at_s = round(time.perf_counter() - start, 4)
                    answers.deltas.append(RecordedDelta(at_s, choice["index"], text))
            if kill and not answers.killed_s and len(answers.deltas) >= N * KILL_AFTER_TOKENS:
                http.post(f"/workers/{answers.worker}/kill", headers=ADMIN).raise_for_status()
                answers.killed_s = round(time.perf_counter() - start, 4)
    return answers


def worker_after(http: httpx.Client, lost: str) -> str:
    """Returns the decode engine that is not the lost one."""
    workers = http.get("/status").json()["workers"]
    return str(next(one["id"] for one in workers if one["role"] == "decode" and one["id"] != lost))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="seed of the request")
    arguments = parser.parse_args()
    with ChildServer(SERVED) as server, httpx.Client(base_url=server.url, timeout=300) as http:
        stream(http, arguments.seed + 1000, kill=False)  # warms the engines up
        undisturbed = stream(http, arguments.seed, kill=False)
        killed = stream(http, arguments.seed, kill=True)
        second = worker_after(http, killed.worker)
    if killed.texts != undisturbed.texts:
        print("the texts differ from the texts without a kill", file=sys.stderr)
        return 1
    model = "SmolLM2-135M-Instruct"
    run = RecordedRun(model, PROMPT, N, killed.worker, second, killed.killed_s, killed.deltas)
    RECORD.write_text(json.dumps(asdict(run), indent=1, ensure_ascii=False) + "\n")
    print(
        *killed.texts,
        f"first {killed.deltas[0].at_s} s, kill {run.killed_s} s, last {killed.deltas[-1].at_s} s",
        sep="\n",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
