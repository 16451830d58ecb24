"""Requests that end before their time: while they wait, load, compute or store."""

from __future__ import annotations

from collections.abc import Iterator

from tests.gate.lab import Lab, Outcome, clean, compare, kvkeep, not_less_cached
from tests.vllm import asking

_SLOW_S = 0.2


def cases(lab: Lab) -> Iterator[Outcome]:
    options = {"block_size": 32, "max_num_batched_tokens": 256}
    kept = {"tokens": lab.text(40, 641)}
    fresh = [{"tokens": lab.text(41 + number, 641)} for number in range(4)]
    other = {"tokens": lab.text(46, 300)}
    own = lab.plain([[kept], *([request] for request in fresh), [other]], **options)
    settings = kvkeep(
        chunk_tokens=32, memory__size="0.2", disk__paths=lab.new_folder(), disk__size="1"
    )
    with lab.start(**options, kv_transfer_config=settings, name="aborts") as engine:
        engine.do(asking.ask, [kept])
        for steps, what in ((0, "at once"), (1, "waiting"), (2, "a step later"), (4, "later")):
            engine.do(asking.forget_memory)
            engine.do(asking.slow_disk, _SLOW_S)
            engine.do(asking.start, "gone", kept, steps)
            engine.do(asking.stop, "gone")
            found = engine.do(asking.ask, [other])
            engine.do(asking.slow_disk, 0)
            yield Outcome(
                f"aborts/{what} while a slow disk loads",
                [*compare(own[5], found, logprobs=False), *clean(engine.do(asking.state))],
            )
        for steps, request in enumerate(fresh, 1):
            # Each step stores 256 tokens; the disk writes them for longer than the step takes.
            engine.do(asking.slow_disk, _SLOW_S)
            engine.do(asking.start, "gone", request, steps)
            engine.do(asking.stop, "gone")
            found = engine.do(asking.ask, [other])
            engine.do(asking.slow_disk, 0)
            again = engine.do(asking.ask, [request])
            yield Outcome(
                f"aborts/after {steps} steps of storing",
                [
                    *compare(own[5], found, logprobs=False),
                    *compare(own[steps], again, logprobs=False),
                    *clean(engine.do(asking.state)),
                ],
            )
        # The name of a request that is still loading, used again for another one.
        engine.do(asking.forget_memory)
        engine.do(asking.slow_disk, _SLOW_S)
        engine.do(asking.start, "name", kept, 2)
        engine.do(asking.stop, "name")
        engine.do(asking.start, "name", other, 1)
        found = engine.do(asking.finish, ["name"])
        engine.do(asking.slow_disk, 0)
        yield Outcome(
            "aborts/a name that is used again at once",
            [*compare(own[5], [*found.values()], logprobs=False), *clean(engine.do(asking.state))],
        )
        found = engine.do(asking.ask, [kept])
        yield Outcome(
            "aborts/hits after all of it",
            [*compare(own[0], found, logprobs=False), *not_less_cached(found, 640)],
        )
