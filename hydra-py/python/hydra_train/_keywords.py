"""Converts keyword arguments to the flags of the command line, which interprets them."""

from __future__ import annotations

import difflib
import numbers
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from hydra_train import _native
from hydra_train._errors import UnknownKeyword, UsageError


#: The suffix in the form of a flag that is repeated for each value.
REPEATED = " .."


def arguments(command: str, settings: Mapping[str, Any]) -> list[str]:
    """Returns the flags of ``settings``: ``lr=[1e-4, 3e-4]`` is ``--lr=0.0001,0.0003``, and ``True`` is a flag without a value."""
    known = {name: value for name, value, _ in _native.keywords(command)}
    flags: list[str] = []
    for keyword, value in settings.items():
        if keyword not in known:
            renamed = _native.renamed(command, keyword)
            if renamed is None:
                raise _unknown(command, keyword, list(known), settings)
            keyword, note = renamed
            warnings.warn(note, FutureWarning, stacklevel=3)
        if value is None:
            continue
        flag = f"--{keyword.replace('_', '-')}"
        form = known[keyword]
        if form is not None and form.endswith(REPEATED):
            flags.extend(f"{flag}={text}" for text in _texts(keyword, value))
        elif form is not None:
            flags.append(f"{flag}={_text(keyword, form, value)}")
        elif not isinstance(value, bool):
            raise UsageError(f"`{keyword}` must be True or False, got {value!r}", keyword=keyword)
        elif value:
            flags.append(flag)
    return flags


def documentation(command: str) -> str:
    """Returns the keywords of a command with their help texts."""
    lines = []
    for name, value, what in _native.keywords(command):
        lines.append(f"    {name}={'True' if value is None else value}: {what}")
    return "\n".join(["Keywords, all optional:", *lines])


def _unknown(command: str, keyword: str, known: list[str], settings: Mapping[str, Any]) -> UnknownKeyword:
    """Names the equivalent of a keyword of another library, or else the most similar spelling."""
    given = [(name, _plain(value)) for name, value in settings.items()]
    equivalent, advice = _native.hint(command, keyword, given) or (None, "")
    nearest = equivalent or difflib.get_close_matches(keyword, known, n=1, cutoff=0.0)[0]
    named = f"; the nearest known one is `{nearest}`" if equivalent or not advice else ""
    return UnknownKeyword(
        f"`{command}` has no keyword `{keyword}`{named}" + (f": {advice}" if advice else ""),
        keyword=keyword,
        nearest=nearest,
    )


def _plain(value: Any) -> str | None:
    """Returns a text, number, bool or list of these as text; None for anything else."""
    if isinstance(value, bool):
        return str(value)
    one = _one(value)
    if one is None and isinstance(value, Iterable) and not isinstance(value, Mapping):
        several = [_plain(item) for item in value]
        return ",".join(text for text in several if text is not None)
    return one


def _text(keyword: str, form: str, value: Any) -> str:
    """Returns a value as text for the command line; several values are separated by commas if the flag accepts them."""
    one = _one(value)
    if one is not None:
        return one
    takes_several = form.endswith(",..")
    if takes_several and isinstance(value, Iterable) and not isinstance(value, Mapping):
        several = [_one(item) for item in value]
        if several and None not in several:
            return ",".join(text for text in several if text is not None)
    expected = "a list of texts or numbers" if takes_several else "one text, number or path"
    raise UsageError(f"`{keyword}` must be {expected}, got {value!r}", keyword=keyword)


def _texts(keyword: str, value: Any) -> list[str]:
    """Returns the values of a repeated flag: one, several, or named ones such as ``{"lr": "log:1e-5..1e-2"}``."""
    if isinstance(value, Mapping):
        return [f"{name}={_text(keyword, ',..', range)}" for name, range in value.items()]
    one = _one(value)
    several = [one] if one is not None else [_one(item) for item in value] if isinstance(value, Iterable) else [None]
    texts = [text for text in several if text is not None]
    if len(texts) < len(several):
        raise UsageError(f"`{keyword}` must be texts, or names with their values, got {value!r}", keyword=keyword)
    return texts


def _one(value: Any) -> str | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, (str, os.PathLike)):
        return os.fsdecode(value)
    # Includes NumPy's numbers.
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if isinstance(value, numbers.Real):
        return repr(float(value))
    return None
