"""The JSON of vLLM 0.32's answers with tokens, in both dialects."""

import json
from dataclasses import dataclass, field

from tests.peers.vllm_asked import Asked, Sampling
from tests.peers.vllm_tokens import EOS, VOCAB_SIZE, Kind, state_of

Json = dict[str, object]
CREATED = 1795305094
FINGERPRINT = "vllm-0.32.0-42872a81"


@dataclass
class Child:
    """A choice that is being written."""

    index: int
    kind: Kind
    state: int
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None
    told: int = 0
    """Number of tokens in the pieces sent so far."""

    def write(self, sampling: Sampling, room: int) -> None:
        """Adds one token. `room` is the number of tokens that fit into the context."""
        early = len(self.tokens) < sampling.min_tokens
        ends = sampling.stops if sampling.ignore_eos else sampling.stops | {EOS}
        token = self.kind.token(self.state, len(self.tokens), ends if early else ())
        self.tokens.append(token)
        self.state = state_of([token], self.state)
        if token == EOS and not sampling.ignore_eos:
            self.finish_reason = "stop"
        elif token in sampling.stops:
            self.finish_reason, self.stop_reason = "stop", token
        elif len(self.tokens) >= min(sampling.max_tokens, room):
            self.finish_reason = "length"

    def tell(self) -> list[int]:
        """Returns the tokens that were not sent yet."""
        news, self.told = self.tokens[self.told :], len(self.tokens)
        return news


@dataclass(frozen=True)
class Shapes:
    """The shapes of the answers to one request. `token_ids`: the server is new enough to send token ids."""

    id: str
    model: str
    asked: Asked
    token_ids: bool = True

    def piece(self, child: Child) -> Json:
        """Makes a chunk of what the choice has written since the last one."""
        first, news = child.told == 0, child.tell()
        if self.asked.scale_out:
            choices = [self._generated(child, news)]
            return {"request_id": self.id, "usage": None, "output_mode": "tokens", "choices": choices}
        choice = self._completed(child, news)
        if self._tells_ids:
            prompt = self.asked.prompt if first else None
            choice |= {"prompt_token_ids": prompt, "token_ids": news}
        return {**self._head, "choices": [choice]}

    def last_piece(self, children: list[Child]) -> Json:
        """Makes the chunk with the usage."""
        if self.asked.scale_out:
            usage = self._usage(children)
            return {"request_id": self.id, "usage": usage, "output_mode": "tokens", "choices": []}
        return {**self._head, "choices": [], "usage": self._usage(children), "system_fingerprint": FINGERPRINT}

    def whole(self, children: list[Child], ticket: object = None) -> Json:
        usage = {**self._usage(children), "prompt_tokens_details": None, "completion_tokens_details": None}
        tail: Json = {"usage": usage, "kv_transfer_params": ticket, "ec_transfer_params": None, "metrics": None}
        if self.asked.scale_out:
            choices = [self._generated(child, child.tell()) for child in children]
            head: Json = {"request_id": self.id, "model": self.model, "created": CREATED, "output_mode": "tokens"}
            return {**head, **tail, "choices": choices, "prompt_logprobs": None, "prompt_token_ids": None}
        return {
            **self._head,
            "choices": [self._whole_choice(child) for child in children],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            **tail,
        }

    @property
    def _head(self) -> Json:
        return {"id": self.id, "object": "text_completion", "created": CREATED, "model": self.model}

    @property
    def _tells_ids(self) -> bool:
        return self.token_ids and self.asked.return_token_ids

    def _whole_choice(self, child: Child) -> Json:
        told = self._tells_ids
        return {
            **self._completed(child, child.tell()),
            "token_ids": child.tokens if told else None,
            "prompt_logprobs": None,
            "prompt_token_ids": self.asked.prompt if told else None,
            "routed_experts": None,
        }

    def _completed(self, child: Child, news: list[int]) -> Json:
        return {
            "index": child.index,
            "text": "".join(map(letter, news)),
            "logprobs": None if self.asked.sampling.logprobs is None else self._logprobs(news),
            "finish_reason": child.finish_reason,
            "stop_reason": child.stop_reason,
        }

    def _generated(self, child: Child, news: list[int]) -> Json:
        count = self.asked.sampling.logprobs
        content = [] if count is None else [ranked(token, max(count, 1)) for token in news]
        return {
            "index": child.index,
            "finish_reason": child.finish_reason,
            "stop_reason": child.stop_reason,
            "token_ids": news,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": None,
            "logprobs": None if count is None else {"content": content},
        }

    def _logprobs(self, news: list[int]) -> Json:
        assert self.asked.sampling.logprobs is not None
        name = (lambda token: f"token_id:{token}") if self.asked.tokens_as_ids else letter
        tops = [likely(token, self.asked.sampling.logprobs + 1) for token in news]
        return {
            "text_offset": [0] * len(news),
            "token_logprobs": [top[0][1] for top in tops],
            "tokens": [name(token) for token in news],
            "top_logprobs": [{name(token): logprob for token, logprob in top} for top in tops],
        }

    def _usage(self, children: list[Child]) -> Json:
        prompt, made = len(self.asked.prompt), sum(len(child.tokens) for child in children)
        return {"prompt_tokens": prompt, "total_tokens": prompt + made, "completion_tokens": made}


def letter(token: int) -> str:
    """Returns some text. A client that asks with tokens does not read it."""
    return chr(ord("A") + token % 26)


def likely(token: int, count: int) -> list[tuple[int, float]]:
    """Returns the sampled token and then others, each less likely than the one before."""
    return [((token + k) % VOCAB_SIZE, -0.25 - 0.5 * k) for k in range(count)]


def ranked(token: int, count: int) -> Json:
    """The tokens-only dialect counts the sampled token among the k log-probabilities."""
    top = [
        {"token_id": id, "logprob": logprob, "rank": rank} for rank, (id, logprob) in enumerate(likely(token, count), 1)
    ]
    return {**top[0], "top_logprobs": top}


def event(data: Json) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()
