"""Which replica a request goes to, without Ray's processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import SimpleNamespace

import pytest

from lineage.trainer.ray import rollout
from lineage.trainer.ray.rollout import RemoteRollout
from lineage.trainer.rollout.base import SamplingParams


class Client(RemoteRollout):
    """A client of replicas that note who asks, and answer when they are let."""

    def __init__(self, count: int) -> None:
        self.asked: list[tuple[str, int]] = []
        self.may_answer = asyncio.Event()
        super().__init__(
            [SimpleNamespace(generate=SimpleNamespace(remote=self._replica(number))) for number in range(count)]
        )

    def _replica(self, number: int):
        def remote(scope, request_id: str, *rest: object) -> Awaitable[bool]:
            self.asked.append((request_id, number))
            return asyncio.ensure_future(self.may_answer.wait())

        return remote

    def ask(self, session: str) -> asyncio.Task:
        """One request of a session, under way."""
        coroutine = self.generate(session, prompt_ids=[1], sampling_params=SamplingParams(), max_tokens=1, seed=0)
        return asyncio.ensure_future(coroutine)


def test_a_new_session_goes_to_the_replica_with_the_fewest_and_stays_there():
    """By turns while all are under way; a later turn finds its prefix where the first one was."""

    async def scenario() -> list[tuple[str, int]]:
        client = Client(2)
        first = [client.ask(session) for session in "abc"]
        await asyncio.sleep(0)
        client.may_answer.set()
        await asyncio.gather(*first)
        await asyncio.gather(client.ask("b"), client.ask("d"), client.ask("a"))
        return client.asked

    assert asyncio.run(scenario()) == [("a", 0), ("b", 1), ("c", 0), ("b", 1), ("d", 0), ("a", 0)]


def test_a_cancelled_request_is_no_longer_in_flight():
    """Else its replica would be passed over for the rest of the run."""

    async def scenario() -> list[tuple[str, int]]:
        client = Client(2)
        asked = client.ask("a")
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        client.may_answer.set()
        await client.ask("b")
        return client.asked

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rollout.await_result.__globals__["ray"], "cancel", lambda reference: None)
        assert asyncio.run(scenario()) == [("a", 0), ("b", 0)]


def test_sessions_of_long_ago_are_forgotten(monkeypatch):
    """A run of any length remembers so many."""
    monkeypatch.setattr(rollout, "SESSIONS", 2)

    async def scenario() -> int:
        client = Client(2)
        client.may_answer.set()
        for session in "abcd":
            await client.ask(session)
        return len(client._replica_of)

    assert asyncio.run(scenario()) == 2
