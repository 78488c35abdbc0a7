"""What those who start a server are told once it serves."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from fastapi import FastAPI

from motet.api.service import Service

W = TypeVar("W", covariant=True)


@dataclass(frozen=True)
class Serving(Generic[W]):
    """A server that takes requests."""

    url: str
    app: FastAPI
    """What answers there; it may be mounted elsewhere too."""
    service: Service
    workforce: W
    """Who does the work: a `Cell` or a `Gateway`."""
