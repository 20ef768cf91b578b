"""Generates text with the command line."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hydra_train import _data, _keywords
from hydra_train._errors import UsageError


def generate(prompts: Any, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Continues ``prompts``, or those of the keywords ``prompt`` (texts) and ``prompts`` (a file), and returns the rows of the result."""
    from hydra_train._run import Run

    if settings.get("out") is not None:
        raise UsageError("`out` is not needed: the rows are returned", keyword="out")
    with tempfile.TemporaryDirectory() as folder:
        by_name = settings.get("prompts")
        if prompts is not None and by_name is not None:
            raise UsageError("prompts are given twice: pass them as the first argument or as `prompts`", keyword="prompts")
        if prompts is not None:
            settings = {**settings, "prompts": _as_path(prompts, Path(folder))}
        elif by_name is not None and not isinstance(by_name, str):
            settings = {**settings, "prompts": _as_path(by_name, Path(folder))}
        run = Run(["generate", "--json", *_keywords.arguments("generate", settings)]).wait()
        # `splitlines` would also split at characters that JSON has unescaped, such as U+2028.
        return [json.loads(line) for line in run._running.output().split("\n") if line]


def _as_path(prompts: Any, folder: Path) -> Path:
    """Returns a path unchanged, and writes texts, token ids and conversations to a file."""
    if isinstance(prompts, os.PathLike):
        return Path(prompts)
    path = folder / "prompts.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for row in rows(prompts):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return path


def rows(prompts: Any) -> list[dict[str, Any]]:
    """Returns the rows of texts, token ids and conversations."""
    if isinstance(prompts, str) or _data._tokens(prompts) is not None or _is_conversation(prompts):
        prompts = [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, Mapping):
        found = type(prompts).__name__
        raise UsageError(f"prompts must be a text, a path or a list of prompts, got {found}", keyword="prompts")
    return [_row(index, prompt) for index, prompt in enumerate(prompts)]


def _is_conversation(prompt: Any) -> bool:
    messages = isinstance(prompt, (list, tuple)) and bool(prompt)
    return messages and all(isinstance(message, Mapping) and "role" in message for message in prompt)


def _row(index: int, prompt: Any) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if (ids := _data._tokens(prompt)) is not None:
        return {"input_ids": ids}
    if isinstance(prompt, Mapping):
        return {name: _data._plain(value) for name, value in prompt.items()}
    if _is_conversation(prompt):
        return {"messages": [dict(message) for message in prompt]}
    raise UsageError(
        f"prompt {index} is a {type(prompt).__name__}: expected a text, a list of token ids, or a list of messages with `role` and `content`",
        keyword="prompts",
    )
