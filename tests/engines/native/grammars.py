"""Grammars for tests, and tiny models whose tokenizer has the tokens that the grammars need."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from motet.grammar.compiled_grammar import Grammars, Matcher
from motet.text.tokenizer import Tokenizer
from motet.types import Finish, FinishReason, GenerateRequest, Grammar, GrammarKind
from tests.engines.native.drive import GroupOutcome, group
from tests.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.tiny_tokenizer import build_tiny_tokenizer, save_tiny_tokenizer

EOS_IDS = (2,)
"""End-of-sequence tokens of tiny models."""
STOP = Finish(FinishReason.STOP)

PERSON = Grammar(
    GrammarKind.JSON,
    json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 4, "maxLength": 9},
                "marks": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
            },
            "required": ["name", "marks"],
            "additionalProperties": False,
        }
    ),
)
LONG = "the quick brown fox jumps over the lazy dog " * 4
FORM = Grammar(
    GrammarKind.JSON,
    json.dumps(
        {
            "type": "object",
            "properties": {"introduction": {"const": LONG}, "answer": {"enum": ["yes", "no"]}, "end": {"const": "end"}},
            "required": ["introduction", "answer", "end"],
            "additionalProperties": False,
        }
    ),
)
"""A form with mostly forced tokens."""
NUMBER = Grammar(GrammarKind.REGEX, "[1-9][0-9]{3,11}")
WORD = Grammar(GrammarKind.CHOICE, '["yes", "no", "hello"]')


def speaking_model(folder: Path, family: str = "llama", *, eos_token_id: object = EOS_IDS[0]) -> Path:
    """Saves a tiny model with a tokenizer, and with `eos_token_id` in `config.json`."""
    save_tiny_model(family, folder)
    save_tiny_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": eos_token_id}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


@cache
def tiny_grammars() -> Grammars:
    return Grammars(tiny_tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=EOS_IDS)


@cache
def tiny_tokenizer() -> Tokenizer:
    return Tokenizer(build_tiny_tokenizer())


def matcher_of(grammar: Grammar, output_tokens: Sequence[int] = ()) -> Matcher:
    return tiny_grammars().get(grammar).matcher(output_tokens)


def text_of(tokens: Sequence[int]) -> str:
    return tiny_tokenizer().decode(tokens)


def token_of(letter: str) -> int:
    (token_id,) = tiny_tokenizer().encode(letter)
    return token_id


def person(name: str, prompt: tuple[int, ...], **changes: object) -> GenerateRequest:
    """Returns a request whose choices each describe a person."""
    return group(name, prompt, **{"grammar": PERSON, "max_tokens": 120, "ignore_eos": False, **changes})  # type: ignore[arg-type]


def assert_persons(outcome: GroupOutcome) -> None:
    assert outcome.error is None
    for index, tokens in outcome.tokens.items():
        assert outcome.finish[index] == STOP and tokens[-1] in EOS_IDS
        value = json.loads(text_of(tokens))
        assert 4 <= len(value["name"]) <= 9 and 2 <= len(value["marks"]) <= 3
