"""The sources of a gateway's tokenizers."""

import asyncio
from pathlib import Path

import pytest

from motet.deploy.discover import read_files
from motet.deploy.gateway_models import RETRY_S, TokenizerRules, Tokenizers
from motet.errors import EngineDiedError, EngineError
from motet.text.formats import ParserNames

pytestmark = pytest.mark.anyio


class TokenizerSource:
    """A worker that sends the tokenizer of a folder, or has none."""

    def __init__(self, folder: Path | None) -> None:
        self.requests = 0
        self.folder = folder

    async def __call__(self) -> dict[str, bytes]:
        self.requests += 1
        await asyncio.sleep(0)
        if self.folder is None:
            raise EngineDiedError("the worker is gone")
        return read_files(self.folder)


async def never() -> dict[str, bytes]:
    raise AssertionError("no request was expected")


async def test_a_model_gets_the_tokenizer_of_its_worker_once(folder: Path) -> None:
    tokenizers, worker = Tokenizers(TokenizerRules({})), TokenizerSource(folder)
    assert tokenizers.get("m") is None
    first, second = await asyncio.gather(
        tokenizers.load("m", worker, worker="w"), tokenizers.load("m", worker, worker="w")
    )
    assert first is second is tokenizers.get("m") is await tokenizers.load("m", never, worker="w")
    assert worker.requests == 1
    assert first.files == read_files(folder)
    assert tokenizers.get("another") is None


async def test_a_folder_named_for_the_model_takes_precedence(folder: Path, tmp_path: Path) -> None:
    tokenizers = Tokenizers(TokenizerRules({"m": folder}, others=tmp_path))
    assert (await tokenizers.load("m", never, worker="w")).files == read_files(folder)
    with pytest.raises(EngineError, match="no tokenizer for other"):
        await tokenizers.load("other", never, worker="w")


async def test_a_configured_chat_template_replaces_that_of_the_model(folder: Path) -> None:
    tokenizers = Tokenizers(TokenizerRules({}, others=folder, chat_template="{{ messages }}!"))
    assert (await tokenizers.load("m", never, worker="w")).tokenizer.chat_template == "{{ messages }}!"


async def test_the_template_or_the_settings_decide_how_answers_are_parsed(folder: Path) -> None:
    for parsers, names in ((ParserNames(), "think"), (ParserNames(reasoning="kimi"), "kimi")):
        rules = TokenizerRules({}, others=folder, chat_template="<think>{{ messages }}", parsers=parsers)
        formats = (await Tokenizers(rules).load("m", never, worker="w")).formats
        assert formats.reasoning is not None and names in formats.reasoning.names


async def test_a_failed_tokenizer_is_requested_again_after_a_while(folder: Path) -> None:
    now_s = 0.0
    tokenizers, worker = Tokenizers(TokenizerRules({}), clock=lambda: now_s), TokenizerSource(None)
    for _ in range(2):
        with pytest.raises(EngineError) as caught:
            await tokenizers.load("m", worker, worker="w")
        assert caught.value.message == "no tokenizer for m (set --tokenizer-of m=FOLDER): the worker is gone"
    assert worker.requests == 1
    now_s, worker.folder = RETRY_S, folder
    assert await tokenizers.load("m", worker, worker="w") is tokenizers.get("m")


async def test_a_worker_without_a_tokenizer_does_not_prevent_another_from_sending_it(folder: Path) -> None:
    """One worker can have loaded the model from a folder on its machine, and another by its name on a hub."""
    tokenizers = Tokenizers(TokenizerRules({}))
    with pytest.raises(EngineError, match="the worker is gone"):
        await tokenizers.load("m", TokenizerSource(None), worker="one")
    loaded = await tokenizers.load("m", TokenizerSource(folder), worker="other")
    assert loaded is await tokenizers.load("m", never, worker="one")
