"""Run control: sends the commands of `hydra ctl` to a running run, as lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hydra_train import _keywords, _native
from hydra_train._errors import HydraError


def send(running: _native.Running, command: Mapping[str, Any]) -> dict[str, Any]:
    """Sends a command to the run, and returns its answer.

    :raises HydraError: the run refuses the command, or has ended.
    """
    line = running.command(json.dumps({key: value for key, value in command.items() if value is not None}))
    if line is None:
        raise HydraError("the run has ended, so it takes no commands")
    answer = json.loads(line)
    if answer.get("ok") is not True:
        raise HydraError(str(answer.get("error", "the run gave no reason")))
    return dict(answer)


def changes(settings: Mapping[str, Any]) -> dict[str, str] | None:
    """Returns the settings of a fork as texts, by the names of their flags."""
    texts = {}
    for flag in _keywords.arguments("select", settings):
        name, _, value = flag.removeprefix("--").partition("=")
        texts[name] = value or "true"
    return texts or None
