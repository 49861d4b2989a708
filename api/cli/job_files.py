"""`manta init`, `schema`: a job file to begin with, and the schema by which editors complete and check job files."""

from __future__ import annotations

import ast
import inspect
import json
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from manta.api.cli.main import EXIT_BAD_INPUT, app, fail
from manta.workers.config import JobSpec, Section

TEMPLATE = """\
# A training job. `manta submit {file} --dry-run` checks it, `manta submit {file}` runs it.
# `manta schema > job.schema.json` lets editors complete keys, with this line:
# yaml-language-server: $schema=job.schema.json

name: {name}
model:
  # from: weights/llama            # a folder of Hugging Face weights to fine-tune, instead of the keys below
  family: llama
  layers: 4
  hidden_size: 128
  heads: 4
  sequence_length: 128             # tokens per sequence

data:
  source: python-stdlib            # text to try things with; yours: source: text, paths: [corpus]
  tokenizer: bytes                 # or a tokenizer.json

train:
  steps: 200
  global_batch_size: 16            # sequences per step, of all ranks together
  validate_every: 50               # steps
  optimizer:
    learning_rate: 1.0e-3
    warmup_steps: 20

# parallel: auto                   # the planner chooses the layout for this cluster; or a layout of your own:
# parallel: {{tensor: 2, pipeline: 1, data: 4}}

checkpoint:
  every_steps: 50
  keep: 3                          # the newest ones; older ones are deleted
"""


@app.command()
def init(
    file: Annotated[Path, typer.Argument(help="File to write.", dir_okay=False)] = Path("job.yaml"),
) -> None:
    """Write a job file with comments, to begin with."""
    name = "".join(each if each.isascii() and each.isalnum() else "-" for each in file.stem).strip("-")
    try:
        with file.open("x") as made:
            made.write(TEMPLATE.format(file=file, name=name or "job"))
    except FileExistsError as error:
        raise fail(f"{file} exists already; give the name of a new file", EXIT_BAD_INPUT) from error
    except OSError as error:
        raise fail(f"cannot write {file}: {error.strerror or error}", EXIT_BAD_INPUT) from error
    typer.echo(f"wrote {file}; submit it with `manta submit {file}`")


@app.command()
def schema() -> None:
    """Print the JSON schema of job files, for editors."""
    document = JobSpec.model_json_schema()
    described = document["$defs"] | {JobSpec.__name__: document}
    sections: list[type[Section]] = Section.__subclasses__()
    for section in sections:
        properties = described.get(section.__name__, {}).get("properties", {})
        for name, text in _docstrings(section).items():
            key = section.model_fields[name].alias or name
            properties.get(key, {})["description"] = " ".join(text.split())
    typer.echo(json.dumps(document, indent=2))


def _docstrings(section: type[Section]) -> dict[str, str]:
    """What the class says about each of its fields."""
    made = ast.parse(inspect.getsource(section)).body[0]
    assert isinstance(made, ast.ClassDef)
    return {
        field.target.id: text.value.value
        for field, text in pairwise(made.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }
