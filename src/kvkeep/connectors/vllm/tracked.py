"""What the scheduler side knows of one request, from its first look-up to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvkeep.cache import Fetch
from kvkeep.connectors.vllm.report import RequestReport
from kvkeep.keys import KeyChain

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(slots=True, eq=False)
class Tracked:
    """Belongs to the scheduler side alone."""

    request: Request
    chain: KeyChain
    report: RequestReport
    block_ids: list[list[int]] = field(default_factory=list[list[int]])
    """The engine's block table of each KV group."""
    has_gap: bool = False
    """The engine took blocks away before they could be stored: what follows is worth nothing."""
    num_stored: int = 0
    """Chunks that were stored, found kept, or given up; the next to store is this one."""
    fetch: Fetch | None = None
    first_chunk: int = 0
    """Which of the request's chunks `fetch` begins with."""
    start_token: int = 0
    """Where the engine's own prefix ended when it last asked."""
    waits: bool = True
    """False once a slow tier took too long: it is not waited for a second time."""
    has_failed: bool = False
    """A load of it broke: it is computed, rather than promised what may break again."""
    is_counted: bool = False
    """Its tokens are in the counters: once a request, however often it is asked for."""
    missed: tuple[int, int, int] | None = None
    """(cache generation, first chunk, chunks) of the last look-up that found nothing."""
    is_loading: bool = False
    """Workers are copying: `fetch` must be held until they report."""
