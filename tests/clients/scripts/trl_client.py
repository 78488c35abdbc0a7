"""TRL's unchanged VLLMClient: texts and ids with n, log-probabilities, chats with tools, scores of given sequences, and
new weights.

TRL checks that vLLM is installed before it makes a client. Here that check always succeeds. In place of NCCL, which is
part of vLLM and needs a GPU, the tensors are sent to the server in the body of a request.
"""

import math
from collections.abc import Callable, Iterator

import requests
import torch
from safetensors.torch import save
from scene import URL, WEATHER
from trl.generation import vllm_client
from trl.generation.vllm_client import VLLMClient

SERVER = URL.removesuffix("/v1")
N, MAX_TOKENS = 3, 6
TOP = 100
SAME = 0.25
"""Tolerance in nats: in bfloat16, a prompt and an output are computed in different orders. The log-probabilities of
unlikely tokens differ by up to 0.09."""
PROMPTS = ["A boat is", "The sea"]
CHATS = [[{"role": "user", "content": "Name a boat."}], [{"role": "user", "content": "Name a sea."}]]


def main() -> None:
    vllm_client.is_vllm_available = lambda min_version=None: True
    vllm_client._HAS_STATEFUL_TRAINER_ENGINE = True  # noqa: SLF001 as with the vLLM version that it requires
    vllm_client.packed_nccl_broadcast_producer = send
    client = VLLMClient(base_url=SERVER, connection_timeout=60)
    configuration(client)
    generate(client)
    chat(client)
    score(client)
    score_group(client)
    update(client)


def configuration(client: VLLMClient) -> None:
    """TRL's trainers read this before they start: the server must sample from the distribution that it reports."""
    info = client.get_server_info()
    assert info["weight_transfer_config"] is not None
    assert (info["lora_config"]["max_lora_rank"], info["lora_config"]["max_loras"]) == (64, 64)
    assert info["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert info["model_config"]["dtype"] == "torch.bfloat16"
    assert client.get_world_size() == 1


def generate(client: VLLMClient) -> None:
    ids = client.generate(PROMPTS, max_tokens=1)["prompt_ids"]
    for prompts in (PROMPTS, ids):
        for logprobs, width in ((0, 1), (5, 5), (None, None)):
            got = client.generate(prompts, n=N, max_tokens=MAX_TOKENS, logprobs=logprobs)
            assert got["prompt_ids"] == ids
            check(got, width)
    same = {"n": N, "max_tokens": MAX_TOKENS, "generation_kwargs": {"seed": 7}}
    assert client.generate(ids, **same) == client.generate(PROMPTS, **same)
    sure = client.generate(ids, max_tokens=MAX_TOKENS, temperature=0.0, top_k=5, top_p=0.9, min_p=0.01)
    assert len(sure["completion_ids"]) == len(PROMPTS)
    client.generate(PROMPTS, max_tokens=MAX_TOKENS, structured_outputs_regex="[a-z]+ [a-z]+")


def chat(client: VLLMClient) -> None:
    for logprobs, width in ((0, 1), (5, 5), (None, None)):
        check(client.chat(CHATS, n=N, max_tokens=MAX_TOKENS, logprobs=logprobs), width)
    plain, with_tools = (client.chat(CHATS, max_tokens=1, tools=tools)["prompt_ids"][0] for tools in (None, [WEATHER]))
    assert len(with_tools) >= len(plain)
    client.chat(CHATS, max_tokens=1, chat_template_kwargs={"enable_thinking": False})


def score(client: VLLMClient) -> None:
    """The log-probabilities of a given sequence equal those that the server reported when it generated the sequence."""
    got = client.generate(PROMPTS, max_tokens=MAX_TOKENS, generation_kwargs={"ignore_eos": True})
    sequences = [[*prompt, *answer] for prompt, answer in zip(got["prompt_ids"], got["completion_ids"], strict=True)]
    lengths = [len(prompt) for prompt in got["prompt_ids"]]
    for chunk_size in (0, 1):
        scores = client.get_sequence_logprobs(sequences, lengths, top_logprobs=TOP, chunk_size=chunk_size)
        for i, generated in enumerate(got["logprobs"]):
            assert [len(row) for row in scores["logprobs"][i]] == [TOP] * MAX_TOKENS
            assert scores["actual_token_ids"][i] == [[token] for token in got["completion_ids"][i]]
            for (first,), (again,) in zip(generated, scores["actual_logprobs"][i], strict=True):
                assert math.isclose(first, again, abs_tol=SAME)


def score_group(client: VLLMClient) -> None:
    """The answers to one prompt compute it once. A second time, almost nothing is computed."""
    prompt = client.generate([" ".join(map(str, range(100)))], max_tokens=1)["prompt_ids"][0]
    sequences = [[*prompt, 1000 + answer, *prompt[:20]] for answer in range(8)]
    lengths = [len(prompt)] * len(sequences)
    first, again = (computed(client, sequences, lengths) for _ in range(2))
    assert again[1] == first[1]
    assert first[0] < len(prompt) + len(sequences) * 64 and again[0] < len(sequences) * 32, (first[0], again[0])


def computed(client: VLLMClient, sequences: list[list[int]], lengths: list[int]) -> tuple[float, dict[str, list]]:
    """Returns the number of prompt tokens that the server computes for these scores, and the scores."""
    before = prefilled()
    scores = client.get_sequence_logprobs(sequences, lengths, top_logprobs=TOP)
    return prefilled() - before, scores


def prefilled() -> float:
    lines = requests.get(f"{SERVER}/metrics", timeout=60).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("motet:prefill_tokens_total"))


class Last(torch.nn.Module):
    """The last norm of the model, with the parameter name of the complete model."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.model = torch.nn.ModuleDict({"norm": torch.nn.RMSNorm(576)})
        torch.nn.init.constant_(self.model["norm"].weight, scale)


def send(
    iterator: Iterator[tuple[str, torch.Tensor]], group: None, src: int, post_iter_func: Callable[..., torch.Tensor]
) -> None:
    """Sends the tensors of an update, which TRL announces in a second request at the same time."""
    body = save({item[0]: post_iter_func(item).contiguous() for item in iterator})
    headers = {"Content-Type": "application/octet-stream"}
    requests.post(f"{SERVER}/update_weights", data=body, headers=headers).raise_for_status()


def update(client: VLLMClient) -> None:
    """Each kind of update changes the answers, and equal weights give equal answers."""
    same = {"max_tokens": MAX_TOKENS, "temperature": 0.0, "generation_kwargs": {"ignore_eos": True}}
    answers = [client.generate(PROMPTS, **same)["completion_ids"]]
    for scale in (1.0, -1.0):
        client.update_model_params(Last(scale))
        answers.append(client.generate(PROMPTS, **same)["completion_ids"])
    name, weight = "model.norm.weight", torch.ones(576)
    client.update_named_param(name, weight)
    answers.append(client.generate(PROMPTS, **same)["completion_ids"])
    with client.weight_update():
        client.update_named_param(name, -weight)
    answers.append(client.generate(PROMPTS, **same)["completion_ids"])
    client.reset_prefix_cache()
    assert client.generate(PROMPTS, **same)["completion_ids"] == answers[4]
    assert answers[1] == answers[3] and answers[2] == answers[4] and answers[1] != answers[2]


def check(got: dict[str, list], width: int | None) -> None:
    """Checks that there are n answers to each prompt, and the number of log-probabilities of each token."""
    assert len(got["completion_ids"]) == len(PROMPTS) * N
    if width is None:
        assert got["logprobs"] is None
        return
    for tokens, rows, ids in zip(got["completion_ids"], got["logprobs"], got["logprob_token_ids"], strict=True):
        assert 0 < len(tokens) == len(rows) == len(ids)
        assert all(token in row and len(row) in (width, width + 1) for token, row in zip(tokens, ids, strict=True))
        assert all(row == sorted(row, reverse=True) and row[-1] <= 0 for row in rows)


main()
