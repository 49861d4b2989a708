"""Common parts of the commands that use a trained model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from manta.workers.checkpoint.catalog import checkpoint_at
from manta.workers.errors import MantaError
from manta.workers.inference.loaded_model import LoadedModel, TextTokens, spec_of_weights, text_tokens_of
from manta.workers.spec.problems import SpecError
from manta.workers.storage.locations import InvalidLocation, Location, parse_location
from manta.workers.system import gpu
from manta.workers.weights.config import CONFIG

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def options_for(called: str, description: str) -> argparse.ArgumentParser:
    """A parser with the options for the model and its device. `called`: the command as it was typed."""
    parser = argparse.ArgumentParser(prog=called, description=description)
    parser.add_argument(
        "checkpoint",
        type=_location,
        help="a checkpoint, or a folder or s3:// URL of several, whose newest complete one is used; or a folder of "
        "Hugging Face weights",
    )
    parser.add_argument(
        "--adapter",
        type=Path,
        metavar="FOLDER",
        help="low-rank adapters in the format of PEFT, which are merged into the weights",
    )
    parser.add_argument(
        "--device", type=_device, help="such as cuda:1; default: a GPU if there is one, otherwise the CPU"
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="number format of weights and activations; default: bf16 on GPUs, otherwise fp32",
    )
    parser.add_argument(
        "--threads", type=positive, metavar="N", help="computation threads on a CPU; default: all cores"
    )
    parser.add_argument("--batch-size", type=positive, metavar="N", default=8, help="sequences at a time (default: 8)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def add_template_to(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the chat template."""
    parser.add_argument(
        "--template",
        metavar="FILE",
        help="with --chat: a template file, or chatml; default: the template of the job's training",
    )


def loaded(options: argparse.Namespace) -> tuple[LoadedModel, TextTokens]:
    """The requested model and tokenizer. Raises MantaError."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = options.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpu.use(device)
    dtype = DTYPES[options.dtype] if options.dtype else torch.bfloat16 if device.type == "cuda" else torch.float32
    checkpoint = checkpoint_of(options)
    if checkpoint is None:
        model = LoadedModel.of_weights(spec_of_weights(options.checkpoint), device, dtype, options.adapter)
    else:
        model, _ = LoadedModel.of_checkpoint(checkpoint, device, dtype, options.adapter)
    return model, text_tokens_of(model.spec, checkpoint)


def checkpoint_of(options: argparse.Namespace) -> Location | None:
    """The requested checkpoint; None if a folder of Hugging Face weights is requested. Raises CheckpointError."""
    place: Location = options.checkpoint
    return None if isinstance(place, Path) and (place / CONFIG).is_file() else checkpoint_at(place)


def run(command: Callable[[argparse.Namespace], None], options: argparse.Namespace) -> int:
    """Run the command; returns the exit status. Errors of the user are one sentence on stderr."""
    try:
        command(options)
    except (MantaError, SpecError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _location(text: str) -> Location:
    try:
        location = parse_location(text)
    except InvalidLocation as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return location.absolute() if isinstance(location, Path) else location


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"must be cpu, cuda or such as cuda:1, not {text!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"must be cpu, cuda or such as cuda:1, not {text!r}")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise argparse.ArgumentTypeError(f"is {text}, and torch finds {count} GPUs here (cuda:0 is the first)")
    return device


def positive(text: str) -> int:
    """A whole number of at least 1, as an option."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return int(text)
