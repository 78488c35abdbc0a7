"""The JSON of vLLM 0.32's answers to requests for tokens, in both dialects."""

import json
from dataclasses import dataclass, field

from tests.peers.vllm_requests import Sampling, VLLMRequest
from tests.peers.vllm_tokens import EOS, VOCAB_SIZE, Kind, state_of

Json = dict[str, object]
CREATED = 1795305094
FINGERPRINT = "vllm-0.32.0-42872a81"


@dataclass
class Child:
    """A choice that is being generated."""

    index: int
    kind: Kind
    state: int
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None
    num_sent: int = 0
    """Number of tokens in the chunks that were sent."""

    def generate(self, sampling: Sampling, max_tokens: int) -> None:
        """Adds one token. `max_tokens` is the number of output tokens that fit into the context."""
        early = len(self.tokens) < sampling.min_tokens
        ends = sampling.stops if sampling.ignore_eos else sampling.stops | {EOS}
        token = self.kind.token(self.state, len(self.tokens), ends if early else ())
        self.tokens.append(token)
        self.state = state_of([token], self.state)
        if token == EOS and not sampling.ignore_eos:
            self.finish_reason = "stop"
        elif token in sampling.stops:
            self.finish_reason, self.stop_reason = "stop", token
        elif len(self.tokens) >= min(sampling.max_tokens, max_tokens):
            self.finish_reason = "length"

    def take_unsent(self) -> list[int]:
        """Returns the tokens that were not sent, and counts them as sent."""
        new_tokens, self.num_sent = self.tokens[self.num_sent :], len(self.tokens)
        return new_tokens


@dataclass(frozen=True)
class Shapes:
    """The shapes of the answers to one request. `token_ids`: the server is new enough to send token ids."""

    id: str
    model: str
    request: VLLMRequest
    token_ids: bool = True

    def chunk(self, child: Child) -> Json:
        """Returns the chunk with the tokens of the choice that were not sent."""
        first, new_tokens = child.num_sent == 0, child.take_unsent()
        if self.request.scale_out:
            choices = [self._generated(child, new_tokens)]
            return {"request_id": self.id, "usage": None, "output_mode": "tokens", "choices": choices}
        choice = self._completed(child, new_tokens)
        if self._sends_ids:
            prompt = self.request.prompt if first else None
            choice |= {"prompt_token_ids": prompt, "token_ids": new_tokens}
        return {**self._head, "choices": [choice]}

    def usage_chunk(self, children: list[Child]) -> Json:
        """Returns the chunk with the usage."""
        if self.request.scale_out:
            usage = self._usage(children)
            return {"request_id": self.id, "usage": usage, "output_mode": "tokens", "choices": []}
        return {**self._head, "choices": [], "usage": self._usage(children), "system_fingerprint": FINGERPRINT}

    def complete(self, children: list[Child], ticket: object = None) -> Json:
        usage = {**self._usage(children), "prompt_tokens_details": None, "completion_tokens_details": None}
        tail: Json = {"usage": usage, "kv_transfer_params": ticket, "ec_transfer_params": None, "metrics": None}
        if self.request.scale_out:
            choices = [self._generated(child, child.take_unsent()) for child in children]
            head: Json = {"request_id": self.id, "model": self.model, "created": CREATED, "output_mode": "tokens"}
            return {**head, **tail, "choices": choices, "prompt_logprobs": None, "prompt_token_ids": None}
        return {
            **self._head,
            "choices": [self._complete_choice(child) for child in children],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            **tail,
        }

    @property
    def _head(self) -> Json:
        return {"id": self.id, "object": "text_completion", "created": CREATED, "model": self.model}

    @property
    def _sends_ids(self) -> bool:
        return self.token_ids and self.request.return_token_ids

    def _complete_choice(self, child: Child) -> Json:
        with_ids = self._sends_ids
        return {
            **self._completed(child, child.take_unsent()),
            "token_ids": child.tokens if with_ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": self.request.prompt if with_ids else None,
            "routed_experts": None,
        }

    def _completed(self, child: Child, new_tokens: list[int]) -> Json:
        return {
            "index": child.index,
            "text": "".join(map(letter, new_tokens)),
            "logprobs": None if self.request.sampling.logprobs is None else self._logprobs(new_tokens),
            "finish_reason": child.finish_reason,
            "stop_reason": child.stop_reason,
        }

    def _generated(self, child: Child, new_tokens: list[int]) -> Json:
        count = self.request.sampling.logprobs
        content = [] if count is None else [ranked(token, max(count, 1)) for token in new_tokens]
        return {
            "index": child.index,
            "finish_reason": child.finish_reason,
            "stop_reason": child.stop_reason,
            "token_ids": new_tokens,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": None,
            "logprobs": None if count is None else {"content": content},
        }

    def _logprobs(self, new_tokens: list[int]) -> Json:
        assert self.request.sampling.logprobs is not None
        name = (lambda token: f"token_id:{token}") if self.request.tokens_as_ids else letter
        tops = [likely(token, self.request.sampling.logprobs + 1) for token in new_tokens]
        return {
            "text_offset": [0] * len(new_tokens),
            "token_logprobs": [top[0][1] for top in tops],
            "tokens": [name(token) for token in new_tokens],
            "top_logprobs": [{name(token): logprob for token, logprob in top} for top in tops],
        }

    def _usage(self, children: list[Child]) -> Json:
        prompt, output = len(self.request.prompt), sum(len(child.tokens) for child in children)
        return {"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output}


def letter(token: int) -> str:
    """Returns the text of a token. Clients that send tokens do not read it."""
    return chr(ord("A") + token % 26)


def likely(token: int, count: int) -> list[tuple[int, float]]:
    """Returns the sampled token and then others, each less likely than the one before."""
    return [((token + k) % VOCAB_SIZE, -0.25 - 0.5 * k) for k in range(count)]


def ranked(token: int, count: int) -> Json:
    """Returns a token's log-probabilities in the tokens-only dialect, where the sampled token is one of the k."""
    top = [
        {"token_id": id, "logprob": logprob, "rank": rank} for rank, (id, logprob) in enumerate(likely(token, count), 1)
    ]
    return {**top[0], "top_logprobs": top}


def event(data: Json) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()
