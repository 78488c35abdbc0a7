"""`tools/sizes.py`: which functions of src may take more than two arguments by place."""

from pathlib import Path

import pytest

from tools.sizes import measure

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
