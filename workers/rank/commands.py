"""Commands from an agent to its running trainer: one JSON line each, on the control socket. Pure Python."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from workers.protocol.json_codec import MalformedMessage, from_json, to_json
from workers.protocol.messages import Fault, LaunchOrder, TraceOrder


@dataclass(frozen=True)
class Go:
    """Leave rest and carry out an order."""

    order: LaunchOrder


@dataclass(frozen=True)
class Rest:
    """Leave a generation and come to rest."""

    generation: int
    after_step: bool = False
    """Only after the present step."""


@dataclass(frozen=True)
class SaveAndEnd:
    """Together with all other ranks of a generation: save the state after a step, and exit."""

    generation: int


@dataclass(frozen=True)
class Arm:
    """Carry out a fault when its step and phase are reached."""

    fault: Fault


@dataclass(frozen=True)
class Trace:
    """Have all ranks of the job record steps."""

    order: TraceOrder


@dataclass(frozen=True)
class DumpFlightRecord:
    """Report the contents of NCCL's flight recorder."""


Command = Go | Rest | SaveAndEnd | Arm | Trace | DumpFlightRecord
_COMMANDS: dict[str, Any] = {
    "go": Go,
    "rest": Rest,
    "save_and_end": SaveAndEnd,
    "fault": Arm,
    "trace": Trace,
    "tell_flight": DumpFlightRecord,
}
_WORDS = {command: word for word, command in _COMMANDS.items()}


def command_line(command: Command) -> bytes:
    """The command as a line for the control socket."""
    return json.dumps({"do": _WORDS[type(command)], **to_json(command)}).encode() + b"\n"


def read_command(line: bytes) -> Command:
    """The command in a line of `command_line`. Raises MalformedMessage and ValueError."""
    document = json.loads(line)
    if not isinstance(document, dict) or document.get("do") not in _COMMANDS:
        raise MalformedMessage(f"{line[:80]!r} is not a command")
    command: Command = from_json(_COMMANDS[document["do"]], document)
    return command
