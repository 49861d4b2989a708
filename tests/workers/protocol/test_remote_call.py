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


def test_arguments_and_answer_arrive_with_their_types():
    assert asyncio.run(call(send, Callee.act, {"order": Order(7), "often": 2})) == [Order(7), Order(7)]


def test_an_argument_that_is_not_known_is_ignored_and_one_that_is_not_sent_takes_its_default():
    assert asyncio.run(serve(Callee(), "act", {"order": {"number": 1}, "newer": 5})) == [{"number": 1}]


@pytest.mark.parametrize("method", ["_private", "not_a_call", "absent", "__init__"])
def test_only_public_coroutines_are_called(method):
    with pytest.raises(MalformedMessage, match="has no method"):
        asyncio.run(serve(Callee(), method, {}))
