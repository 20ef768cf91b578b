"""The programs of the documentation, and help texts."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import hydra_train as hydra
import settings
from conftest import ROOT


def programs(document: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


@pytest.mark.parametrize("program", programs("docs/python.md") + programs("README.md"))
def test_the_programs_of_the_documentation_run(program: str) -> None:
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert re.search(r"^(b4-)?lr\S+ \d+\.\d+ .*/models/(b4-)?lr", printed.stdout, re.MULTILINE), printed.stdout


def test_the_documentation_has_a_program() -> None:
    assert programs("docs/python.md")


def test_types_are_those_of_the_flags() -> None:
    assert settings.FILE.read_text() == settings.written(), "regenerate the file: python hydra-py/tests/settings.py"


def test_help_lists_the_keywords() -> None:
    assert hydra.select.__doc__ is not None
    for keyword in ("lr=RATE,..:", "device_memory=SIZE:", "no_shuffle=True:", "out=DIR:"):
        assert keyword in hydra.select.__doc__
