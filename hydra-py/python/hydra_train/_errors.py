"""Exceptions with fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class HydraError(Exception):
    """A command failed.

    ``message`` describes the error and a remedy; ``causes`` has its causes, the nearest first.
    """

    message: str
    causes: list[str]

    def __init__(self, message: str, *, causes: Sequence[str] = (), **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.causes = list(causes)
        self._fields = fields

    def __str__(self) -> str:
        return "\n".join([self.message, *(f"  caused by: {cause}" for cause in self.causes)])

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are sent between processes; by default only `args` would be pickled.
        return _rebuild, (type(self), self.message, self.causes, self._fields)


class UsageError(HydraError, ValueError):
    """A setting is invalid; ``keyword`` is its name, if known."""

    keyword: str | None

    def __init__(self, message: str, *, causes: Sequence[str] = (), keyword: str | None = None) -> None:
        super().__init__(message, causes=causes, keyword=keyword)
        self.keyword = keyword


class UnknownKeyword(HydraError, TypeError):
    """The function has no ``keyword`` of this name; ``nearest`` is the most similar known one."""

    keyword: str
    nearest: str

    def __init__(self, message: str, *, causes: Sequence[str] = (), keyword: str, nearest: str) -> None:
        super().__init__(message, causes=causes, keyword=keyword, nearest=nearest)
        self.keyword, self.nearest = keyword, nearest


class MemoryRefused(HydraError):
    """The run needs at least ``needed_bytes``, but only ``available_bytes`` are available. Nothing was trained."""

    needed_bytes: int
    available_bytes: int

    def __init__(
        self, message: str, *, causes: Sequence[str] = (), needed_bytes: int, available_bytes: int
    ) -> None:
        super().__init__(
            message, causes=causes, needed_bytes=needed_bytes, available_bytes=available_bytes
        )
        self.needed_bytes, self.available_bytes = needed_bytes, available_bytes


class Stopped(HydraError):
    """The run was stopped before anything was trained."""


class TasksFailed(HydraError):
    """Tasks failed or were skipped; ``failures`` has the reason of each. The other tasks are trained and written."""

    failures: dict[str, str]

    def __init__(self, message: str, *, causes: Sequence[str] = (), failures: Mapping[str, str]) -> None:
        super().__init__(message, causes=causes, failures=dict(failures))
        self.failures = dict(failures)


def _rebuild(
    kind: type[HydraError], message: str, causes: list[str], fields: dict[str, Any]
) -> HydraError:
    return kind(message, causes=causes, **fields)
