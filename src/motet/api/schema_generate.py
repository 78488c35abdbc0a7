"""The body of `POST /inference/v1/generate`, in vLLM's shape: token ids in, token ids out."""

from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import Field

from motet.api.schema_shared import GeneratingFields, TokenId
from motet.api.schema_structured import StructuredFields

MAX_LOGPROBS = 20


class GenerateSampling(StructuredFields):
    """vLLM's `SamplingParams` as JSON. What has no meaning for token ids alone is ignored."""

    ignored = frozenset({"detokenize", "output_kind", "skip_clone", "_all_stop_token_ids"})
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "allowed_token_ids": (),
        "bad_words": ([],),
        "extra_args": ({},),
        "flat_logprobs": (False,),
        "logits_processors": ([],),
        "skip_reading_prefix_cache": (False,),
        "spaces_between_special_tokens": (True,),
        "truncate_prompt_tokens": (),
    }

    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)


class TokensRequest(GeneratingFields):
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {"features": ()}

    token_ids: list[TokenId]
    sampling_params: GenerateSampling
    request_id: str | None = Field(None, min_length=1, max_length=200)

    def without_answer(self) -> Self:
        """The same prompt, and nothing asked of an answer that there will not be."""
        unasked = {"n": 1, "logprobs": None, "prompt_logprobs": None}
        return self.model_copy(update={"sampling_params": self.sampling_params.model_copy(update=unasked)})
