"""Keyword arguments as the flags of the command line, which alone knows what they mean."""

from __future__ import annotations

import difflib
import numbers
import os
from collections.abc import Iterable, Mapping
from typing import Any

from hydra_train import _native
from hydra_train._errors import UnknownKeyword, UsageError


#: The end of the form of a flag that is given once for each value.
REPEATED = " .."


def arguments(command: str, settings: Mapping[str, Any]) -> list[str]:
    """The flags that say ``settings``: ``lr=[1e-4, 3e-4]`` is ``--lr=0.0001,0.0003``, and ``True`` a flag alone."""
    known = {name: value for name, value, _ in _native.keywords(command)}
    flags: list[str] = []
    for keyword, value in settings.items():
        if keyword not in known:
            raise _unknown(command, keyword, list(known), settings)
        if value is None:
            continue
        flag = f"--{keyword.replace('_', '-')}"
        form = known[keyword]
        if form is not None and form.endswith(REPEATED):
            flags.extend(f"{flag}={text}" for text in _texts(keyword, value))
        elif form is not None:
            flags.append(f"{flag}={_text(keyword, form, value)}")
        elif not isinstance(value, bool):
            raise UsageError(f"`{keyword}` is either True or False, and was given {value!r}", keyword=keyword)
        elif value:
            flags.append(flag)
    return flags


def documentation(command: str) -> str:
    """The keywords of a command, each with its line of the command line's help."""
    lines = []
    for name, value, what in _native.keywords(command):
        lines.append(f"    {name}={'True' if value is None else value}: {what}")
    return "\n".join(["Keywords, all of them optional:", *lines])


def _unknown(command: str, keyword: str, known: list[str], settings: Mapping[str, Any]) -> UnknownKeyword:
    """Names what the keyword means here, or else the one that is spelt most alike."""
    given = [(name, _plain(value)) for name, value in settings.items()]
    meant, says = _native.hint(command, keyword, given) or (None, "")
    nearest = meant or difflib.get_close_matches(keyword, known, n=1, cutoff=0.0)[0]
    named = f"; the nearest known one is `{nearest}`" if meant or not says else ""
    return UnknownKeyword(
        f"`{command}` has no keyword `{keyword}`{named}" + (f": {says}" if says else ""),
        keyword=keyword,
        nearest=nearest,
    )


def _plain(value: Any) -> str | None:
    """A value as a text, as far as it is one, a number, a truth, or several of these."""
    if isinstance(value, bool):
        return str(value)
    one = _one(value)
    if one is None and isinstance(value, Iterable) and not isinstance(value, Mapping):
        several = [_plain(item) for item in value]
        return ",".join(text for text in several if text is not None)
    return one


def _text(keyword: str, form: str, value: Any) -> str:
    """A value as a command line has it; several are separated by commas, where the form of the flag says so."""
    one = _one(value)
    if one is not None:
        return one
    takes_several = form.endswith(",..")
    if takes_several and isinstance(value, Iterable) and not isinstance(value, Mapping):
        several = [_one(item) for item in value]
        if several and None not in several:
            return ",".join(text for text in several if text is not None)
    what = "a list of texts or numbers" if takes_several else "one text, number or path"
    raise UsageError(f"`{keyword}` takes {what}, and was given {value!r}", keyword=keyword)


def _texts(keyword: str, value: Any) -> list[str]:
    """The values of a flag that is repeated: one, several, or named ones such as ``{"lr": "log:1e-5..1e-2"}``."""
    if isinstance(value, Mapping):
        return [f"{name}={_text(keyword, ',..', range)}" for name, range in value.items()]
    one = _one(value)
    several = [one] if one is not None else [_one(item) for item in value] if isinstance(value, Iterable) else [None]
    texts = [text for text in several if text is not None]
    if len(texts) < len(several):
        raise UsageError(f"`{keyword}` takes texts, or names with their values, and was given {value!r}", keyword=keyword)
    return texts


def _one(value: Any) -> str | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, (str, os.PathLike)):
        return os.fsdecode(value)
    # Also those of NumPy.
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if isinstance(value, numbers.Real):
        return repr(float(value))
    return None
