"""What a check of `kvkeep doctor` finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["OK", "WARN", "FAIL"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's outcome."""

    check: str
    """What was looked at, in a word or two."""
    status: Status
    """FAIL: kvkeep does not work so. WARN: it works, but not as one may expect."""
    says: str
    """What was found, in one line."""
    remedy: str = ""
    """What to do about it, in one line; empty for OK."""


def ok(check: str, says: str) -> Finding:
    """All is well."""
    return Finding(check, "OK", says)


def warn(check: str, says: str, remedy: str) -> Finding:
    """It works, but not as one may expect."""
    return Finding(check, "WARN", says, remedy)


def fail(check: str, says: str, remedy: str) -> Finding:
    """It does not work."""
    return Finding(check, "FAIL", says, remedy)
