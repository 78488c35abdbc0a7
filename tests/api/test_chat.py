"""Chat completions, through the official client."""

import pytest

from tests.api.serving import Served

pytestmark = pytest.mark.anyio


async def test_n_choices_come_in_order_with_one_prompt_counted(served: Served) -> None:
    answer = await served.openai.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], n=3
    )
    assert [choice.message.content for choice in answer.choices] == ["hello 0", "hello 1", "hello 2"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(served.engine.requests[0].prompt)
    assert answer.usage.completion_tokens == served.engine.generated_tokens
