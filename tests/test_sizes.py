"""`tools/sizes.py` finds folders, functions and classes that are over their limits."""

from pathlib import Path

import pytest

from tools.sizes import Class, Size, class_sizes, classes_of, folder_sizes, measure, problems_of

FREE = {
    "two and more by name": "def f(a, b, *, c, d): ...",
    "self is no argument": "class C:\n    def f(self, a, b): ...",
    "nor is cls": "class C:\n    @classmethod\n    def f(cls, a, b): ...",
    "what Python calls": "class C:\n    def __call__(self, scope, receive, send): ...",
    "a kernel": "@triton.jit\ndef f(x, y, z): ...",
    "three tensors": "def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, scale: float): ...",
    "a reason": "def f(  # sizes: Ray calls it\n    a, b, c\n): ...",
}

TOO_MANY = {
    "three": ("def f(a, b, c): ...", 3),
    "by place only": ("def f(a, b, c, /): ...", 3),
    "in a coroutine": ("async def f(a, b, c=1, *, d): ...", 3),
    "in a constructor": ("class C:\n    def __init__(self, a, b, c): ...", 3),
    "in a static method": ("class C:\n    @staticmethod\n    def f(a, b, c): ...", 3),
    "in a function of a method": ("class C:\n    def f(self):\n        def g(a, b, c, d): ...", 4),
    "two tensors": ("def f(x: torch.Tensor, weight: torch.Tensor, epsilon: float): ...", 3),
}


def too_many(folder: Path, code: str, *, name: str = "src/motet/part.py") -> list[int]:
    path = folder / "part.py"
    path.write_text(code)
    return [size.value for size in measure(path, name=name) if size.what == "arguments by place" and size.over]


@pytest.mark.parametrize("code", FREE.values(), ids=FREE)
def test_these_may_be_called_as_they_are(code: str, tmp_path: Path) -> None:
    assert too_many(tmp_path, code) == []


@pytest.mark.parametrize(("code", "count"), TOO_MANY.values(), ids=TOO_MANY)
def test_these_take_too_many_arguments_by_place(code: str, count: int, tmp_path: Path) -> None:
    assert too_many(tmp_path, code) == [count]


def test_the_rule_is_for_src_alone(tmp_path: Path) -> None:
    assert too_many(tmp_path, "def f(a, b, c): ...", name="tests/part.py") == []


def test_a_folder_counts_its_modules_without_init() -> None:
    names = ["src/motet/__init__.py", "src/motet/ids.py", "src/motet/api/app.py", "bench/fork.py", "tests/status.py"]
    assert {(size.key, size.value, size.limit) for size in folder_sizes(names)} == {
        ("src/motet", 1, 15),
        ("src/motet/api", 1, 15),
        ("bench", 1, 12),
    }


def classes(folder: Path, files: dict[str, str]) -> list[Class]:
    """Writes these modules of motet, and returns their classes."""
    found: list[Class] = []
    for name, code in files.items():
        path = folder / "src" / "motet" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
        found += classes_of(path, source=folder / "src")
    return found


ENGINE = """
class Engine:
    name: str
    limits: ClassVar[int] = 3
    kind = "native"

    def __init__(self, name):
        self.name = name
        self.steps, self.peer.seen = 0, 1

    @property
    def is_busy(self):
        return self.steps > 0

    async def step(self):
        def count():
            self.steps += 1
        with open(self.name) as self.file:
            count()
"""


def test_attributes_are_declared_fields_and_what_methods_assign(tmp_path: Path) -> None:
    (engine,) = classes(tmp_path, {"engine.py": ENGINE})
    assert engine.attributes == {"name", "steps", "file"}


def test_all_functions_of_a_class_are_methods(tmp_path: Path) -> None:
    (engine,) = classes(tmp_path, {"engine.py": ENGINE})
    assert [method.name for method in engine.methods] == ["__init__", "is_busy", "step"]


@pytest.mark.parametrize(
    "body",
    [
        "x: int",
        "def __init__(self): self.x = 1",
        "@property\n    def double(self): return 2 * self.x",
        "@cached_property\n    def double(self): return 2 * self.x",
        "def feed(self): ...",
        "def feed(self):\n        'Feeds it.'",
        "@model_validator(mode='after')\n    def check(self): return self",
    ],
)
def test_a_record_has_no_behaviour(body: str, tmp_path: Path) -> None:
    (record,) = classes(tmp_path, {"record.py": f"class Record:\n    {body}\n"})
    assert not record.has_behaviour


@pytest.mark.parametrize("body", ["def feed(self): self.x += 1", "@classmethod\n    def of(cls): return cls()"])
def test_a_class_with_a_method_that_does_something_has_behaviour(body: str, tmp_path: Path) -> None:
    (part,) = classes(tmp_path, {"part.py": f"class Part:\n    {body}\n"})
    assert part.has_behaviour


def test_a_protocol_is_known_by_its_base(tmp_path: Path) -> None:
    code = "from typing import Protocol\nclass Seam(Protocol[T]):\n    def f(self): return 1\nclass Part(Seam): ..."
    found = classes(tmp_path, {"seams.py": code})
    assert [(one.name, one.is_protocol) for one in found] == [("Seam", True), ("Part", False)]


def sizes_of(found: list[Class], what: str) -> dict[str, int]:
    return {size.key: size.value for size in class_sizes(found) if size.what == what}


def test_inheritance_is_followed_across_modules_and_names(tmp_path: Path) -> None:
    found = classes(
        tmp_path,
        {
            "a.py": "import abc\nclass A(abc.ABC): ...",
            "b.py": "from motet.a import A as Base\nclass B(Base): ...\nclass Mixin: ...",
            "c.py": "from motet.b import B, Mixin\nclass C(Mixin, B): ...\nclass D(C): ...",
        },
    )
    assert sizes_of(found, "classes deep") == {"A": 1, "B": 2, "Mixin": 1, "C": 3, "D": 4}


def test_errors_and_pydantic_with_settings_are_no_levels_of_inheritance(tmp_path: Path) -> None:
    found = classes(
        tmp_path,
        {
            "errors.py": "class MotetError(Exception): ...\nclass RequestError(MotetError): ...",
            "file.py": "from motet.errors import RequestError\nclass FileError(RequestError): ...",
            "api/http/schema.py": "class Schema(BaseModel): ...\nclass OpenSchema(Schema): ...",
            "chat.py": "from motet.api.http.schema import OpenSchema\nclass Chat(OpenSchema): ...",
        },
    )
    assert sizes_of(found, "classes deep") == {"Schema": 1, "OpenSchema": 1, "Chat": 1}


def test_a_name_that_two_classes_have_is_counted(tmp_path: Path) -> None:
    found = classes(tmp_path, {"a.py": "class Part: ...\nclass Whole: ...", "b.py": "class Part: ..."})
    assert sizes_of(found, "classes of this name") == {"Part": 2, "Whole": 1}


def methods(value: int) -> list[Size]:
    return [Size("src/motet/a.py:1 A", "methods", value, 20, key="A")]


def test_a_size_over_its_limit_is_a_problem() -> None:
    assert problems_of(methods(20), today={}) == []
    assert problems_of(methods(21), today={}) == ["src/motet/a.py:1 A: 21 methods, at most 20"]


def test_sizes_over_a_limit_can_only_get_smaller() -> None:
    today = {"methods": {"A": 25}}
    stale = "tools/sizes.py: TODAY has 25 methods for A, now"
    assert problems_of(methods(25), today=today) == []
    assert problems_of(methods(26), today=today) == ["src/motet/a.py:1 A: 26 methods, at most 25"]
    assert problems_of(methods(24), today=today) == [f"{stale} 24: lower it to 24"]
    assert problems_of(methods(20), today=today) == [f"{stale} 20: remove it"]
    assert problems_of([], today=today) == [f"{stale} 0: remove it"]
