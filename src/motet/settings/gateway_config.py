"""The settings of a gateway's workers, declared in the manner of `motet.settings.server_config`."""

from dataclasses import dataclass

from motet.settings.declaration import GATEWAY, RAY, SENT_KEY, Mark, common, setting
from motet.settings.named_worker import by_url, check_workers, roles_by_url


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """The servers behind a gateway."""

    workers: tuple[str, ...] = common(
        (),
        "URL of a worker, or URL,role,kind with one or both; repeatable.",
        unit="URL",
        marks=Mark.COMMAS,
        read=check_workers,
    )
    role_of: tuple[str, ...] = setting(
        (), "Role of a worker that reports none: URL=prefill, URL=decode or URL=both; repeatable.", read=roles_by_url
    )
    workers_file: str | None = common(
        None, "File with one worker per line; workers join and leave when lines are added and removed.", unit="file"
    )
    worker_api_key: str | None = setting(
        None, "API key sent to workers that are not Motet servers; Motet servers get the worker key.", **SENT_KEY
    )
    key_of: tuple[str, ...] = setting(
        (),
        "Key sent to one worker, as URL=KEY, instead of the common keys; repeatable.",
        read=by_url,
        pattern=r"[!-~]+",
        must="URL=KEY, such as http://host:8000=secret",
        marks=Mark.SECRET,
    )
    tokenizer_of: tuple[str, ...] = setting(
        (),
        "Tokenizer of a model whose workers do not provide one: MODEL=FOLDER or MODEL=ORG/NAME; repeatable.",
        pattern=r"[^=]+=[\s\S]+",
        must="MODEL=FOLDER or MODEL=ORG/NAME",
    )
    leader_timeout_s: float = setting(
        30.0, "Time after which a vLLM decode server stops waiting for a prompt's KV and computes the prompt.", above=0
    )
    upstream_timeout_s: float = setting(
        300.0,
        "Time without data after which an answer moves to another worker; an answer of a text upstream fails instead.",
        above=0,
    )
    worker_timeout_s: float = setting(
        5.0,
        "Time without a status report after which a worker gets no groups and its groups move to other workers.",
        commands=GATEWAY + RAY,
        minimum=2,
        reason="workers are polled every second",
    )
    start_timeout_s: float = setting(
        300.0, "Time for which a starting gateway waits for its first ready worker.", commands=GATEWAY + RAY, above=0
    )
