"""Structured outputs and log-probabilities in the manner of vLLM's examples."""

import json
import re
import sys

from motet import LLM, SamplingParams, StructuredOutputsParams, TokensPrompt

SCHEMA = {
    "type": "object",
    "properties": {"brand": {"type": "string", "maxLength": 8}, "model": {"enum": ["sedan", "truck"]}},
    "required": ["brand", "model"],
    "additionalProperties": False,
}
GRAMMAR = 'start: "SELECT " ("a" | "b") " FROM t"'
llm = LLM(model=sys.argv[1], max_model_len=512, max_logprobs=5)

choice = StructuredOutputsParams(choice=["Positive", "Negative"])
outputs = llm.generate("Classify: good!", SamplingParams(structured_outputs=choice))
assert outputs[0].outputs[0].text in ("Positive", "Negative")

regex = StructuredOutputsParams(regex=r"[a-z]{2,8}@[a-z]{2,8}\.com\n")
outputs = llm.generate("An email:", SamplingParams(structured_outputs=regex, stop=["\n"], max_tokens=60))
assert re.fullmatch(r"[a-z]{2,8}@[a-z]{2,8}\.com", outputs[0].outputs[0].text)

for form in (StructuredOutputsParams(json=SCHEMA), StructuredOutputsParams(json=json.dumps(SCHEMA))):
    outputs = llm.generate(["A car:", "A truck:"], SamplingParams(n=4, structured_outputs=form, max_tokens=200))
    for output in outputs:
        for one in output.outputs:
            if one.finish_reason == "stop":  # otherwise it was cut off
                assert set(json.loads(one.text)) == {"brand", "model"}

outputs = llm.generate("SQL:", SamplingParams(structured_outputs=StructuredOutputsParams(grammar=GRAMMAR)))
assert re.fullmatch(r"SELECT [ab] FROM t", outputs[0].outputs[0].text)

params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=1)
(output,) = llm.generate([TokensPrompt(prompt_token_ids=[5, 6, 7])], params)
assert output.prompt is None and output.prompt_token_ids == [5, 6, 7]
assert len(output.prompt_logprobs) == 3 and output.prompt_logprobs[0] is None
completion = output.outputs[0]
for token_id, logprobs in zip(completion.token_ids, completion.logprobs):
    assert logprobs[token_id].rank == 1 and len(logprobs) == 3
    best = max(logprobs.values(), key=lambda logprob: logprob.logprob)
    print(token_id, repr(best.decoded_token), best.logprob)
assert (
    abs(completion.cumulative_logprob - sum(e[t].logprob for t, e in zip(completion.token_ids, completion.logprobs)))
    < 1e-9
)
