"""A producer that stores, a consumer that loads, over one folder; two engines at once on it."""

from __future__ import annotations

from collections.abc import Iterator

from tests.gate.lab import Lab, Outcome, clean, compare, kvkeep, not_less_cached
from tests.vllm import asking

OPTIONS = {"block_size": 32}


def cases(lab: Lab) -> Iterator[Outcome]:
    requests = [{"tokens": lab.text(110 + number, 385)} for number in range(3)]
    own = lab.plain([[request] for request in requests], **OPTIONS)
    folder = lab.new_folder()

    def settings(role: str):
        return kvkeep(
            role=role, chunk_tokens=32, memory__size="0.2", disk__paths=folder, disk__size="1"
        )

    with (
        lab.start(
            **OPTIONS, kv_transfer_config=settings("kv_producer"), name="producer"
        ) as producer,
        lab.start(
            **OPTIONS, kv_transfer_config=settings("kv_consumer"), name="consumer"
        ) as consumer,
        lab.start(**OPTIONS, kv_transfer_config=settings("kv_both"), name="both") as both,
    ):
        for time in ("first", "again"):
            found = producer.do(asking.ask, [requests[0]])
            loaded = [f"a producer loaded {found[0]['cached']}"] if found[0]["cached"] else []
            yield Outcome(
                f"roles/producer {time}", [*compare(own[0], found, logprobs=True), *loaded]
            )
        producer.do(asking.settle)
        for engine, name in ((consumer, "consumer"), (both, "both")):
            engine.do(asking.look_around)
            found = engine.do(asking.ask, [requests[0]])
            yield Outcome(
                f"roles/{name} from what the producer kept",
                [*compare(own[0], found, logprobs=False), *not_less_cached(found, 384)],
            )
        for time in ("first", "again"):
            found = consumer.do(asking.ask, [requests[1]])
            loaded = [f"a consumer stored {found[0]['cached']}"] if found[0]["cached"] else []
            yield Outcome(
                f"roles/consumer, its own question {time}",
                [*compare(own[1], found, logprobs=True), *loaded],
            )
        both.do(asking.ask, [requests[2]])
        both.do(asking.settle)
        consumer.do(asking.look_around)
        found = consumer.do(asking.ask, [requests[2]])
        yield Outcome(
            "roles/consumer from what another keeps",
            [*compare(own[2], found, logprobs=False), *not_less_cached(found, 384)],
        )
        for engine, name in ((producer, "producer"), (consumer, "consumer"), (both, "both")):
            yield Outcome(f"roles/{name}: nothing left", [*clean(engine.do(asking.state))])


quick_cases = None
"""Left to the whole gate, for the time they take."""
