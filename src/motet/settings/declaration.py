"""The declaration of a setting, and all that is derived from it: flag, variable, range and help."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Flag, StrEnum, auto
from pathlib import Path
from types import UnionType
from typing import Any, Final, TypeVar, get_args, get_origin

from motet.errors import ConfigError

ENVIRONMENT_PREFIX = "MOTET_"
METADATA_KEY: Final = "setting"

Value = TypeVar("Value")


class ServerCommand(StrEnum):
    """A command that has settings: `motet serve`, `motet gateway` or `motet ray`."""

    SERVE = "serve"
    GATEWAY = "gateway"
    RAY = "ray"


class Panel(StrEnum):
    """A group of settings in `--help` and docs/settings.md, in the order of the page."""

    SERVERS = "Servers"
    HTTP = "HTTP"
    TLS = "TLS"
    MODEL = "Model"
    ENGINE = "Engine"
    CELL = "Prefill and decode"
    ROUTING = "Workers"
    RAY = "Ray"
    LIMITS = "Limits"
    BATCHES = "Batches"
    PROCESS = "Process"


class Mark(Flag):
    """A property of a setting."""

    NONE = 0
    COMMON = auto()
    """People need it first: `--help` shows it."""
    SECRET = auto()
    """The value must never be shown or stored."""
    COMMAS = auto()
    """One flag can name several values, separated by commas."""
    THIS_MACHINE = auto()
    """A value from the environment applies to this machine only, not to the other nodes of a cluster."""


KIND_NAMES: Final = {int: "a whole number", float: "a number", bool: "true or false"}
MAX_NUMBER: Final = 2**53
"""Maximum of every number, also of one without a range: the largest that JSON and every client can represent."""
MAX_PORT: Final = 65535
PORT: Final = {"minimum": 0, "maximum": MAX_PORT, "zero": "any free port"}
NOT_BLANK: Final = r"[\s\S]*\S[\s\S]*"
ONE_ADDRESS: Final = r"(?!\s*(0\.0\.0\.0|::|\*)\s*$)" + NOT_BLANK
"""Any address except those that mean every address of a machine."""
SENT_KEY: Final = {"pattern": r"[!-~]*", "must": "visible ASCII characters without spaces", "marks": Mark.SECRET}
"""A key that Motet sends in a header. A line break after it, as in many files, would make every request fail."""
CLIENT_KEY: Final = r"[ -~]*[!-~][ -~]*"
"""A key that clients send. Programs differ in how they encode other characters in a header."""

SERVE: Final = (ServerCommand.SERVE,)
GATEWAY: Final = (ServerCommand.GATEWAY,)
RAY: Final = (ServerCommand.RAY,)
ENGINES: Final = SERVE + RAY
EVERY: Final = tuple(ServerCommand)


@dataclass(frozen=True, kw_only=True)
class Declaration:
    help: str
    """Meaning in one or two sentences, to which default, unit and range are appended where it is shown."""
    panel: Panel = Panel.PROCESS
    commands: tuple[ServerCommand, ...] = ()
    name: str = ""
    kind: Any = None
    default: object = None
    flag: str = ""
    unset: str = ""
    """Effective value, in words, while the setting is None or empty."""
    unit: str = ""
    """Unit of a number; for a text, what it names."""
    minimum: float | None = None
    above: float | None = None
    """Exclusive lower bound; replaces `minimum`."""
    maximum: float | None = None
    zero: str = ""
    """Meaning of the value 0."""
    choices: tuple[object, ...] = ()
    pattern: str = ""
    """Regular expression that the entire text, or each text of a list, must match."""
    read: Callable[[Sequence[str]], object] | None = None
    """Function that parses the texts and raises ConfigError if they are invalid."""
    must: str = ""
    """Requirement on the value, in words, if neither range nor choices express it."""
    reason: str = ""
    """Reason for the range, shown when a value is refused."""
    marks: Mark = Mark.NONE
    differs: Mapping[tuple[ServerCommand, ...], Mapping[str, Any]] = field(default_factory=dict)
    """Fields that the help of some commands shows differently."""

    def documented_for(self, command: ServerCommand) -> "Declaration":
        """Returns the declaration as the help of one command shows it."""
        changes = [fields for commands, fields in self.differs.items() if command in commands]
        return replace(self, **{name: value for change in changes for name, value in change.items()})

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def common(self) -> bool:
        return Mark.COMMON in self.marks

    @property
    def secret(self) -> bool:
        return Mark.SECRET in self.marks

    @property
    def is_list(self) -> bool:
        return get_origin(self.kind) is tuple

    @property
    def flag_kind(self) -> Any:
        """Type of the flag's value on the command line."""
        if isinstance(self.kind, UnionType):
            return next(part for part in get_args(self.kind) if part is not type(None))
        if self.is_list:
            return list[str]
        return str if issubclass(self.kind, StrEnum) else self.kind

    @property
    def placeholder(self) -> str:
        """Placeholder of the value in `--help`."""
        if self.unit:
            return "SECONDS" if self.unit == "s" else self.unit.upper()
        return "NUMBER" if self.flag_kind in (int, float) else "FILE" if self.flag_kind is Path else "TEXT"

    def flag_for(self, value: object) -> str:
        """Returns the flag that sets this value: a switch has `--NAME` and `--no-NAME`."""
        if self.kind is not bool or not isinstance(value, bool):
            return self.flag
        name = self.flag.removeprefix("--no-").removeprefix("--")
        return f"--{name}" if value else f"--no-{name}"

    @property
    def range(self) -> str:
        """Allowed choices or numbers, in words; empty if there is no limit."""
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        if self.above is not None:
            return f"above {self.above:g}" + (f" and at most {self.maximum:g}" if self.maximum is not None else "")
        if self.minimum is None:
            return ""
        minimum = f"{self.minimum:g}" + (f" ({self.zero})" if self.zero else "")
        if self.maximum is not None:
            return f"{minimum} to {self.maximum:g}"
        return f"{minimum} or more" if self.minimum == 0 else f"at least {minimum}"

    @property
    def requirement(self) -> str:
        """Requirement on the type of a value, in words, with the range: `a whole number, at least 1`."""
        kind = "a list of texts" if self.is_list else KIND_NAMES.get(self.flag_kind, "a text")
        return self.range if self.choices else f"{kind}, {self.range}" if self.range else kind

    @property
    def shown_default(self) -> str:
        """Default value in words, with its unit; empty if there is none."""
        if self.default in (None, (), ""):
            return self.unset
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        number = f"{self.default:g}" if isinstance(self.default, float) else str(self.default)
        return f"{number} {self.unit}" if self.unit else number

    @property
    def full_help(self) -> str:
        """`help` with range and default: `Maximum time in the queue. [above 0; default: 60 s]`."""
        default = f"default: {self.shown_default}" if self.shown_default else ""
        shown = "; ".join(filter(None, [self.range, default]))
        return f"{self.help} [{shown}]".lstrip() if shown else self.help

    def refusal(self, value: object) -> str:
        """Returns the reason why this value is not allowed; empty if it is. None is always allowed."""
        if value is None:
            return ""
        why = f"must be {self.must or self.range or 'not empty'}" + (f": {self.reason}" if self.reason else "")
        if self.choices and value not in self.choices:
            return why
        if isinstance(value, int | float):
            if not self._in_range(value):
                return why
            if not -MAX_NUMBER <= value <= MAX_NUMBER:
                return f"must be at most {MAX_NUMBER}"
        if isinstance(value, str) and isinstance(self.kind, UnionType) and not value.strip():
            return why
        texts = [value] if isinstance(value, str) else value if isinstance(value, tuple) else []
        if self.pattern and not all(re.fullmatch(self.pattern, text) for text in texts):
            return why
        try:
            if self.read is not None and texts:
                self.read(texts)
        except ConfigError as exc:
            return why if self.secret or self.must else exc.message
        return ""

    def _in_range(self, value: float) -> bool:
        return (
            (isinstance(value, int) or math.isfinite(value))
            and (self.minimum is None or self.minimum <= value)
            and (self.above is None or self.above < value)
            and (self.maximum is None or value <= self.maximum)
        )


def setting(default: Value, help: str, **more: Any) -> Value:
    """Declares a field of a record as a setting; `more` are fields of its `Declaration`."""
    declared: Value = field(default=default, metadata={METADATA_KEY: more | {"help": help}})
    return declared


def common(default: Value, help: str, **more: Any) -> Value:
    """Declares a setting that people need first."""
    return setting(default, help, **more | {"marks": more.get("marks", Mark.NONE) | Mark.COMMON})


def settings_of(record: Any, panel: Panel, *, commands: tuple[ServerCommand, ...]) -> Mapping[str, Declaration]:
    """Returns the declarations of a record by name. `panel` and `commands` are for fields that do not set their own."""
    found = {}
    for f in fields(record):
        if (more := f.metadata.get(METADATA_KEY)) is not None:
            common = {"panel": panel, "commands": commands, "flag": _flag(f.name, f.type, default=f.default)}
            unit = "s" if f.name.endswith("_s") else ""
            choices = tuple(f.type) if isinstance(f.type, type) and issubclass(f.type, StrEnum) else ()
            declared = {"name": f.name, "kind": f.type, "default": f.default, "unit": unit, "choices": choices}
            found[f.name] = Declaration(**common | declared | more)
    return found


def _flag(name: str, kind: Any, *, default: object) -> str:
    """Returns the flag for a name: dashes instead of underscores, without the plural `s` of a list or the `_s` of
    seconds, and `--no-NAME` if the setting is on by default."""
    plain = name.removesuffix("_s")
    if get_origin(kind) is tuple:
        plain = plain.removesuffix("s")
    return ("--no-" if default is True else "--") + plain.replace("_", "-")
