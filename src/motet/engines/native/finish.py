"""When a choice is done, as far as token ids tell. Stop strings are text, and end it from outside."""

from motet.types import Finish, FinishReason, SamplingParams


def finish_of(
    token_id: int,
    *,
    num_written: int,
    num_total: int,
    sampling: SamplingParams,
    eos: frozenset[int],
    max_model_len: int,
) -> Finish | None:
    """The end that the token just written brings, if any; `num_written` and `num_total` (with the prompt) count it.

    End-of-sequence and stop tokens cannot be drawn before `min_tokens`, nor can a choice with a grammar that ignores
    end-of-sequence draw it, but where the grammar allows nothing else: so they need no check here.
    """
    if token_id in eos and (not sampling.ignore_eos or sampling.grammar is not None):
        return Finish(FinishReason.STOP)
    if token_id in sampling.stop_token_ids:
        return Finish(FinishReason.STOP, token_id)
    if num_written >= sampling.max_tokens or num_total >= max_model_len:
        return Finish(FinishReason.LENGTH)
    return None
