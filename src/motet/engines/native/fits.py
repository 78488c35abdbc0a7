"""Whether a group can ever run here: what only the engine's own limits can refuse."""

from motet.engines.native.sequence import Group
from motet.errors import ContextLengthError, RequestError
from motet.types import EngineInfo


def check_fits(group: Group, info: EngineInfo, blocks_at_admission: int) -> None:
    """Raises RequestError, naming the field."""
    request = group.request
    longest = len(request.prompt) + max((len(start.written) for start in request.choices), default=0)
    shortest = 2 if group.readers else 1
    if len(request.prompt) < shortest or longest >= info.max_model_len:
        raise ContextLengthError(
            f"prompt and written tokens are {longest}; at least {shortest} of the prompt and at most "
            f"{info.max_model_len - 1} in all are possible",
            param="prompt",
        )
    if any(len(start.written) >= request.sampling.max_tokens for start in request.choices):
        raise RequestError("a choice has written its max_tokens already: there is nothing to resume", param="choices")
    if len(group.sequences) > info.max_num_seqs:
        raise RequestError(
            f"n is {len(group.sequences)}; this engine runs at most {info.max_num_seqs} choices at once "
            "(--max-num-seqs)",
            param="n",
        )
    if blocks_at_admission > info.num_blocks:
        raise RequestError(
            f"the prompt and n = {len(group.sequences)} choices need {blocks_at_admission} KV blocks at once; this "
            f"engine has {info.num_blocks}: ask for a smaller n or raise --kv-cache-gb",
            param="n",
        )
