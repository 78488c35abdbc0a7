"""The settings of a gateway's servers, declared as those in `motet.settings.server_config` are."""

from dataclasses import dataclass

from motet.settings.declaration import GATEWAY, RAY, SENT_KEY, setting
from motet.settings.named_worker import by_url, check_workers, roles_by_url


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """The servers behind a gateway."""

    workers: tuple[str, ...] = setting(
        (),
        "A worker's URL, or URL,role,kind with one or both behind it; several times.",
        commas=True,
        read=check_workers,
    )
    role_of: tuple[str, ...] = setting(
        (),
        "Role of a worker that does not tell it: URL=prefill, URL=decode or URL=both; several times.",
        read=roles_by_url,
    )
    workers_file: str | None = setting(None, "File with one worker a line; lines added or removed later join or leave.")
    worker_api_key: str | None = setting(
        None, "API key that is sent to workers of other kinds; servers of ours get the worker key.", **SENT_KEY
    )
    key_of: tuple[str, ...] = setting(
        (),
        "Key that is sent to one worker in place of the others, as URL=KEY; several times.",
        read=by_url,
        pattern=r"[!-~]+",
        must="URL=KEY, such as http://host:8000=secret",
        secret=True,
    )
    worker_ca_file: str | None = setting(
        None, "File with the certificates that sign those of workers at https URLs.", unset="the system's"
    )
    tokenizer_of: tuple[str, ...] = setting(
        (),
        "Tokenizer of a model whose workers hand out none: MODEL=FOLDER or MODEL=ORG/NAME; several times.",
        pattern=r"[^=]+=[\s\S]+",
        must="MODEL=FOLDER or MODEL=ORG/NAME",
    )
    leader_timeout_s: float = setting(
        30.0,
        "Time that a prompt's KV may take to reach a vLLM decode server before the prompt is computed there.",
        above=0,
    )
    upstream_timeout_s: float = setting(
        300.0,
        "Time after which an answer of which its worker sends nothing goes on elsewhere; one of a text upstream ends.",
        above=0,
    )
    worker_timeout_s: float = setting(
        5.0,
        "Time after which a worker that does not answer gets no groups, and those it has go on elsewhere.",
        commands=GATEWAY + RAY,
        least=2,
        because="workers are asked every second",
    )
    start_timeout_s: float = setting(
        300.0,
        "Time that a starting gateway waits for the first worker that answers requests.",
        commands=GATEWAY + RAY,
        above=0,
    )
