"""Calls as JSON: typed on both sides, and understood by releases that differ by an argument."""

import asyncio
import json
from dataclasses import dataclass

import pytest

from manta.workers.protocol.json_codec import MalformedMessage
from manta.workers.protocol.remote_call import call, serve


@dataclass(frozen=True)
class Order:
    number: int


class Callee:
    async def act(self, order: Order, often: int = 1) -> list[Order]:
        return [order] * often

    async def _private(self) -> None: ...

    def not_a_call(self) -> None: ...


async def send(method, arguments):
    """Over a wire that carries JSON only."""
    answer = await serve(Callee(), method, json.loads(json.dumps(arguments)))
    return json.loads(json.dumps(answer))


def test_remote_call_keeps_types_of_arguments_and_answer():
    assert asyncio.run(call(send, Callee.act, {"order": Order(7), "often": 2})) == [Order(7), Order(7)]


def test_remote_call_ignores_unknown_arguments_and_defaults_missing_ones():
    assert asyncio.run(serve(Callee(), "act", {"order": {"number": 1}, "newer": 5})) == [{"number": 1}]


@pytest.mark.parametrize("method", ["_private", "not_a_call", "absent", "__init__"])
def test_remote_calls_reach_public_coroutines_only(method):
    with pytest.raises(MalformedMessage, match="has no method"):
        asyncio.run(serve(Callee(), method, {}))
