"""Main memory on systems without huge pages, or that do not take pages back."""

import logging

import pytest
import torch

from motet.engines.native.cpu import memory


def test_memory_of_zeros_needs_no_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "HUGE_PAGES", None)
    tensor = memory.huge_pages(10_000)
    assert tensor.shape == (10_000,) and not tensor.any()
    tensor[-1] = 1


def test_pages_that_the_system_does_not_take_back_are_reported_and_keep_their_content(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "ON_LINUX", False)
    tensor = torch.ones(10_000, dtype=torch.uint8)
    with caplog.at_level(logging.WARNING):
        memory.release_pages(tensor)
    assert caplog.messages == ["10000 bytes of memory stay in use: only Linux takes back pages of a running process"]
    assert bool(tensor.all())


def test_a_system_without_glibc_has_no_heap_to_trim(monkeypatch: pytest.MonkeyPatch) -> None:
    def windows(name: None) -> None:
        raise TypeError("LoadLibrary() argument 1 must be str, not None")

    for library in (windows, lambda name: object()):
        monkeypatch.setattr("ctypes.CDLL", library)
        memory.trim_heap()
