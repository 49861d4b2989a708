"""Calls between processes as JSON: method and arguments by name, encoded and decoded according to the method's
annotations.

Arguments that the called method does not have are ignored, and those that the caller did not send get their defaults,
as with the fields of messages (`json_codec.py`). This module does not know which transport carries the JSON.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from workers.protocol.json_codec import Codec, JsonObject, MalformedMessage, codec_of

T = TypeVar("T")


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
