"""Calls between processes as JSON: method and arguments by name, encoded and decoded according to the method's
annotations, whichever transport carries them; and whose calls an agent obeys.

Arguments that the called method does not have are ignored, and those that the caller did not send get their defaults,
as with the fields of messages (`json_codec.py`).
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from manta.workers.errors import MantaError
from manta.workers.protocol.json_codec import Codec, JsonObject, MalformedMessage, codec_of
from manta.workers.protocol.requests import COMMANDS, RankRequest

T = TypeVar("T")

EPOCH = "owner_epoch"
FOR_ALL = frozenset(
    {"describe", "progress", "stacks", "snapshot_steps", "snapshot_files", "backup_progress"}
    | {f"tell {word}" for word, command in COMMANDS.items() if issubclass(command, RankRequest) and command.for_all}
)
"""Names of calls that are answered for every caller: they change nothing, or are requests that a user may make to any
control plane."""


def call_name(method: str, arguments: JsonObject) -> str:
    """What a call is for: its method, and of `tell` also the word of the request."""
    request = arguments.get("request")
    return f"{method} {request.get('do')}" if method == "tell" and isinstance(request, dict) else method


async def call(
    send: Callable[[str, JsonObject], Awaitable[Any]], method: Callable[..., Awaitable[T]], arguments: dict[str, Any]
) -> T:
    """The caller's side: `send` carries the call of `method` to the other side; returns the answer. `method` provides
    the name and annotations; it is not run here. Raises MalformedMessage, and what `send` raises."""
    parameters, answer = _codecs(method)
    encoded = {name: parameters[name].encode(value) for name, value in arguments.items()}
    result: T = answer.decode(await send(method.__name__, encoded))
    return result


async def serve(target: object, method: str, arguments: JsonObject) -> Any:
    """The called side: run `method` of `target` and return its answer as JSON. Raises MalformedMessage for an unknown
    method or arguments that do not fit, and what the method raises."""
    function = getattr(type(target), method, None)
    if method.startswith("_") or not inspect.iscoroutinefunction(function):
        raise MalformedMessage(f"{type(target).__name__} has no method {method!r} for other processes")
    parameters, answer = _codecs(function)
    decoded = {name: codec.decode(arguments[name]) for name, codec in parameters.items() if name in arguments}
    return answer.encode(await function(target, **decoded))


@functools.cache
def _codecs(method: Callable[..., Any]) -> tuple[dict[str, Codec], Codec]:
    """Codecs of the parameters by name, and of the answer."""
    hints = typing.get_type_hints(method)
    answer = hints.pop("return")
    return {name: codec_of(kind) for name, kind in hints.items()}, codec_of(answer)


class StaleOwner(MantaError):
    """Another control plane has taken over in the meantime; drop the order and the job."""


class Ownership:
    """Which control plane may give orders to an agent: of several, the one that took over its job last.

    Each call carries the epoch of its caller's lease. Agents of earlier releases ignore it; calls of earlier releases
    do not have it and are served: these know of only one control plane.
    """

    def __init__(self) -> None:
        self.epoch = 0

    def admit(self, method: str, arguments: JsonObject) -> None:
        """Record the epoch of a call. Raises StaleOwner if it is lower than the newest owner's and the call is not
        for all."""
        name, epoch = call_name(method, arguments), arguments.get(EPOCH)
        if not isinstance(epoch, int):
            return
        if epoch < self.epoch and name not in FOR_ALL:
            raise StaleOwner(f"{name} was refused: its caller has epoch {epoch}, and another one {self.epoch} by now")
        self.epoch = max(self.epoch, epoch)
