"""Chat templates are rendered within limits of time and memory: here, or in a process of their own."""

import sys
import time
from collections.abc import Mapping
from typing import Any

import pytest

from motet.errors import EngineError, RequestError
from motet.text.rendering import render_process
from motet.text.rendering.jinja import MeteredTemplate, NeedsProcess, compiled
from motet.text.rendering.render_process import RenderProcess
from motet.text.template import ChatTemplate

USER = {"role": "user", "content": "hi <there> hi"}
CALL = {"function": {"name": "f", "arguments": {"city": "Köln", "days": [1, None]}}}
VARIABLES: dict[str, object] = {
    "messages": [USER, {"role": "assistant", "content": "</think>yes", "tool_calls": [CALL]}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "add_generation_prompt": True,
}
ORDINARY = (
    "{{ 'a' + 'b' + messages[0].content }}{{ 'a' ~ 1 ~ none ~ messages[0].role }}{{ [1] + [2] }}{{ 2 * 'ab' }}",
    "{{ 1 + 2 * 3 - 4 // 3 % 2 }}{{ 7 / 2 }}{{ -1.5 }}{{ 'a' * 0 }}{{ 3 % 2 == 1 }}{{ 1 < 2 <= 2 }}",
    "{% for m in messages[::-1] %}{{ loop.index0 }}{{ m.role }}{{ loop.cycle('a', 'b') }}{{ m.missing }}{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{% for c in m.content %}{{ c.upper() }}{% endfor %}{% endfor %}",
    "{% set ns = namespace(n=0, l=[], s='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% set ns.l = ns.l + [m] %}{% set ns.s = ns.s + m.content %}{% endfor %}{{ ns.n }}{{ ns.s }}{{ ns.l }}",
    "{% macro m(x, y='d') %}<{{ x }}{{ y }}{% if x %}{{ m(x - 1) }}{% endif %}>{% endmacro %}"
    "{{ m(3) }}{{ m(0, y=[]) }}",
    "{% macro m() %}{{ caller(1) }}{% endmacro %}{% call(n) m() %}{{ n }}{% endcall %}",
    "{% for c in messages[1].tool_calls %}{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
    "{{ c.function.arguments | tojson }}{{ c.function.arguments | items | list }}{% endfor %}",
    "{{ tools | tojson(indent=2) }}{{ tools | map(attribute='type') | list }}"
    "{{ tools | map(attribute='type') | join('-') }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages | rejectattr('x') | first }}",
    "{{ messages[1].content.split('</think>')[-1].lstrip('\n').replace('e', 'ee') }}{{ ', '.join(['a', 'b']) }}",
    "{{ messages[0].content | replace('hi', 'ho') | trim | title }}{{ [1, 2] | last }}{{ x | default('d') }}",
    "{{ {'a': 1, 'b': [2]} }}{{ (1, 'a') }}{{ {'a': 1} == {'a': 1} }}{{ 'a' in {'a': 1} }}"
    "{{ 'h' in messages[0].content }}",
    "{% set x %}a{{ messages[0].content }}{% endset %}{{ x | upper }}{% filter trim %} a {% endfilter %}",
    "{% for i in range(3) %}{{ i }}{% if i == 1 %}{% break %}{% endif %}{% else %}none{% endfor %}",
    "{{ messages[0].items() | list }}{{ messages[0].get('role') }}{{ messages[0]['keys'] is callable }}",
    "{{ messages[0].content is string and messages is iterable and tools is mapping }}{{ 3 is odd }}{{ 1 is in [1] }}",
    "{% generation %}{{ messages[0].content[1:3] }}{% endgeneration %}{{ '7' | int + 1 }}{{ 'a' if x else 'b' }}",
)
"""Templates of the kinds that models have. All are rendered without a process."""


@pytest.mark.parametrize("source", ORDINARY)
def test_an_ordinary_template_is_rendered_here_with_the_text_of_jinja(source: str) -> None:
    assert MeteredTemplate(source).render(VARIABLES) == compiled(source).render(VARIABLES)


def nested(*loops: str, body: str = "") -> str:
    return "".join(f"{{% for {loop} %}}" for loop in loops) + body + "{% endfor %}" * len(loops)


def in_loop(body: str) -> str:
    return f"{{% set ns = namespace(x='a', l=[1]) %}}{{% for i in range(60) %}}{body}{{% endfor %}}{{{{ ns.x }}}}"


EXPENSIVE = {
    "loops": nested(*["a in range(9999)"] * 3),
    "loops over a list": "{% set l = 'a'.split('b') * 9000 %}" + nested(*["a in l"] * 3),
    "conditions of loops": "{% set l = range(9000) | list %}" + nested("a in l", "b in l if b in l"),
    "data": nested("a in range(9000)", body="x" * 9000),
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
    "endless macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "recursive loop": "{% for a in [[[1]]] recursive %}{{ loop([a, a]) }}{% endfor %}",
    "block": "{% block a %}{{ self.a() }}{% endblock %}",
    "caller": "{% macro m(n) %}{{ caller(n) }}{{ caller(n) }}{% endmacro %}{% macro l(n) %}{% if n %}{% call(k) m(n) %}"
    "{{ l(k - 1) }}{% endcall %}{% endif %}{% endmacro %}{{ l(40) }}",
    "sums": in_loop("{% set ns.x = ns.x + ns.x %}"),
    "concatenation": in_loop("{% set ns.x = ns.x ~ ns.x %}"),
    "captures": "{% set a = 'a' %}" + "{% set a %}{{ a }}{{ a }}{% endset %}" * 30,
    "products": "{{ ('a' * 10**9) | length }}",
    "a list times a number": "{{ ([1] * 1000000000) | length }}",
    "powers": "{{ 10 ** 100000000 }}",
    "squares": "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "% with a width": "{{ '%999999999d' % 1 }}",
    "% with a precision": "{{ '%.999999999f' % 1 }}",
    "str.format": "{{ '{:>999999999}'.format(1) }}",
    "format": "{{ '%999999999d' | format(1) }}",
    "center": "{{ 'a' | center(2000000000) }}",
    "str.center": "{{ 'a'.center(2000000000) }}",
    "str.ljust": "{{ 'a'.ljust(2000000000) }}",
    "str.rjust": "{{ 'a'.rjust(2000000000) }}",
    "str.zfill": "{{ 'a'.zfill(2000000000) }}",
    "str.expandtabs": "{{ '\t'.expandtabs(2000000000) }}",
    "str.translate": "{% set s = 'a' * 60000 %}{{ s.translate({97: s}) }}",
    "a method by a computed name": "{{ 'a'['cen' ~ 'ter'](2000000000) }}",
    "int.to_bytes": "{{ (1).to_bytes(2000000000, 'big') }}",
    "indent": "{{ 'a\n' | indent(2000000000) }}",
    "indent with a text": "{% set s = 'a\n' * 60000 %}{{ s | indent(s) }}",
    "join": "{{ range(9000) | list | join('a' * 60000) }}",
    "join with an attribute": "{{ messages | join('', attribute='x') }}",
    "str.join": "{{ ('a' * 60000).join('a' * 60000) }}",
    "replace": "{% set s = 'a' * 60000 %}{{ s | replace('a', s) }}",
    "replace nothing": "{% set s = 'a' * 60000 %}{{ s | replace('', s) }}",
    "str.replace": "{% set s = 'a' * 60000 %}{{ s.replace('a', s) }}",
    "slices": "{% set s = 'a' * 60000 %}" + nested(*["a in range(9000)"] * 2, body="{% set x = s[1:] %}"),
    "lists in lists": in_loop("{% set ns.l = [ns.l, ns.l] %}"),
    "tuples in tuples": in_loop("{% set ns.l = (ns.l, ns.l) %}"),
    "dicts in dicts": in_loop("{% set ns.l = {'a': ns.l, 'b': ns.l} %}"),
    "dicts of functions": in_loop("{% set ns.l = dict(a=ns.l, b=ns.l) %}"),
    "dict.fromkeys": in_loop("{% set ns.l = {}.fromkeys([1, 2], ns.l) %}"),
    "sums of lists": in_loop("{% set ns.l = ns.l + ns.l %}"),
    "arguments in lists": "{% macro m() %}{% set ns.l = varargs %}{% endmacro %}" + in_loop("{{ m(ns.l, ns.l) }}"),
    "named arguments in dicts": "{% macro m() %}{% set ns.l = kwargs %}{% endmacro %}"
    + in_loop("{{ m(a=ns.l, b=ns.l) }}"),
    "namespaces in namespaces": in_loop("{% set ns.l = namespace(a=ns.l, b=ns.l) %}") + "{{ ns.l }}",
    "tojson with an indent": "{{ [[1]] | tojson(indent=2000000000) }}",
    "tojson with an indenting text": "{{ [[1]] | tojson(indent='a' * 60000) }}",
    "pprint": "{{ range(99999) | list | pprint }}",
    "range": "{{ range(99999) | list | length }}",
    "batch": "{{ [1] | batch(500000000, 0) | list }}",
    "slice": "{{ [1] | slice(2000000000) | list }}",
    "sum": "{{ messages | sum(attribute='x') }}",
    "sort": "{{ messages | sort }}",
    "map of a filter": "{% set l = range(9000) | list %}{{ l | map('default', l, true) | map('tojson') | join }}",
    "map with a default": "{{ messages | map(attribute='x', default=messages) | list }}",
    "a test for each element": "{% set s = 'a' * 99999 %}{% set l = ('b ' * 9000).split() %}"
    + "{{ l | select('in', s) | list }}" * 99,
    "round": "{{ 1 | round(-100000000, 'floor') }}",
    "wordwrap": "{{ 'a ' * 9 | wordwrap(3) }}",
    "lipsum": "{{ lipsum(n=100000000) }}",
    "strftime_now": "{{ strftime_now('%c' * 1000) }}",
    "urlize": "{{ 'www.' | urlize }}",
    "escape": "{{ messages[0].content | e }}",
    "autoescape": "{% autoescape true %}{{ messages[0].content }}{% endautoescape %}",
    "a long source": "{# " + "x" * 33000 + " #}",
}
"""Templates that take much time or memory, and uses of what is not metered."""


@pytest.mark.parametrize("name", EXPENSIVE)
def test_an_expensive_template_stops_within_milliseconds_and_is_rendered_in_a_process(name: str) -> None:
    start_s = time.thread_time()
    with pytest.raises(NeedsProcess):
        ChatTemplate(EXPENSIVE[name]).render([USER], in_process=False)
    assert time.thread_time() - start_s < 1  # CPU time, with the time to compile


def test_long_messages_and_variables_are_rendered_in_a_process() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    for messages, more in (([{**USER, "content": "a" * 20_000}], {}), ([USER], {"x": "a" * 20_000})):
        with pytest.raises(NeedsProcess):
            template.render(messages, template_kwargs=more, in_process=False)


SHOWN = "{{ messages[0] | tojson }}{{ messages[1].tool_calls[0].function.arguments + '!' }}{{ x }}{{ tools | length }}"
ODD: dict[str, object] = {"x": [2**100, 1.5, float("inf"), None, True, "\ud800é", {"a": []}]}


@pytest.mark.slow
def test_a_process_renders_the_same_text() -> None:
    template = ChatTemplate(SHOWN)
    arguments: dict[str, Any] = {"tools": [{"type": "function"}], "template_kwargs": ODD}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Köln"}'}}
    messages: list[Mapping[str, object]] = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = template.render(messages, in_process=False, **arguments).text
    assert template.render(messages, in_process=True, **arguments).text == text
    assert '{"city": "Köln"}!' in text


@pytest.mark.slow
def test_an_error_in_a_process_is_the_error_of_the_template() -> None:
    template, errors = ChatTemplate("{{ raise_exception(messages[0].content) }}"), []
    for in_process in (False, True):
        with pytest.raises(RequestError) as raised:
            template.render([USER], in_process=in_process)
        errors.append((raised.value.message, raised.value.param, raised.value.status))
    assert errors == [("the chat template rejects these messages: hi <there> hi", "messages", 400)] * 2


LONG_IF_ASKED = "{% if messages[0].content == 'long' %}" + EXPENSIVE["loops"] + "{% endif %}{{ messages[0].content }}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "limit", "error"),
    [
        (LONG_IF_ASKED, "CPU_S = 0", "the chat template takes more than 5 s of CPU time for these messages"),
        ("{{ 'a' * 10**10 }}", "", "the chat template takes more than 512 MB of memory for these messages"),
        ("{{ 'a' * 9 }}", "MAX_TEXT_BYTES = 8", "rejects these messages: it generates more than 0 MiB of text"),
    ],
)
def test_a_template_that_exceeds_a_limit_is_an_error_that_names_the_limit(
    source: str, limit: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`limit`: code that changes the limits in the process."""
    module = "import motet.text.rendering.render_process as limits"
    code = f"{module}\nlimits.{limit or 'CPU_S'}\nlimits.main()"
    monkeypatch.setattr(render_process, "COMMAND", (sys.executable, "-c", code))
    with pytest.raises(RequestError, match=error) as raised:
        ChatTemplate(source).render([{**USER, "content": "long"}], in_process=True)
    assert (raised.value.status, raised.value.param) == (400, "messages")


@pytest.mark.slow
def test_after_a_limit_the_next_prompt_gets_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(LONG_IF_ASKED + "{# next #}")
    assert template.render([USER], in_process=True).text == USER["content"]
    monkeypatch.setattr(render_process, "TIMEOUT_S", 0.05)
    with pytest.raises(RequestError, match=r"takes more than 0\.05 s for these messages"):
        template.render([{**USER, "content": "long"}], in_process=True)
    monkeypatch.undo()
    assert template.render([USER], in_process=True).text == USER["content"]


@pytest.mark.slow
def test_a_process_ends_with_its_server() -> None:
    process = RenderProcess("a")
    assert process.render(render_process.marshalled({"messages": []})) == "a"
    running = process._process  # noqa: SLF001
    assert running is not None and running.stdin is not None
    running.stdin.close()
    assert running.wait(timeout=30) == 0


@pytest.mark.slow
@pytest.mark.parametrize("command", [("/no/such/program",), (sys.executable, "-c", "raise SystemExit(3)")])
def test_a_process_that_cannot_run_is_an_error_of_the_server(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render_process, "COMMAND", command)
    with pytest.raises(EngineError, match="process that renders chat templates"):
        RenderProcess("a").render(render_process.marshalled({"messages": []}))
