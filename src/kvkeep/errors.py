"""Every error kvkeep raises.

None of them reaches an engine's step: the connector turns each into a miss.
"""

from __future__ import annotations


class KVKeepError(Exception):
    """Base of all errors that kvkeep raises on purpose."""


class ConfigError(KVKeepError, ValueError):
    """A setting is wrong. The message names the setting, the value, and the nearest right thing."""


class LayoutError(KVKeepError):
    """The engine's KV cache has a layout kvkeep does not know, or that failed the self-test."""


class PoolError(KVKeepError):
    """The pool's rules were broken: a lease given back twice, a slot that does not exist."""


class TierError(KVKeepError):
    """A whole batch failed in a tier. The caller treats each key of the batch as a miss."""


class TierUnavailable(TierError):
    """The tier cannot be reached or used now (connection refused, directory gone, device error)."""


class TierTimeout(TierError):
    """The tier did not answer in time."""


class TierFull(TierError):
    """The tier refused to store for lack of room and could not make any."""


class FrameError(KVKeepError):
    """Bytes at rest that are not the frame they should be. `reason` is one lower-case word."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
