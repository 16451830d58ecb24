"""The matrix: chunk size x tier x restart x the engine's own prefix cache x 1 and 8 at once.

Each configuration is asked the same kinds of questions:

    same        the same prompt again, one token longer than what a hit can hold
    whole       a prompt that is exactly a number of chunks: all but its last token is a hit
    shared      a shared beginning with another question
    grown       a conversation that grows turn by turn
    short       less than one chunk: nothing to keep
    unrelated   a prompt that was never asked: a miss
    eight       eight questions to one beginning, all at once

In float32 the tokens are compared with those of an engine without any cache. Logprobs are compared
bit for bit with the engine's own prefix cache, where both start from the same token. Eight at once
are compared by their tokens: when a load ends decides which requests share a step, and with that
the shape of its batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.gate.lab import Answer, Lab, Outcome, Request, clean, compare, kvkeep, not_less_cached
from tests.vllm import asking
from tests.vllm.host import Engine

BLOCK = 32
CHUNKS = (32, 64, 256, 1024)
TIERS: dict[str, dict[str, Any]] = {
    "memory": {"memory__size": "1"},
    "disk": {"memory__enabled": False, "disk__size": "4"},
    # Much smaller than what is asked: the rest is on disk.
    "mixed": {"memory__size": "0.15", "disk__size": "4"},
}
_SHORT_ANSWERS = {"sampling": {"max_tokens": 8}}
_TOGETHER = 8


def cases(lab: Lab) -> Iterator[Outcome]:
    """All of it."""
    for chunk_tokens in CHUNKS:
        for tier in TIERS:
            for own_cache in (False, True):
                yield from configuration(lab, chunk_tokens, tier, own_cache=own_cache)
    yield from configuration(lab, None, "memory", own_cache=True, block_size=128)
    yield from configuration(lab, None, "mixed", own_cache=False, block_size=128)


def quick_cases(lab: Lab) -> Iterator[Outcome]:
    """Two configurations, for a short run."""
    yield from configuration(lab, 64, "mixed", own_cache=False)
    yield from configuration(lab, 256, "disk", own_cache=True)


class Questions:
    """The prompts of one configuration; `base` tokens are a whole number of chunks."""

    def __init__(self, lab: Lab, chunk_tokens: int) -> None:
        base = self.base = max(256, chunk_tokens)
        beginning, turns = lab.text(2, base), lab.text(3, base + chunk_tokens + 60)
        self.same = _request(lab.text(0, base + 1))
        self.whole = _request(lab.text(1, base))
        self.shared = [_request(beginning + lab.text(number, 40)) for number in (7, 8)]
        self.grown = [_request(turns[:length]) for length in (base + 5, base + chunk_tokens + 7)]
        self.short = _request(lab.text(4, min(chunk_tokens, 300) - 1))
        self.unrelated = [_request(lab.text(number, 200)) for number in (5, 9)]
        together = lab.text(6, base)
        self.eight = [
            _request(together + lab.text(10 + number, 20 + number)) for number in range(_TOGETHER)
        ]

    def rounds(self) -> list[list[Request]]:
        """Every question once, one by one, then the eight at once."""
        single = [self.same, self.whole, *self.shared, *self.grown, self.short, *self.unrelated]
        return [*([request] for request in single), self.eight]

    def again(self) -> list[tuple[str, list[Request], int]]:
        """(kind, requests, how many tokens each must get from a cache) of the second time."""
        base = self.base
        return [
            ("same", [self.same], base),
            ("whole", [self.whole], base - 1),
            ("shared", [self.shared[1]], base),
            ("grown", [self.grown[1]], base),
            ("short", [self.short], 0),
            ("unrelated", [self.unrelated[0]], 0),
            ("eight", self.eight, base),
        ]


def _request(tokens: list[int]) -> Request:
    return {"tokens": tokens, **_SHORT_ANSWERS}


def configuration(
    lab: Lab, chunk_tokens: int | None, tier: str, *, own_cache: bool, block_size: int = BLOCK
) -> Iterator[Outcome]:
    """One configuration: cold, again, and where a disk keeps it, again after a restart."""
    chunk = chunk_tokens or block_size
    questions = Questions(lab, chunk)
    options = {"block_size": block_size, "enable_prefix_caching": own_cache}
    references = _References(lab, questions, block_size)
    settings = {**TIERS[tier]}
    if chunk_tokens is not None:
        settings["chunk_tokens"] = chunk_tokens
    if tier != "memory":
        settings["disk__paths"] = lab.new_folder()
    title = f"matrix/chunk {chunk_tokens or 'default'} {tier}" + (" own cache" * own_cache)
    with lab.start(**options, kv_transfer_config=kvkeep(**settings), name="matrix") as engine:
        yield from _first_time(engine, title, questions, references)
        yield from _again(engine, title, questions, references)
        if own_cache:
            yield from _both_caches(engine, title, questions, references)
        yield Outcome(f"{title}: nothing left over", [*clean(engine.do(asking.state))])
    with lab.start(**options, kv_transfer_config=kvkeep(**settings), name="restart") as engine:
        if tier == "memory":
            yield from _forgotten(engine, title, questions, references)
        else:
            yield from _again(engine, f"{title} restart", questions, references)


class _References:
    """What engines without kvkeep answer."""

    def __init__(self, lab: Lab, questions: Questions, block_size: int) -> None:
        rounds = questions.rounds()
        cold = lab.plain(rounds, block_size=block_size)
        self._cold = {_name(batch): answers for batch, answers in zip(rounds, cold, strict=True)}
        singles = [requests for _, requests, _ in questions.again() if len(requests) == 1]
        own = lab.plain(rounds + singles, block_size=block_size, enable_prefix_caching=True)
        self._own = {
            _name(batch): answers
            for batch, answers in zip(singles, own[len(rounds) :], strict=True)
        }

    def cold(self, requests: list[Request]) -> list[Answer]:
        """Computed from the first token on."""
        return self._cold[_name(requests)]

    def differences(self, requests: list[Request], found: list[Answer]) -> Iterator[str]:
        """Tokens against the cold answer; logprobs where both went on from the same token."""
        yield from compare(self.cold(requests), found, logprobs=False)
        own = self._own.get(_name(requests))
        if own is not None and own[0]["cached"] == found[0]["cached"]:
            yield from compare(own, found, logprobs=True)


def _name(requests: list[Request]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(request["tokens"]) for request in requests)


def _first_time(
    engine: Engine, title: str, questions: Questions, references: _References
) -> Iterator[Outcome]:
    problems: list[str] = []
    for batch in questions.rounds():
        problems += compare(references.cold(batch), engine.do(asking.ask, batch), logprobs=False)
    yield Outcome(f"{title}: first time", problems)


def _again(
    engine: Engine, title: str, questions: Questions, references: _References
) -> Iterator[Outcome]:
    for kind, requests, at_least in questions.again():
        # What is on its way to disk must be there, and the engine must not know it itself.
        engine.do(asking.settle)
        engine.do(asking.reset)
        found = engine.do(asking.ask, requests)
        yield Outcome(
            f"{title}: {kind}",
            [*references.differences(requests, found), *not_less_cached(found, at_least)],
        )


def _both_caches(
    engine: Engine, title: str, questions: Questions, references: _References
) -> Iterator[Outcome]:
    """The beginning from the engine's own cache, the rest from kvkeep."""
    engine.do(asking.settle)
    engine.do(asking.reset)
    beginning = _request(questions.same["tokens"][: questions.base // 2 + 1])
    engine.do(asking.ask, [beginning])
    found = engine.do(asking.ask, [questions.same])
    yield Outcome(
        f"{title}: same, beginning in the engine",
        [
            *references.differences([questions.same], found),
            *not_less_cached(found, questions.base),
        ],
    )
    engine.do(asking.reset)
    engine.do(asking.ask, [questions.eight[0]])
    found = engine.do(asking.ask, questions.eight)
    yield Outcome(
        f"{title}: eight, beginning in the engine",
        [
            *references.differences(questions.eight, found),
            *not_less_cached(found, questions.base),
        ],
    )


def _forgotten(
    engine: Engine, title: str, questions: Questions, references: _References
) -> Iterator[Outcome]:
    """Memory does not outlive the engine: a miss, and right."""
    found = engine.do(asking.ask, [questions.same])
    problems = [f"{answer['cached']} tokens from nowhere" for answer in found if answer["cached"]]
    yield Outcome(
        f"{title} restart: same",
        [*problems, *compare(references.cold([questions.same]), found, logprobs=True)],
    )
