"""Groups for vLLM servers, and tickets of theirs."""

from motet.engines.vllm.tickets import ticket_from
from motet.ids import ModelName, RequestId
from motet.transfer.ticket import Ticket
from motet.types import ChoiceStart, GenerateRequest, SamplingParams, choice_starts

PROMPT = (5, 6, 7, 8)
PARAMS: dict[str, object] = {"do_remote_prefill": True, "remote_request_id": "cmpl-1", "remote_block_ids": [[1, 2]]}
SAMPLING = SamplingParams(max_tokens=50, temperature=0.5)
GREEDY = SamplingParams(max_tokens=50, temperature=0.0)


def ticket(name: str = "cmpl-1") -> Ticket:
    return ticket_from({**PARAMS, "remote_request_id": name}, engine_id="far-1", prompt=PROMPT)


def group(  # sizes: what groups differ in
    name: str = "g",
    *,
    n: int = 3,
    choices: tuple[ChoiceStart, ...] | None = None,
    sampling: SamplingParams = SAMPLING,
    ticket: Ticket | None = None,
    seeded: bool = False,
    stops: bool = False,
) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(name),
        prompt=PROMPT,
        choices=choices or choice_starts(n, seed=7),
        sampling=sampling,
        cache_salt="salt",
        priority=3,
        ticket=ticket,
        trace=f"trace-{name}",
        session_id="session-1",
        model=ModelName("m"),
        seeded=seeded,
        stops=stops,
    )
