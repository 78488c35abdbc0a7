"""Random parameters of tools: every call that the grammar of a format allows is read as one with valid arguments."""

import json
from random import Random

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from motet.errors import GrammarError
from motet.grammar.compiled_grammar import CompiledGrammar
from motet.grammar.schema.client_schema import closed_schema
from motet.text.formats import FORMATS
from motet.text.tools.tool_format import Tool, ToolFormat, ToolMode, ToolRules
from motet.types import Grammar, GrammarKind
from tests.grammar.models import grammars_of
from tests.property_settings import examples
from tests.structured.any_schema import parameters
from tests.structured.oracle import SchemaOracle
from tests.structured.schemas.case import Schema
from tests.structured.walk import walk
from tests.text.tools.recordings import read

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]

GRAMMARS = grammars_of()
ENDS = {"qwen3_coder": ["\n</parameter>"], "glm45": ["</arg_value>"], "minimax_m2": ["</parameter>"]}
"""Texts that end an argument, for formats with arguments between tags."""


def grammar_of(form: ToolFormat, tool: Tool) -> CompiledGrammar:
    rules = ToolRules(callable=(tool,), mode=ToolMode.REQUIRED, parallel=False)
    return GRAMMARS.get(Grammar(GrammarKind.LARK, form.grammar(rules, {})))


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@examples(5)
@given(parameters, st.integers(0, 2**32))
def test_every_allowed_call_has_valid_arguments(form: ToolFormat, schema: Schema, seed: int) -> None:
    tool = Tool(name="f", parameters=closed_schema(schema), strict=True)
    try:
        grammar = grammar_of(form, tool)
    except GrammarError:
        event("refused")
        return
    event("compiled")
    text = walk(grammar, Random(seed), ends=ENDS.get(form.name, ()))
    content, calls = read(form, [text], (tool,))
    assert content == "", text
    ((name, arguments),) = calls
    assert name == "f"
    assert SchemaOracle(schema).errors(arguments) == "", text
    assert read(form, [*text], (tool,)) == (content, calls), "read in pieces"
    assert json.loads(arguments)
