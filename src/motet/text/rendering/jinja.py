"""Compiles chat templates. Their environment (sandbox, filters, functions, the `generation` tag) is the environment
that transformers provides, so a template has the same result here.

A template is a program, and Jinja's sandbox limits neither its time nor its memory: three nested loops, or one
`'a' * 10**10`, stop the process in which it is rendered. So a template is rendered in one of two ways:

    `compiled`          without limits, in a process of its own (`render_process`)
    `MeteredTemplate`   on the event loop, within a budget of cost (`BUDGET`) and of CPU time (`CPU_S`)

A metered template can use only what is listed here. Everything else, and the end of the budget, raises `NeedsProcess`.
The rules bound time and memory for every template:

    loops, macros       each round costs its number of nodes, and the characters that it always outputs
    + ~ *               cost the size of their result, as do join, replace, tojson, and each output
    numbers             without `**`, and only numbers that fit into 64 bits
    lists, dicts        cost the size of their elements, each counted as often as it occurs
    methods             methods of str, dict and list whose result is not larger than the object; join and replace
    functions           namespace, raise_exception and strftime_now; range, which costs its length
    filters             `FILTERS`, whose result is not larger than the value; join, map, replace and tojson

The time of comparisons, tests, filters, slices and calls grows with the size of a value, so the CPU time is checked
before each of them.
"""

import json
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache, partial, reduce
from types import BuiltinMethodType, MethodType
from typing import Any, Final, cast

from jinja2 import Template, TemplateError, Undefined, nodes, pass_context, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame, optimizeconst
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_join, do_map, do_replace
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


BUDGET: Final = 2**18
"""Maximum cost of a metered rendering, in nodes and characters."""
CPU_S: Final = 0.02
"""Maximum CPU time of a metered rendering, in seconds."""
MAX_SOURCE: Final = 2**15
"""Maximum length of a metered template: the interpreter compiles its code in one step, which cannot be interrupted."""
MAX_NUMBER: Final = 2**62
ITEM_COST: Final = 8
"""Cost of an element of a container, or of a number."""
MAX_INDENT: Final = 16
MAX_PATTERN: Final = 100
SCALARS: Final = frozenset((int, float, bool, type(None), Undefined))
NUMBERS: Final = frozenset((int, float, bool))
LISTS: Final = frozenset((list, tuple))
METHODS: Final[dict[type, frozenset[str]]] = {
    str: _words(
        "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier islower "
        "isnumeric isprintable isspace istitle isupper lower lstrip partition removeprefix removesuffix rfind rindex "
        "rpartition rsplit rstrip split splitlines startswith strip swapcase title upper"
    ),
    dict: _words("get items keys values copy"),
    list: _words("count index copy"),
    tuple: _words("count index"),
}
FILTERS: Final = _words(
    "abs capitalize count d default first float int items last length list lower reject rejectattr reverse select "
    "selectattr string title trim upper"
)
FAST_FILTERS: Final = _words("count d default first last length")
FAST_TESTS: Final = _words(
    "boolean callable defined divisibleby even false float integer iterable mapping none number odd sameas sequence "
    "string true undefined"
)
"""Filters and tests whose time does not depend on the size of the value."""
ONLY_IN_PROCESS: Final = (
    *(nodes.Block, nodes.Extends, nodes.FromImport, nodes.Import, nodes.Include),
    *(nodes.EvalContextModifier, nodes.ScopedEvalContextModifier),
)
"""Statements that a metered template cannot have."""
CONTEXT_ARGUMENTS: Final = ("_loop_vars", "_block_vars")
"""Arguments that Jinja adds to calls in loops and blocks, for functions that get the context. No function here does."""
VARIABLE_ARGUMENTS: Final = ("varargs", "kwargs")


TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""All errors that a template can raise: Jinja's errors, and Python's errors for unexpected values."""


class NeedsProcess(BaseException):
    """The template must be rendered in a process of its own. Derived from BaseException, so that no code of Jinja
    takes it for an error of the template."""


class Arguments(dict[str, object]):
    """The arguments of an earlier call: an object whose string form is JSON.

    As in OpenAI's API, clients send arguments as a JSON string. Templates iterate over them as an object, or write them
    with `tojson`, which would quote a string again. As in transformers and vLLM, templates therefore get the object.
    The templates of DeepSeek V3 concatenate it with strings, using `+`."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, after: str) -> str:
        return f"{self}{after}"

    def __radd__(self, before: str) -> str:
        return f"{before}{self}"


class GenerationTag(Extension):
    """Renders the body of `{% generation %}...{% endgeneration %}`, a tag that marks the model's text for training."""

    tags = {"generation"}  # noqa: RUF012 (the name and type are jinja2's)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The environment of transformers."""

    def __init__(self, **more: Any) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols], **more)
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def compiled(self, source: str) -> Template:
        template = self.from_string(source)
        template.globals = dict(template.globals)  # instead of a ChainMap, which makes every rendering slower
        return template


def compiled(source: str) -> Template:
    """Compiles a template that is rendered without limits."""
    return ChatEnvironment().compiled(source)


class MeteredTemplate:
    """A template that is rendered within `BUDGET` and `CPU_S`. Not thread-safe."""

    def __init__(self, source: str) -> None:
        """Raises jinja2's TemplateSyntaxError, and NeedsProcess for a template that cannot be metered."""
        self._environment = MeteredEnvironment()
        self._environment.start(cpu_s=float("inf"))  # constants are computed now
        self._template = self._environment.compiled(source)

    def render(self, variables: Mapping[str, object]) -> str:
        """Returns the text. Raises the errors of the template, and NeedsProcess. The sizes of the variables are not
        limited here."""
        self._environment.start(cpu_s=CPU_S)
        try:
            return self._template.render(variables)
        except RecursionError:  # the process of the template has more stack
            raise NeedsProcess from None


metered = lru_cache(maxsize=32)(MeteredTemplate)
"""Models with the same template share the result."""


class MeteredCode(CodeGenerator):
    """Generates code that checks the CPU time before each operation whose time grows with the size of a value, and
    counts the size of each result that can be larger than its operands."""

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self._checked(super().visit_Compare, node, frame=frame, is_fast=_is_fast(node))

    def visit_Filter(self, node: nodes.Filter, frame: Frame) -> None:
        self._checked(super().visit_Filter, node, frame=frame, is_fast=node.name in FAST_FILTERS)

    def visit_Test(self, node: nodes.Test, frame: Frame) -> None:
        self._checked(super().visit_Test, node, frame=frame, is_fast=node.name in FAST_TESTS)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        self._checked(super().visit_Getitem, node, frame=frame, is_fast=not isinstance(node.arg, nodes.Slice))

    @optimizeconst
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concatenated((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        """Adds all values of a sum at once: most sums are texts."""
        parts: list[nodes.Expr] = []
        left: nodes.Expr = node
        while isinstance(left, nodes.Add):
            parts.append(left.right)
            left = left.left
        self.write("environment.added(context, (")
        for part in (left, *reversed(parts)):
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._counted(super().visit_List, node, frame=frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._counted(super().visit_Dict, node, frame=frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._counted(super().visit_Tuple, node, frame=frame)
        else:
            super().visit_Tuple(node, frame)

    def _checked(self, visit: Callable[[Any, Frame], None], node: nodes.Node, *, frame: Frame, is_fast: bool) -> None:
        self.write("(" if is_fast else "(environment.check() or ")  # `check` returns None
        visit(node, frame)
        self.write(")")

    def _counted(self, visit: Callable[[Any, Frame], None], node: nodes.Expr, *, frame: Frame) -> None:
        self.write("environment.counted(")
        visit(node, frame)
        self.write(")")


class MeteredEnvironment(ChatEnvironment):
    """An environment whose templates raise NeedsProcess when they exceed the budget, or use an operation that is not
    known to be cheap."""

    code_generator_class = MeteredCode
    intercepted_binops = _words("+ - * / // % **")

    def __init__(self) -> None:
        super().__init__(finalize=self.counted)
        self._left = 0
        """The cost that the present rendering can still spend."""
        self._cpu_end_s = 0.0
        """CPU time of this thread at which the rendering stops."""
        self._next_check_s = 0.0
        """Wall time before which the CPU time cannot be spent, and is not read, because reading it takes longer."""
        allowed = {name: self.filters[name] for name in FILTERS}
        self.filters = dict.fromkeys(self.filters, _refuse) | allowed | METERED_FILTERS

    def _parse(  # sizes: called by Jinja
        self, source: str, name: str | None, filename: str | None
    ) -> nodes.Template:
        """Adds the cost of each round to loops and macros."""
        template = super()._parse(source, name, filename)
        if len(source) > MAX_SOURCE or any(True for _ in template.find_all(ONLY_IN_PROCESS)):
            raise NeedsProcess
        if any(name.name in VARIABLE_ARGUMENTS for name in template.find_all(nodes.Name)):
            raise NeedsProcess
        for kind in (nodes.For, nodes.Macro, nodes.CallBlock):
            for node in template.find_all(cast(type[nodes.For], kind)):
                cost = nodes.EnvironmentAttribute(f"start_round({_cost(node)})", lineno=node.lineno)
                node.body.insert(0, nodes.ExprStmt(cost, lineno=node.lineno))
        return template

    def start(self, *, cpu_s: float) -> None:
        """Starts a rendering with a new budget."""
        self._left = BUDGET
        self._next_check_s = time.perf_counter() + cpu_s
        self._cpu_end_s = time.thread_time() + cpu_s

    def check(self) -> None:
        """Raises NeedsProcess if the CPU time is spent."""
        if time.perf_counter() > self._next_check_s:
            if (left_s := self._cpu_end_s - time.thread_time()) <= 0:
                raise NeedsProcess
            self._next_check_s = time.perf_counter() + left_s  # this thread had to wait for a processor

    def spend(self, cost: int) -> None:
        """Raises NeedsProcess if the budget is spent."""
        self._left -= cost
        if self._left < 0:
            raise NeedsProcess

    def start_round(self, cost: int) -> None:
        """Called at the start of each round of a loop, and of each macro."""
        self.spend(cost)
        self.check()

    def size(self, value: object) -> int:
        """Returns the number of characters and elements of a value, each counted as often as it occurs. Raises
        NeedsProcess if the budget is smaller, or if the value is of another type."""
        if type(value) is str:
            return len(value)
        total, values = 0, [value]
        while values:
            value = values.pop()
            total += ITEM_COST
            if isinstance(value, dict):
                values.extend(value)  # `Arguments` has a `+` of its own
                values.extend(value.values())
            elif isinstance(value, list | tuple) and type(value) in LISTS:
                values.extend(value)
            elif type(value) is str:
                total += len(value)
            elif type(value) not in SCALARS:
                raise NeedsProcess
            if total + ITEM_COST * len(values) > self._left:
                raise NeedsProcess
        return total

    def counted(self, value: Any) -> Any:
        """Spends the size of a value, and returns the value."""
        self._left -= len(value) if type(value) is str else self.size(value)
        if self._left < 0:
            raise NeedsProcess
        return value

    def concatenated(self, parts: tuple[object, ...]) -> str:
        self.spend(sum(map(self.size, parts)))
        return str_join(parts)

    def added(self, context: Context, parts: tuple[Any, ...]) -> Any:
        """Returns the sum of the values, from left to right."""
        try:
            self.spend(sum(map(len, parts)))
            return "".join(parts)
        except TypeError:  # not all are texts
            return reduce(partial(self.call_binop, context, "+"), parts)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Returns what the sandbox returns. For a key of a dict this is faster, because the sandbox first raises and
        catches an AttributeError."""
        if type(obj) is dict and attribute not in DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def call_binop(  # sizes: called by Jinja
        self, context: Context, operator: str, left: Any, right: Any
    ) -> Any:
        kinds = type(left), type(right)
        if NUMBERS.issuperset(kinds):
            if operator == "**" or not (-MAX_NUMBER < left < MAX_NUMBER and -MAX_NUMBER < right < MAX_NUMBER):
                raise NeedsProcess
        elif operator == "*":
            number, other = (left, right) if kinds[0] in NUMBERS else (right, left)
            self.spend(self.size(other) * max(1, number if type(number) is int else BUDGET))
        elif operator == "%" and kinds[0] not in NUMBERS:
            raise NeedsProcess
        else:
            self.spend(self.size(left) + self.size(right))
        return self.binop_table[operator](left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.check()
        for name in CONTEXT_ARGUMENTS:
            kwargs.pop(name, None)
        if type(function) is BuiltinMethodType:
            owner: Any = function.__self__
            name = function.__name__
            kind: type = dict if isinstance(owner, dict) else type(owner)
            if name in METHODS.get(kind, ()):
                return function(*args, **kwargs)
            if kind is str and name == "join" and len(args) == 1 and not kwargs:
                return owner.join(self.listed(args[0], separator=owner))
            if kind is str and name == "replace" and len(args) in (2, 3) and not kwargs:
                self.spend_replace(owner, args[0], new=args[1])
                return owner.replace(*args)
            raise NeedsProcess
        if function is safe_range:
            found = safe_range(*args, **kwargs)
            self.spend(ITEM_COST * len(found))
            return found
        if function is _strftime_now and not (args and type(args[0]) is str and len(args[0]) <= MAX_PATTERN):
            raise NeedsProcess
        known = type(function) in (Macro, Undefined) or function in (Namespace, _raise_exception, _strftime_now)
        if known or (type(function) is MethodType and type(function.__self__) is LoopContext):
            return super().call(context, function, *args, **kwargs)
        raise NeedsProcess

    def call_test(self, name: str, *more: Any, **arguments: Any) -> Any:
        self.check()
        return super().call_test(name, *more, **arguments)

    def listed(self, values: Any, *, separator: object) -> list[Any]:
        """Returns the values as a list that can be joined, and spends the size of the result."""
        elements = list(values)
        self.spend(self.size(elements) + self.size(separator) * len(elements))
        return elements

    def spend_replace(self, text: object, old: object, *, new: object) -> None:
        if not type(text) is type(old) is type(new) is str:
            raise NeedsProcess
        self.spend(len(text) + text.count(old) * len(new))


def _is_fast(node: nodes.Compare) -> bool:
    """Returns True if the time of a comparison depends on a constant only."""
    (first, *more) = node.ops
    return not more and (
        (first.op in ("eq", "ne") and any(isinstance(one, nodes.Const) for one in (node.expr, first.expr)))
        or (first.op in ("in", "notin") and isinstance(first.expr, nodes.Const) and type(first.expr.value) is not str)
    )


DICT_ATTRIBUTES: Final = frozenset(dir(dict))


def _cost(node: nodes.Node) -> int:
    """Returns the cost of a round of a loop or a macro: its number of nodes, and of characters in its constants."""
    total = 0
    for inner in node.find_all(nodes.Node):
        text = getattr(inner, "data", None) or getattr(inner, "value", None)
        total += 1 + (len(text) if isinstance(text, str) else 0)
    return total


def _refuse(*values: object, **arguments: object) -> None:
    raise NeedsProcess


@pass_eval_context
def _join(  # sizes: templates pass these by position
    context: nodes.EvalContext, value: Any, d: object = "", attribute: object = None
) -> Any:
    if attribute is not None:
        raise NeedsProcess
    return do_join(context, _metered(context).listed(value, separator=d), d)


@pass_context
def _map(context: Context, value: Any, *names: object, **arguments: Any) -> Any:
    if names or arguments.keys() != {"attribute"}:
        raise NeedsProcess
    _metered(context).spend(ITEM_COST * len(value) if hasattr(value, "__len__") else 0)
    return do_map(context, value, **arguments)


@pass_eval_context
def _replace(  # sizes: templates pass these by position
    context: nodes.EvalContext, value: Any, old: Any, new: Any, count: Any = None
) -> Any:
    _metered(context).spend_replace(value, old, new=new)
    return do_replace(context, value, old, new, count)


@pass_eval_context
def _metered_tojson(  # sizes: templates pass these by position
    context: nodes.EvalContext, value: object, ensure_ascii: bool = False, indent: Any = None
) -> str:
    """Works like `_tojson` without separators and sorted keys, which need the process."""
    if not (indent is None or (type(indent) is int and indent <= MAX_INDENT)):
        raise NeedsProcess
    text = _tojson(value, ensure_ascii, indent)
    _metered(context).spend(len(text))
    return text


METERED_FILTERS: Final = {"join": _join, "map": _map, "replace": _replace, "tojson": _metered_tojson}


def _metered(context: Context | nodes.EvalContext) -> MeteredEnvironment:
    assert isinstance(context.environment, MeteredEnvironment)
    return context.environment


def _tojson(  # sizes: templates pass these by position
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns JSON without HTML escapes, which Jinja's own filter adds."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
