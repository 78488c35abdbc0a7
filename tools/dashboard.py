"""Generates the Grafana dashboard, deploy/grafana/motet.json, from the rows of panels below.

Run: python tools/dashboard.py          writes the file
     python tools/dashboard.py --check  fails if the file is out of date

A query selects its series with one of three selectors. Metrics of groups are selected by model and server, and metrics
of engines by worker and server. Metrics of routing are selected by server only, because a server can have several
models.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from motet.engine import WorkerState

FILE = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "motet.json"
SERVER = 'instance=~"$server"'
MODEL = f'model_name=~"$model", {SERVER}'
WORKER = f'worker=~"$worker", {SERVER}'
RATE = "[$__rate_interval]"
EACH = "instance, worker"
"""Labels that identify a worker. Workers of two servers can have the same name."""
EACH_CLIENT = "instance, client"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
PANELS_A_ROW, WIDTH, HEIGHT = 3, 8, 8
"""Layout of the panels; Grafana's grid has 24 columns."""
SECONDS, SHARE, BYTES_A_SECOND, A_SECOND, NUMBER = "s", "percentunit", "Bps", "suffix:/s", "short"
COLOURS = {
    WorkerState.STARTING: "blue",
    WorkerState.READY: "green",
    WorkerState.DRAINING: "yellow",
    WorkerState.SILENT: "orange",
    WorkerState.DEAD: "red",
}

Query = tuple[str, str]
"""A PromQL expression and the legend of its series."""


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    queries: tuple[Query, ...]
    meaning: str
    kind: str = "timeseries"


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


def rate(metric: str, selector: str, *, by: str) -> str:
    return f"sum by ({by}) (rate(motet:{metric}{{{selector}}}{RATE}))"


def named(by: str, suffix: str = "") -> str:
    """Returns the legend of a series: the values of its labels, followed by `suffix`."""
    return " ".join([*(f"{{{{{label}}}}}" for label in by.split(", ")), suffix]).strip()


def per_second(metric: str, selector: str, *, by: str, suffix: str = "") -> Query:
    return rate(metric, selector, by=by), named(by, suffix)


def share(part: str, whole: str, selector: str, *, by: str) -> Query:
    return f"{rate(part, selector, by=by)} / {rate(whole, selector, by=by)}", named(by)


def parts(metric: str, selector: str, *, by: str, of: str) -> Query:
    """Returns each value of a gauge as a part of the sum of all values with the same label `of`."""
    name = f"motet:{metric}{{{selector}}}"
    return f"sum by ({by}) ({name}) / on ({of}) group_left () sum by ({of}) ({name})", named(by)


def quantiles(metric: str, selector: str, *, by: str) -> tuple[Query, ...]:
    """Returns the median and the 95th percentile of a histogram."""
    buckets = rate(f"{metric}_bucket", selector, by=f"{by}, le")
    shown = {0.5: "median", 0.95: "p95"}
    return tuple((f"histogram_quantile({below}, {buckets})", named(by, suffix)) for below, suffix in shown.items())


def gauges(metrics: dict[str, str], selector: str, *, by: str) -> tuple[Query, ...]:
    """Returns current values. `metrics` maps names to a suffix of their legends.

    Counters of rare events are shown like gauges: a series that starts with its first event has no visible rate.
    """
    return tuple((f"sum by ({by}) (motet:{name}{{{selector}}})", named(by, suffix)) for name, suffix in metrics.items())


def states() -> Query:
    """Returns the position of each worker's state in `WorkerState`, starting at 1."""
    one = f'max by ({EACH}) (motet:worker_state{{{WORKER}, state="%s"}})'
    return " + ".join(f"{number} * {one % state}" for number, state in enumerate(WorkerState, 1)), named(EACH)


ROWS = (
    Row(
        "Requests",
        (
            Panel(
                "Groups that ended",
                A_SECOND,
                (per_second("groups_total", MODEL, by="status"),),
                "A group is one prompt with its n choices. 499: the client left.",
            ),
            Panel(
                "Choices that finished",
                A_SECOND,
                (per_second("request_success_total", MODEL, by="finished_reason"),),
                "By finish reason.",
            ),
            Panel(
                "Responses",
                A_SECOND,
                (per_second("http_requests_total", SERVER, by="handler, status"),),
                "All routes, including those for operators.",
            ),
            Panel(
                "First token of the first choice",
                SECONDS,
                quantiles("time_to_first_token_seconds", MODEL, by="model_name"),
                "Measured from the admission of the group.",
            ),
            Panel(
                "First token of the last choice",
                SECONDS,
                quantiles("time_to_first_token_last_choice_seconds", MODEL, by="model_name"),
                "Close to the time of the first choice, unless choices wait for free KV blocks.",
            ),
            Panel(
                "Time between tokens",
                SECONDS,
                quantiles("inter_token_latency_seconds", MODEL, by="model_name"),
                "Time between two steps of a group.",
            ),
            Panel(
                "Duration of groups",
                SECONDS,
                quantiles("e2e_request_latency_seconds", MODEL, by="model_name"),
                "From admission to the end of the last choice.",
            ),
            Panel(
                "Tail of a group",
                SECONDS,
                quantiles("finish_spread_seconds", MODEL, by="model_name"),
                "From its first finished choice to its last. 0 with n = 1.",
            ),
            Panel(
                "Choices of a group (n)",
                NUMBER,
                quantiles("request_params_n", MODEL, by="model_name"),
                "As requested by clients.",
            ),
            Panel(
                "Tokens",
                A_SECOND,
                (
                    per_second("generation_tokens_total", WORKER, by=EACH, suffix="generated"),
                    per_second("prefill_tokens_total", WORKER, by=EACH, suffix="prefilled"),
                ),
                "Generated tokens, and computed prompt tokens, without prompt tokens found in the prefix cache.",
            ),
        ),
    ),
    Row(
        "Queue and load",
        (
            Panel(
                "Waiting groups",
                NUMBER,
                gauges(
                    {
                        "groups_queued": "for a worker with free capacity",
                        "groups_without_first_token": "for their first token",
                    },
                    SERVER,
                    by="instance",
                ),
                "--max-waiting-groups limits the second number.",
            ),
            Panel(
                "Time in the queue",
                SECONDS,
                quantiles("queue_seconds", SERVER, by="instance"),
                "Until a worker had free capacity.",
            ),
            Panel(
                "Choices running and waiting",
                NUMBER,
                gauges({"num_requests_running": "running", "num_requests_waiting": "waiting"}, WORKER, by=EACH),
                "In each engine.",
            ),
        ),
    ),
    Row(
        "Clients",
        (
            Panel(
                "Open choices of clients",
                NUMBER,
                gauges({"client_choices": ""}, SERVER, by=EACH_CLIENT),
                "On workers, as counted by the router. Each API key is a client, and all others are one.",
            ),
            Panel(
                "Waiting choices of clients",
                NUMBER,
                gauges({"client_choices_queued": ""}, SERVER, by=EACH_CLIENT),
                "Choices of groups that wait for capacity.",
            ),
            Panel(
                "Shares of clients",
                SHARE,
                (parts("client_kv_blocks", SERVER, by=EACH_CLIENT, of="instance"),),
                "Share of the KV blocks that all clients' open choices and their prompts take on workers.",
            ),
        ),
    ),
    Row(
        "KV cache",
        (
            Panel(
                "KV blocks",
                NUMBER,
                gauges(
                    {
                        "kv_blocks_used": "used",
                        "kv_blocks_kept": "kept",
                        "kv_blocks_cached": "cached",
                        "kv_blocks": "all",
                    },
                    WORKER,
                    by="instance",
                ),
                "Sum over all workers. Kept: held for more choices of a prompt. Cached: free, but usable by a prefix.",
            ),
            Panel(
                "KV blocks in use",
                SHARE,
                gauges({"kv_cache_usage_perc": ""}, WORKER, by=EACH),
                "Blocks held by groups and leases.",
            ),
            Panel(
                "Prefix cache hits",
                SHARE,
                (share("prefix_cache_hits_total", "prefix_cache_queries_total", WORKER, by=EACH),),
                "Share of the prompt tokens whose KV was already cached.",
            ),
            Panel(
                "Preemptions",
                A_SECOND,
                (per_second("num_preemptions_total", WORKER, by=EACH),),
                "Choices preempted because there were too few blocks; their tokens are computed again.",
            ),
            Panel(
                "Blocks shared by forks",
                A_SECOND,
                (per_second("blocks_shared_total", WORKER, by=EACH),),
                "Blocks saved because the choices of a prompt share them.",
            ),
            Panel(
                "Trunk positions read",
                SHARE,
                (share("trunk_tokens_read_total", "trunk_tokens_unshared_total", WORKER, by=EACH),),
                "Share of the positions that attention would read if each choice read its prompt separately.",
            ),
        ),
    ),
    Row(
        "Disaggregated prefill and decode",
        (
            Panel(
                "Prefills and transfers",
                A_SECOND,
                (
                    per_second("prefills_total", WORKER, by="instance", suffix="prefills"),
                    per_second("kv_transfers_total", WORKER, by="instance", suffix="transfers"),
                ),
                "Each at most once per group, for any n.",
            ),
            Panel(
                "KV transferred",
                BYTES_A_SECOND,
                (per_second("kv_transfer_bytes_total", WORKER, by=EACH),),
                "Bytes that decode workers read from prefill workers.",
            ),
            Panel(
                "Duration of transfers",
                SECONDS,
                quantiles("kv_transfer_seconds", WORKER, by=EACH),
                "From the start of a transfer until it is verified.",
            ),
            Panel(
                "Failed transfers",
                NUMBER,
                gauges({"kv_transfer_failures_total": ""}, WORKER, by="kind"),
                "Since the server started; empty if there were none. The decode worker then computed the prompt.",
            ),
            Panel(
                "Prompts computed without a prefill worker",
                A_SECOND,
                (per_second("bypasses_total", SERVER, by="reason"),),
                "By reason.",
            ),
            Panel(
                "Leases",
                NUMBER,
                (
                    *gauges({"kv_leases": "open"}, WORKER, by=EACH),
                    per_second("kv_leases_expired_total", WORKER, by="instance", suffix="expired per second"),
                ),
                "Prefilled prompts held for their readers. A lease expires if its reader sends no heartbeat.",
            ),
        ),
    ),
    Row(
        "Workers",
        (
            Panel(
                "State",
                NUMBER,
                (states(),),
                "Only workers in the state ready get new groups.",
                kind="state-timeline",
            ),
            Panel(
                "Open choices",
                NUMBER,
                gauges({"worker_choices": ""}, WORKER, by=EACH),
                "As counted by the router.",
            ),
            Panel(
                "Routing decisions",
                A_SECOND,
                (per_second("routing_decisions_total", SERVER, by="reason"),),
                "By the reason for which the worker was chosen.",
            ),
            Panel(
                "Migrations",
                NUMBER,
                gauges({"migrations_total": ""}, SERVER, by="cause, outcome"),
                "Groups that moved away from a worker since the server started; empty if there were none.",
            ),
            Panel(
                "Choices that moved",
                NUMBER,
                gauges({"choices_resumed_total": ""}, SERVER, by="instance"),
                "Unfinished choices that continued on another worker, since the server started.",
            ),
            Panel(
                "Engine restarts",
                NUMBER,
                gauges({"engine_restarts_total": ""}, WORKER, by=EACH),
                "Since the server started.",
            ),
        ),
    ),
    Row(
        "Steps",
        (
            Panel(
                "Steps",
                A_SECOND,
                (per_second("engine_steps_total", WORKER, by=EACH),),
                "Forward passes.",
            ),
            Panel(
                "Draft tokens accepted",
                SHARE,
                (
                    share(
                        "spec_decode_num_accepted_tokens_total",
                        "spec_decode_num_draft_tokens_total",
                        WORKER,
                        by=EACH,
                    ),
                ),
                "Share of the draft tokens that were accepted.",
            ),
            Panel(
                "Forced tokens",
                A_SECOND,
                (per_second("forced_tokens_total", WORKER, by=EACH),),
                "Tokens that were the only ones a grammar allowed, and took no step.",
            ),
        ),
    ),
)


def dashboard() -> dict[str, object]:
    return {
        "uid": "motet",
        "title": "Motet",
        "tags": ["motet"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": list(variables())},
        "panels": list(placed(ROWS)),
    }


def variables() -> Iterator[dict[str, object]]:
    yield {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    for name, metric, label in (
        ("server", "groups_queued", "instance"),
        ("model", "request_params_n_count", "model_name"),
        ("worker", "worker_state", "worker"),
    ):
        query = f"label_values(motet:{metric}, {label})"
        yield {
            "name": name,
            "label": name.capitalize(),
            "type": "query",
            "datasource": SOURCE,
            "definition": query,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
        }


def placed(rows: tuple[Row, ...]) -> Iterator[dict[str, object]]:
    """Yields the panels from top to bottom, with a title above each row."""
    top, number = 0, 0
    for row in rows:
        yield {"id": (number := number + 1), "type": "row", "title": row.title, "collapsed": False, "panels": [],
               "gridPos": {"h": 1, "w": PANELS_A_ROW * WIDTH, "x": 0, "y": top}}  # fmt: skip
        for place, panel in enumerate(row.panels):
            down, right = divmod(place, PANELS_A_ROW)
            where = {"h": HEIGHT, "w": WIDTH, "x": right * WIDTH, "y": top + 1 + down * HEIGHT}
            yield drawn(panel) | {"id": (number := number + 1), "gridPos": where}
        top += 1 + -(-len(row.panels) // PANELS_A_ROW) * HEIGHT


def drawn(panel: Panel) -> dict[str, object]:
    defaults: dict[str, object] = {"unit": panel.unit, "min": 0}
    if panel.unit == SHARE:
        defaults["max"] = 1
    if panel.kind == "state-timeline":
        shown = {
            str(number): {"text": state, "color": COLOURS[state], "index": number}
            for number, state in enumerate(WorkerState, 1)
        }
        defaults["mappings"] = [{"type": "value", "options": shown}]
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.meaning,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": SOURCE, "expr": expression, "legendFormat": legend.strip()}
            for place, (expression, legend) in enumerate(panel.queries)
        ],
    }


def queries() -> Iterator[tuple[str, str]]:
    """Yields the title of each panel with each of its expressions."""
    for panel in chain.from_iterable(row.panels for row in ROWS):
        yield from ((panel.title, expression) for expression, _ in panel.queries)


def text() -> str:
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    if "--check" not in sys.argv[1:]:
        FILE.write_text(text())
        return 0
    if FILE.read_text() == text():
        return 0
    print(f"{FILE.name} differs from its declaration: run python tools/dashboard.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
