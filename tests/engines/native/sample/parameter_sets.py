"""Sampling parameters that cover each rule alone, and rules together."""

from motet.types import SamplingParams

PARAMETER_SETS = {
    "plain": SamplingParams(max_tokens=9),
    "cold": SamplingParams(max_tokens=9, temperature=0.3),
    "hot": SamplingParams(max_tokens=9, temperature=1.9),
    "greedy": SamplingParams(max_tokens=9, temperature=0.0),
    "top_k": SamplingParams(max_tokens=9, top_k=40),
    "top_k beyond the first candidates": SamplingParams(max_tokens=9, top_k=300),
    "top_p": SamplingParams(max_tokens=9, top_p=0.5),
    "top_p beyond the first candidates": SamplingParams(max_tokens=9, top_p=0.95, temperature=1.5),
    "min_p": SamplingParams(max_tokens=9, min_p=0.05),
    "top_k, then top_p of what is left": SamplingParams(max_tokens=9, top_k=20, top_p=0.6),
    "top_p, then min_p": SamplingParams(max_tokens=9, top_p=0.8, min_p=0.1),
    "all filters": SamplingParams(max_tokens=9, temperature=1.2, top_k=80, top_p=0.7, min_p=0.02),
    "bias": SamplingParams(max_tokens=9, logit_bias={3: 6.0, 4: -100.0, 999: 5.5}),
    "allowed": SamplingParams(max_tokens=9, allowed_token_ids=(900, 7, 3, 501, 120)),
    "allowed, greedy": SamplingParams(max_tokens=9, temperature=0.0, allowed_token_ids=(5, 120)),
    "allowed and all else": SamplingParams(
        max_tokens=9,
        temperature=0.8,
        top_k=300,
        top_p=0.95,
        min_p=0.01,
        allowed_token_ids=tuple(range(0, 1000, 7)),
        logit_bias={4: 100.0, 7: 2.0},
        frequency_penalty=-1.5,
        repetition_penalty=1.3,
        min_tokens=6,
    ),
    "bad words": SamplingParams(max_tokens=9, bad_word_ids=((3,), (999,), (7, 4), (5, 7, 6), (8, 9), (120, 121, 122))),
    "bad words, greedy": SamplingParams(
        max_tokens=9, temperature=0.0, logit_bias={3: 9.0}, bad_word_ids=((3,), (7, 4))
    ),
    "presence": SamplingParams(max_tokens=9, presence_penalty=2.0),
    "frequency": SamplingParams(max_tokens=9, frequency_penalty=1.5),
    "negative penalties": SamplingParams(max_tokens=9, frequency_penalty=-1.5, presence_penalty=-2.0),
    "repetition": SamplingParams(max_tokens=9, repetition_penalty=1.8),
    "repetition encouraged": SamplingParams(max_tokens=9, repetition_penalty=0.5),
    "min_tokens": SamplingParams(max_tokens=9, min_tokens=5, stop_token_ids=(8, 9)),
    "all edits, greedy": SamplingParams(
        max_tokens=9, temperature=0.0, logit_bias={7: 3.0, 900: 6.0}, repetition_penalty=1.3, frequency_penalty=0.7
    ),
    "everything": SamplingParams(
        max_tokens=9,
        temperature=0.9,
        top_k=200,
        top_p=0.9,
        min_p=0.001,
        logit_bias={3: 6.0, 0: 50.0},
        presence_penalty=0.3,
        frequency_penalty=0.4,
        repetition_penalty=1.1,
        min_tokens=6,
    ),
    "logprobs": SamplingParams(max_tokens=9, logprobs=5),
}
