"""Commands to a run that goes on, as those of `hydra ctl`: lines of JSON on the socket in its directory."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hydra_train import _keywords
from hydra_train._errors import HydraError

SOCKET = "control.sock"
#: A run that has just begun listens soon: it is looked for so often.
LOOKS_EVERY_S = 0.05


def ask(directory: Path, has_ended: Callable[[], bool], command: Mapping[str, Any]) -> dict[str, Any]:
    """Gives a command to the run, and waits for its answer.

    :raises HydraError: the run refuses it, has ended, or cannot be reached.
    """
    line = json.dumps({key: value for key, value in command.items() if value is not None})
    answer = json.loads(_asked(directory / SOCKET, has_ended, line))
    if answer.get("ok") is not True:
        raise HydraError(str(answer.get("error", "the run gave no reason")))
    return dict(answer)


def changes(settings: Mapping[str, Any]) -> dict[str, str] | None:
    """The settings of a fork, as texts by the names of their flags."""
    texts = {}
    for flag in _keywords.arguments("select", settings):
        name, _, value = flag.removeprefix("--").partition("=")
        texts[name] = value or "true"
    return texts or None


def _asked(path: Path, has_ended: Callable[[], bool], line: str) -> str:
    while True:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
                stream.connect(str(path))
                stream.sendall(f"{line}\n".encode())
                with stream.makefile("r", encoding="utf-8") as answers:
                    answer = answers.readline()
            if answer:
                return answer
        except (FileNotFoundError, ConnectionError):
            pass
        except OSError as error:
            raise HydraError(f"the run cannot be reached by {path}: give it a directory with a shorter path", causes=[str(error)]) from error
        if has_ended():
            raise HydraError("the run has ended: there is nothing left to steer")
        time.sleep(LOOKS_EVERY_S)
