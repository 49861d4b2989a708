"""What docs/models.md says to run, as it is written there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from engine_specs import document

from workers.spec.reading import parse_job_spec

ROOT = Path(__file__).parents[3]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", (ROOT / "docs/models.md").read_text(), re.M | re.S)


@pytest.mark.parametrize("block", [text for kind, text in BLOCKS if kind == "yaml" and not text.startswith("#")])
def test_the_examples_of_families_are_specs(block):
    spec = parse_job_spec({**document(), **yaml.safe_load(block)})
    assert spec.model.family in block


@pytest.mark.soak
def test_weights_go_in_and_out_as_the_page_says(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "bin").mkdir()
    for name, module in (("python", ""), ("manta", "-m api.cli ")):
        command = tmp_path / "bin" / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} {module}"$@"\n')
        command.chmod(0o755)
    environment = {
        **os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
        "MANTA_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    ran = []
    for kind, text in BLOCKS:
        if kind == "yaml" and text.startswith("# "):
            (tmp_path / text.splitlines()[0].removeprefix("# ")).write_text(text)
        elif kind in ("sh", "python"):
            command = ["sh", "-ec", text] if kind == "sh" else [sys.executable, "-c", text]
            done = subprocess.run(
                command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
            )
            assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
            ran.append(done.stdout)
    assert "step 4/4" in ran[1]
    assert "has the weights of" in ran[2]
    assert (tmp_path / "exported" / "model.safetensors").exists()
