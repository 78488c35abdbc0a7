"""The replica that the router of `--prefix-router` names, when it knows replicas only by their own reports."""

import json
from pathlib import Path

import pytest

from motet.api.served import ServedModel
from motet.block_names import block_names
from motet.deploy.ray.prefix_choice import PrefixChoice
from motet.engine import Worker
from motet.ids import ModelName
from motet.routing.workers.fleet import Fleet
from motet.testing.fake_engine import FakeEngine, fake_info
from motet.text.formats import ModelFormats
from motet.text.template import ChatTemplate
from motet.text.tokenizer import Tokenizer
from motet.types import Policy
from tests.api.two_models import ListedModels
from tests.routing.scene import script

pytestmark = pytest.mark.anyio

TEXT = "the hand in the sand and then the other hand " * 4
MODEL = ModelName("fake")


@pytest.fixture
def fleet() -> Fleet:
    return Fleet([Worker(id, FakeEngine(script), f"http://{id}", local=False) for id in ("a", "b")])


@pytest.fixture
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture
def choice(fleet: Fleet, tokenizer: Tokenizer) -> PrefixChoice:
    template = ChatTemplate.of(tokenizer)
    formats = ModelFormats(tokenizer=tokenizer)
    served = ServedModel(name=MODEL, engine=FakeEngine(script), tokenizer=tokenizer, template=template, formats=formats)
    return PrefixChoice(fleet, ListedModels(served), policy=Policy.KV)


def completion(**fields: object) -> bytes:
    return json.dumps({"prompt": TEXT, "model": MODEL, **fields}).encode()


def chat(**fields: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": TEXT}], **fields}).encode()


def cache(fleet: Fleet, id: str, prompt: list[int], salt: str = "") -> None:
    fleet.index.stored(id, block_names(prompt, fake_info().block_size, salt=salt))


def busy(fleet: Fleet, id: str, choices: int) -> None:
    member = fleet.get(id)
    assert member is not None
    member.reported(choices)


def open_choices(fleet: Fleet) -> dict[str, int]:
    return {member.id: member.open_choices for member in fleet.members}


@pytest.mark.parametrize("id", ["a", "b"])
async def test_a_prompt_goes_where_it_is_cached(
    id: str, choice: PrefixChoice, fleet: Fleet, tokenizer: Tokenizer
) -> None:
    cache(fleet, id, tokenizer.encode(TEXT))
    assert await choice.choose(completion(), "") == f"http://{id}"


async def test_a_chat_is_rendered_as_the_server_does(choice: PrefixChoice, fleet: Fleet, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": TEXT}]
    text = ChatTemplate.of(tokenizer).render(messages, add_generation_prompt=True)
    cache(fleet, "b", tokenizer.encode(text, add_special_tokens=False))
    assert [await choice.choose(chat(), "") for _ in range(2)] == ["http://b"] * 2


async def test_token_ids_are_taken_as_they_are(choice: PrefixChoice, fleet: Fleet) -> None:
    cache(fleet, "b", list(range(1, 101)))
    body = json.dumps({"token_ids": list(range(1, 101)), "sampling_params": {"max_tokens": 2}}).encode()
    assert await choice.choose(body, "") == "http://b"


async def test_a_salt_hides_what_others_cached(choice: PrefixChoice, fleet: Fleet, tokenizer: Tokenizer) -> None:
    cache(fleet, "b", tokenizer.encode(TEXT), salt="mine")
    busy(fleet, "b", 1)
    assert await choice.choose(completion(cache_salt="yours"), "") == "http://a"
    assert await choice.choose(completion(cache_salt="mine"), "") == "http://b"


async def test_choices_sent_to_a_replica_count_until_it_reports_its_load(choice: PrefixChoice, fleet: Fleet) -> None:
    first = await choice.choose(completion(n=4, best_of=8), "")
    assert sorted(open_choices(fleet).values()) == [0, 8]
    assert await choice.choose(completion(prompt=["x", "y"], n=2), "") != first
    assert sorted(open_choices(fleet).values()) == [4, 8]
    for id in ("a", "b"):
        busy(fleet, id, 1)
    assert open_choices(fleet) == {"a": 1, "b": 1}


async def test_a_session_stays(choice: PrefixChoice, fleet: Fleet) -> None:
    first = await choice.choose(chat(), "s")
    assert [await choice.choose(chat(), "s") for _ in range(3)] == [first] * 3


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b"no JSON",
        completion()[:40],
        completion(n=0),
        completion(prompt=7),
        completion(model="nobody's"),
        completion(unheard_of=1),
        completion(prompt="a " * 100_000),
        chat(messages=[]),
        b'{"token_ids": [100000], "sampling_params": {}}',
    ],
)
async def test_a_body_that_cannot_be_read_goes_to_the_least_loaded(
    body: bytes, choice: PrefixChoice, fleet: Fleet
) -> None:
    busy(fleet, "a", 3)
    assert await choice.choose(body, "") == "http://b"


async def test_without_replicas_none_is_named(tokenizer: Tokenizer) -> None:
    choice = PrefixChoice(Fleet(), ListedModels(), policy=Policy.KV)
    assert await choice.choose(chat(), "s") is None
