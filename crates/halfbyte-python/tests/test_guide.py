"""The examples of docs/guide-python.md, in their order, each in the namespace of those before it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

GUIDE = ROOT / "docs" / "guide-python.md"
README = ROOT / "README.md"


def examples(path: Path) -> list[tuple[str, str]]:
    """Headings with the Python code below them."""
    found, heading = [], path.stem
    for block in re.finditer(r"^(?:#+ (?P<heading>[^\n]*)|```python\n(?P<code>.*?)^```)$", path.read_text(), re.M | re.S):
        if block["heading"]:
            heading = block["heading"]
        else:
            found.append((heading, block["code"]))
    return found


def test_the_guide_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    found = examples(GUIDE)
    assert len(found) >= 8
    os.symlink(ROOT / "models", tmp_path / "models")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    for heading, code in found:
        if "cuda" in heading.lower():
            continue
        exec(compile(code, f"guide-python.md, {heading}", "exec"), namespace)


def test_the_example_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = examples(README)
    assert found, "README.md has no example in Python"
    os.symlink(ROOT / "models", tmp_path / "models")
    monkeypatch.chdir(tmp_path)
    for heading, code in found:
        exec(compile(code, f"README.md, {heading}", "exec"), {})
