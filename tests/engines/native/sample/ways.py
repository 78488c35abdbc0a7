"""Every way of drawing a token."""

from motet.types import SamplingParams

WAYS = {
    "plain": SamplingParams(max_tokens=9),
    "temperature": SamplingParams(max_tokens=9, temperature=0.7),
    "greedy": SamplingParams(max_tokens=9, temperature=0.0),
    "top_k": SamplingParams(max_tokens=9, top_k=50),
    "top_p": SamplingParams(max_tokens=9, top_p=0.9),
    "top_p of nearly all": SamplingParams(max_tokens=9, top_p=0.999),
    "min_p": SamplingParams(max_tokens=9, min_p=0.02),
    "all filters": SamplingParams(max_tokens=9, temperature=1.3, top_k=900, top_p=0.95, min_p=0.001),
    "edits": SamplingParams(
        max_tokens=9,
        repetition_penalty=1.2,
        frequency_penalty=0.5,
        presence_penalty=0.2,
        logit_bias={5: 4.0},
        min_tokens=20,
    ),
    "logprobs": SamplingParams(max_tokens=9, logprobs=5),
}
