"""What pages say to run, as it is written there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[3]
Block = tuple[str, str]
"""Language and text."""


def blocks_of(page: str, heading: str | None = None) -> list[Block]:
    """The blocks of code of docs/`page`, or of its section with that heading."""
    text = (ROOT / "docs" / page).read_text()
    if heading is not None:
        _, _, text = text.partition(f"\n## {heading}\n")
        text = text.partition("\n## ")[0]
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.M | re.S)


def run_blocks(blocks: Iterable[Block], folder: Path) -> list[str]:
    """Carry them out in `folder`: YAML that begins with the name of a file becomes one. What each command prints."""
    (folder / "bin").mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    for name, module in (("python", ""), ("manta", "-m manta.api.cli ")):
        command = folder / "bin" / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} {module}"$@"\n')
        command.chmod(0o755)
    environment = {
        **os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src"),
        "MANTA_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    printed = []
    for kind, text in blocks:
        if kind == "yaml" and text.startswith("# "):
            (folder / text.splitlines()[0].removeprefix("# ")).write_text(text)
        elif kind in ("sh", "python"):
            command = ["sh", "-ec", text] if kind == "sh" else [sys.executable, "-c", text]
            # `timeout` also ends what the command has started.
            command = ["timeout", "280", *command]
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
            printed.append(done.stdout)
    return printed
