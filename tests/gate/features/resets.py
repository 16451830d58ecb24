"""`reset_prefix_cache` with connectors: nothing of before is given any more, from no tier."""

from __future__ import annotations

from collections.abc import Iterator

from tests.gate.lab import Lab, Outcome, clean, compare, kvkeep, not_less_cached
from tests.vllm import asking

OPTIONS = {"block_size": 32}


def cases(lab: Lab) -> Iterator[Outcome]:
    requests = [{"tokens": lab.text(70, 385)}, {"tokens": lab.text(71, 385)}]
    own = lab.plain([[request] for request in requests], **OPTIONS)
    own_other = None
    folder = lab.new_folder()
    for tier in ("memory", "disk"):
        settings = kvkeep(chunk_tokens=32, memory__size="0.2", disk__paths=folder, disk__size="1")
        with lab.start(**OPTIONS, kv_transfer_config=settings, name="resets") as engine:
            for request in requests:
                engine.do(asking.ask, [request])
            if tier == "disk":
                engine.do(asking.forget_memory)
            # One request is under way: it goes on with what it has, and keeps nothing.
            engine.do(asking.start, "under way", requests[1], 1)
            # (The engine keeps its own cache while a request runs; kvkeep is reset all the same.)
            engine.do(asking.reset, connector=True)
            found = [*engine.do(asking.finish, ["under way"]).values()]
            yield Outcome(
                f"resets/{tier}: a request under way",
                [*compare(own[1], found, logprobs=False)],
            )
            found = engine.do(asking.ask, [requests[0]])
            stale = [f"{found[0]['cached']} tokens of before"] if found[0]["cached"] else []
            yield Outcome(
                f"resets/{tier}: nothing of before",
                [*compare(own[0], found, logprobs=False), *stale],
            )
            found = engine.do(asking.ask, [requests[0]])
            yield Outcome(
                f"resets/{tier}: kept anew",
                [*compare(own[0], found, logprobs=False), *not_less_cached(found, 384)],
            )
            # What it is there for: other weights under the same name.
            engine.do(asking.change_weights)
            engine.do(asking.reset, connector=True)
            changed = engine.do(asking.ask, [requests[0]])
            if own_other is None:
                with lab.start(**OPTIONS, name="plain") as plain:
                    plain.do(asking.change_weights)
                    own_other = plain.do(asking.ask, [requests[0]])
            same = (
                ["the weights did not change"]
                if own[0][0]["tokens"] == own_other[0]["tokens"]
                else []
            )
            yield Outcome(
                f"resets/{tier}: after the weights have changed",
                [
                    *same,
                    *compare(own_other, changed, logprobs=True),
                    *clean(engine.do(asking.state)),
                ],
            )
        with lab.start(**OPTIONS, kv_transfer_config=settings, name="resets") as engine:
            found = engine.do(asking.ask, [requests[0]])
            yield Outcome(
                f"resets/{tier}: after a restart the weights are the old ones",
                [*compare(own[0], found, logprobs=False), *not_less_cached(found, 384)],
            )


quick_cases = None
"""Left to the whole gate, for the time they take."""
