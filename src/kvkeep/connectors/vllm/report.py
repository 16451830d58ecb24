"""The two log lines a request gets: what was retrieved for it, and what was stored of it."""

from __future__ import annotations

import logging

from kvkeep.cache import Fetch
from kvkeep.connectors.vllm.messages import Outcome
from kvkeep.hierarchy import ChunkShape

logger = logging.getLogger(__name__)


class RequestReport:
    """Gathers one request's figures. People grep these lines: their form is kept."""

    __slots__ = (
        "hit_tokens",
        "load_nbytes",
        "_request_id",
        "_shape",
        "_fetch_s",
        "_num_tokens",
        "_storing",
        "_is_complete",
        "_stored",
        "_store_s",
    )

    def __init__(self, request_id: str, shape: ChunkShape) -> None:
        self._request_id = request_id
        self._shape = shape
        self.hit_tokens: dict[str, int] = {}
        """Tier name -> tokens of the last load that came from it."""
        self.load_nbytes = 0
        self._fetch_s = 0.0
        self._num_tokens = 0
        self._storing = 0
        self._is_complete = False
        self._stored = 0
        self._store_s = 0.0

    def loading(
        self, fetch: Fetch, first_chunk: int, start: int, num_tokens: int, request_tokens: int
    ) -> None:
        """A load of tokens `[start, start + num_tokens)` was planned from `fetch`'s chunks."""
        chunk_tokens = self._shape.num_tokens
        end = start + num_tokens
        self.hit_tokens = {}
        at = start
        chunk = first_chunk
        for source, count in fetch.source_runs():
            chunk += count
            stop = min(chunk * chunk_tokens, end)
            self.hit_tokens[source] = self.hit_tokens.get(source, 0) + max(0, stop - at)
            at = max(at, stop)
        self.load_nbytes = num_tokens * self._shape.total_nbytes // chunk_tokens
        self._fetch_s = fetch.seconds
        self._num_tokens = request_tokens

    def loaded(self, outcome: Outcome) -> None:
        """The load ended."""
        if outcome.failed:
            return
        seconds = self._fetch_s + outcome.seconds
        logger.info(
            "Retrieved %d of %d tokens for request %s (%s). "
            "size: %.4g GB, cost %.1f ms, throughput: %.1f GB/s",
            sum(self.hit_tokens.values()),
            self._num_tokens,
            self._request_id,
            ", ".join(f"{source} {count}" for source, count in self.hit_tokens.items()),
            self.load_nbytes / 1e9,
            seconds * 1e3,
            self.load_nbytes / 1e9 / max(seconds, 1e-9),
        )

    def storing(self, num_chunks: int, request_tokens: int) -> None:
        """Chunks are on their way to memory."""
        self._storing += num_chunks
        self._num_tokens = request_tokens

    def stored(self, num_chunks: int, outcome: Outcome) -> None:
        """Chunks have ended, well or badly."""
        self._storing -= num_chunks
        self._store_s += outcome.seconds
        self._stored += 0 if outcome.failed else num_chunks
        self._say_stored()

    def complete(self) -> None:
        """No more will be stored; the line comes once what is under way has ended."""
        self._is_complete = True
        self._say_stored()

    def _say_stored(self) -> None:
        if self._storing or not self._is_complete or not self._stored:
            return
        nbytes = self._stored * self._shape.total_nbytes
        logger.info(
            "Stored %d of %d tokens for request %s. "
            "size: %.4g GB, cost %.1f ms, throughput: %.1f GB/s",
            self._stored * self._shape.num_tokens,
            self._num_tokens,
            self._request_id,
            nbytes / 1e9,
            self._store_s * 1e3,
            nbytes / 1e9 / max(self._store_s, 1e-9),
        )
        self._stored, self._store_s = 0, 0.0
