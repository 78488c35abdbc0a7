"""`/tokenize` and `/detokenize`, in vLLM's shapes."""

import pytest

from tests.api.serving import Served
from tests.tiny_tokenizer import EOS_ID, fake_answer

pytestmark = pytest.mark.anyio


async def test_text_becomes_tokens(served: Served) -> None:
    response = await served.http.post("/tokenize", json={"prompt": "hello there"})
    ids = fake_answer("hello there", eos=False)
    assert response.json() == {"count": len(ids), "max_model_len": 4096, "tokens": ids, "token_strs": None}


async def test_token_strings_are_the_vocabularys_own(served: Served) -> None:
    response = await served.http.post("/tokenize", json={"prompt": "hello the", "return_token_strs": True})
    assert response.json()["token_strs"] == ["hello", "Ġthe"]


async def test_chat_becomes_the_tokens_that_a_chat_request_has(served: Served) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tokens = (await served.http.post("/tokenize", json={"messages": messages})).json()["tokens"]
    await served.http.post("/v1/chat/completions", json={"messages": messages})
    assert tuple(tokens) == served.engine.requests[0].prompt


async def test_generation_prompt_can_be_left_out(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False}
    tokens = (await served.http.post("/tokenize", json=body)).json()["tokens"]
    text = served.tokenizer.decode(tokens, skip_special_tokens=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n"


async def test_tokens_become_text_special_ones_too(served: Served) -> None:
    response = await served.http.post("/detokenize", json={"tokens": [*fake_answer("héllo", eos=False), EOS_ID]})
    assert response.json() == {"prompt": "héllo<|eos|>"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "hi"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "other": 1}, "other"),
        ("/detokenize", {"tokens": [512]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": ["x"]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_what_is_refused_is_named(served: Served, path: str, body: dict[str, object], param: str) -> None:
    response = await served.http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_unknown_model_is_a_404(served: Served) -> None:
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
        response = await served.http.post(path, json={**body, "model": "other"})
        assert response.status_code == 404
