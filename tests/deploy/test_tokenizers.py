"""How a gateway gets the tokenizers of its models."""

import asyncio
from pathlib import Path

import pytest

from motet.deploy.discover import read_files
from motet.deploy.gateway_models import TRY_AGAIN_S, TokenizerRules, Tokenizers
from motet.errors import EngineDiedError, EngineError
from motet.text.formats import ParserNames

pytestmark = pytest.mark.anyio


class HandsOut:
    """A worker that hands out the tokenizer of a folder, or has none."""

    def __init__(self, folder: Path | None) -> None:
        self.asked = 0
        self.folder = folder

    async def __call__(self) -> dict[str, bytes]:
        self.asked += 1
        await asyncio.sleep(0)
        if self.folder is None:
            raise EngineDiedError("the worker is gone")
        return read_files(self.folder)


async def never() -> dict[str, bytes]:
    raise AssertionError("nobody was to be asked")


async def test_a_model_takes_the_tokenizer_of_its_worker_and_keeps_it(folder: Path) -> None:
    tokenizers, worker = Tokenizers(TokenizerRules({})), HandsOut(folder)
    assert tokenizers.get("m") is None
    first, second = await asyncio.gather(
        tokenizers.learn("m", worker, worker="w"), tokenizers.learn("m", worker, worker="w")
    )
    assert first is second is tokenizers.get("m") is await tokenizers.learn("m", never, worker="w")
    assert worker.asked == 1
    assert first.files == read_files(folder)
    assert tokenizers.get("another") is None


async def test_a_tokenizer_that_was_named_for_the_model_is_taken_instead(folder: Path, tmp_path: Path) -> None:
    tokenizers = Tokenizers(TokenizerRules({"m": folder}, others=tmp_path))
    assert (await tokenizers.learn("m", never, worker="w")).files == read_files(folder)
    with pytest.raises(EngineError, match="no tokenizer for other"):
        await tokenizers.learn("other", never, worker="w")


async def test_a_chat_template_that_was_given_takes_the_place_of_the_models(folder: Path) -> None:
    tokenizers = Tokenizers(TokenizerRules({}, others=folder, chat_template="{{ messages }}!"))
    assert (await tokenizers.learn("m", never, worker="w")).tokenizer.chat_template == "{{ messages }}!"


async def test_the_template_or_the_operator_decides_how_answers_are_parsed(folder: Path) -> None:
    for parsers, names in ((ParserNames(), "think"), (ParserNames(reasoning="kimi"), "kimi")):
        rules = TokenizerRules({}, others=folder, chat_template="<think>{{ messages }}", parsers=parsers)
        formats = (await Tokenizers(rules).learn("m", never, worker="w")).formats
        assert formats.reasoning is not None and names in formats.reasoning.names


async def test_a_tokenizer_that_could_not_be_had_is_looked_for_again_after_a_while(folder: Path) -> None:
    now_s = 0.0
    tokenizers, worker = Tokenizers(TokenizerRules({}), clock=lambda: now_s), HandsOut(None)
    for _ in range(2):
        with pytest.raises(EngineError) as caught:
            await tokenizers.learn("m", worker, worker="w")
        assert caught.value.message == "no tokenizer for m (give --tokenizer-of m=FOLDER): the worker is gone"
    assert worker.asked == 1
    now_s, worker.folder = TRY_AGAIN_S, folder
    assert await tokenizers.learn("m", worker, worker="w") is tokenizers.get("m")


async def test_a_worker_without_a_tokenizer_keeps_nobody_else_from_handing_one_out(folder: Path) -> None:
    """One worker may have loaded the model from a folder of its own machine, and another by its name on a hub."""
    tokenizers = Tokenizers(TokenizerRules({}))
    with pytest.raises(EngineError, match="the worker is gone"):
        await tokenizers.learn("m", HandsOut(None), worker="one")
    loaded = await tokenizers.learn("m", HandsOut(folder), worker="other")
    assert loaded is await tokenizers.learn("m", never, worker="one")
