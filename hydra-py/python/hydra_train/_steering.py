"""Commands to a run that goes on, as those of `hydra ctl`: lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hydra_train import _keywords, _native
from hydra_train._errors import HydraError


def ask(running: _native.Running, command: Mapping[str, Any]) -> dict[str, Any]:
    """Gives a command to the run, and waits for its answer.

    :raises HydraError: the run refuses it, or has ended.
    """
    answered = running.steer(json.dumps({key: value for key, value in command.items() if value is not None}))
    if answered is None:
        raise HydraError("the run has ended: there is nothing left to steer")
    answer = json.loads(answered)
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
