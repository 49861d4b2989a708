"""nanoGPT's settings for a CPU as whole processes that take turns, each started as its users start it.

One is `python -m manta.workers.run`. The other is nanoGPT itself, from a folder that holds a copy of its repository,
with the command of its README; without one it is `benchmarks/support/plain_process.py`. Each says by itself how long an
iteration took. All have one token for each character that occurs in the text, as nanoGPT has."""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from benchmarks.support.report import ROOT
from manta.workers.errors import MantaError

SETTLING = 20
"""First iterations of each process that do not count."""
SECONDS = 600.0
_TIME = re.compile(r"^iter \d+: .*?time ([\d.]+)ms", re.MULTILINE)
_CONFIG = "config/train_shakespeare_char.py"
_SETTINGS = {
    "device": "cpu", "compile": False, "eval_iters": 20, "log_interval": 1, "block_size": 64, "batch_size": 12,
    "n_layer": 4, "n_head": 4, "n_embd": 128, "lr_decay_iters": 2000, "dropout": 0.0,
}  # fmt: skip


class ProcessFailed(MantaError):
    """One of the programs did not do what it was started for."""


@dataclass(frozen=True)
class Turns:
    """Median milliseconds of an iteration, turn by turn."""

    engine: list[float]
    other: list[float]

    @property
    def ratio(self) -> float:
        """The engine's time by the other's, as a median over the turns: what both met in one turn is alike."""
        return statistics.median(ours / theirs for ours, theirs in zip(self.engine, self.other, strict=True))


Program = Callable[[int], list[float]]
"""Runs on so many cores: milliseconds of each iteration."""


def take_turns(programs: Sequence[Program], cores: Sequence[int], turns: int) -> dict[int, Turns]:
    """By number of cores how long `programs`, the engine's and the other, take. Raises ProcessFailed."""
    medians: dict[int, tuple[list[float], list[float]]] = {count: ([], []) for count in cores}
    for turn in range(turns):
        for count in cores:
            for at in (0, 1) if turn % 2 == 0 else (1, 0):
                medians[count][at].append(statistics.median(programs[at](count)[SETTLING:]))
    return {count: Turns(*both) for count, both in medians.items()}


def engine(document: dict[str, Any], text: Path, folder: Path) -> Program:
    """`python -m manta.workers.run` with the job `document`, whose text becomes characters; files go to `folder`."""
    job, metrics = folder / "job.yaml", folder / "metrics.jsonl"
    tokenizer = folder / "characters.json"
    _tokenizer_of(text.read_text(encoding="utf-8")).save(str(tokenizer))
    data = {**document["data"], "tokenizer": str(tokenizer), "end_of_document": "none"}
    job.write_text(yaml.safe_dump({**document, "data": data}), encoding="utf-8")

    def run(cores: int) -> list[float]:
        command = [
            sys.executable,
            "-m",
            "manta.workers.run",
            str(job),
            "--metrics",
            str(metrics),
            "--cache",
            str(folder),
        ]
        _output(command, ROOT, cores)
        rows = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
        return [1e3 * row["step_seconds"] for row in rows]

    return run


def plain_loop(text: Path, steps: int) -> Program:
    """A plain PyTorch loop as a process of its own."""
    command = [sys.executable, "-m", "benchmarks.support.plain_process", str(text), str(steps)]
    return lambda cores: _times(_output(command, ROOT, cores))


def their_program(repository: Path, text: Path, steps: int, folder: Path) -> Program:
    """nanoGPT from a copy of its repository, of which `folder` gets a copy, with `text` as its data. Raises
    ProcessFailed."""
    copy = folder / "nanogpt"
    if not (repository / "train.py").is_file() or not (repository / _CONFIG).is_file():
        raise ProcessFailed(f"{repository} holds no copy of nanoGPT's repository: there is no train.py and {_CONFIG}")
    shutil.copytree(repository, copy, ignore=shutil.ignore_patterns(".git", "out*"))
    prepare = copy / "data" / "shakespeare_char"
    shutil.copy(text, prepare / "input.txt")  # or it would be fetched
    script = prepare / "prepare.py"
    script.write_text(re.sub(r"^import requests$", "", script.read_text(), flags=re.MULTILINE))
    _output([sys.executable, str(script)], copy, 1)
    options = [f"--{name}={value}" for name, value in {**_SETTINGS, "max_iters": steps - 1}.items()]
    return lambda cores: _times(_output([sys.executable, "train.py", _CONFIG, *options], copy, cores))


def _tokenizer_of(text: str) -> Tokenizer:
    """A token for each character that occurs."""
    tokenizer = Tokenizer(models.WordLevel({character: at for at, character in enumerate(sorted(set(text)))}, "\n"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return tokenizer


def _times(output: str) -> list[float]:
    return [float(each) for each in _TIME.findall(output)]


def _output(command: list[str], folder: Path, cores: int) -> str:
    """What a program prints that runs on the first so many cores of this process. Raises ProcessFailed."""
    allowed = sorted(os.sched_getaffinity(0))[:cores]
    command = ["taskset", "--cpu-list", ",".join(map(str, allowed)), *command]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or ["it says nothing"]
        raise ProcessFailed(f"{' '.join(command[3:6])} ... ended with {ended.returncode}: {lines[-1]}")
    return ended.stdout
