"""What the demo shows at the end: a table, bars in the terminal, the bars as an SVG picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from .client import Answer

BAR_COLUMNS = 50
QUESTION_COLUMNS = 30


@dataclass(frozen=True, slots=True)
class Result:
    """One question, asked three times."""

    question: str
    cold: Answer
    memory: Answer
    disk: Answer

    @property
    def identical(self) -> bool:
        return self.cold.token_ids == self.memory.token_ids == self.disk.token_ids

    @property
    def memory_ratio(self) -> float:
        return self.cold.ttft_s / self.memory.ttft_s

    @property
    def disk_ratio(self) -> float:
        return self.cold.ttft_s / self.disk.ttft_s


@dataclass(frozen=True, slots=True)
class Summary:
    """The medians over all questions."""

    memory_ratio: float
    disk_ratio: float
    ttft_s: dict[str, float]
    tokens: int  # of the shortest prompt
    identical: bool

    @classmethod
    def of(cls, results: Sequence[Result]) -> Summary:
        return cls(
            memory_ratio=statistics.median(result.memory_ratio for result in results),
            disk_ratio=statistics.median(result.disk_ratio for result in results),
            ttft_s={
                "cold": statistics.median(result.cold.ttft_s for result in results),
                "memory": statistics.median(result.memory.ttft_s for result in results),
                "disk": statistics.median(result.disk.ttft_s for result in results),
            },
            tokens=min(result.cold.prompt_tokens for result in results),
            identical=all(result.identical for result in results),
        )

    def line(self) -> str:
        return (
            f"demo: memory={self.memory_ratio:.1f}x disk={self.disk_ratio:.1f}x "
            f"tokens={self.tokens} identical={'yes' if self.identical else 'no'}"
        )


def table(results: Sequence[Result]) -> str:
    wide = QUESTION_COLUMNS
    blank = " " * wide
    lines = [
        f"{blank}  prompt    time to first token, s         faster by        hit tokens     same",
        f"{'question':{wide}}  tokens    cold   memory     disk    memory     disk    "
        "memory   disk  answer",
    ]
    for result in results:
        cold, memory, disk = result.cold, result.memory, result.disk
        lines.append(
            f"{shortened(result.question):{wide}}  {cold.prompt_tokens:6}  "
            f"{cold.ttft_s:6.2f}  {memory.ttft_s:7.3f}  {disk.ttft_s:7.3f}  "
            f"{result.memory_ratio:7.1f}x {result.disk_ratio:7.1f}x   "
            f"{memory.hit_tokens:6} {disk.hit_tokens:6}  {'yes' if result.identical else 'NO'}"
        )
    return "\n".join(lines)


def shortened(text: str) -> str:
    return text if len(text) <= QUESTION_COLUMNS else f"{text[: QUESTION_COLUMNS - 3]}..."


def differences(results: Sequence[Result]) -> str:
    """The answers that are not the same, in full; empty where all are."""
    lines: list[str] = []
    for result in results:
        if not result.identical:
            lines.append(f"answers to {result.question!r} differ:")
            for name in ("cold", "memory", "disk"):
                answer: Answer = getattr(result, name)
                lines.append(f"  {name:6} {answer.text!r} {list(answer.token_ids)}")
    return "\n".join(lines)


def bars(summary: Summary) -> str:
    longest = max(summary.ttft_s.values())
    lines = ["time to first token, median of the questions:"]
    for name, seconds in summary.ttft_s.items():
        bar = "#" * max(1, round(BAR_COLUMNS * seconds / longest))
        lines.append(f"  {name:6} {bar} {seconds:.3f} s")
    return "\n".join(lines)


def svg(summary: Summary, title: str, caption: str) -> str:
    """A bar for each pass, drawn to one scale; readable on light and dark pages."""
    longest = max(summary.ttft_s.values())
    labels = {
        "cold": "computed by the engine",
        "memory": f"kvkeep, memory ({summary.memory_ratio:.1f}x)",
        "disk": f"kvkeep, disk, engine restarted ({summary.disk_ratio:.1f}x)",
    }
    colours = {"cold": "#9aa0a6", "memory": "#1a73e8", "disk": "#12855b"}
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 250" width="720" height="250" '
        'font-family="system-ui, sans-serif" font-size="14">',
        '<rect width="720" height="250" rx="8" fill="#ffffff" stroke="#dadce0"/>',
        f'<text x="20" y="34" font-size="17" font-weight="600">{escape(title)}</text>',
    ]
    for row, (name, seconds) in enumerate(summary.ttft_s.items()):
        top = 60 + 54 * row
        width = max(2.0, 560 * seconds / longest)
        parts.append(f'<text x="20" y="{top + 12}" fill="#3c4043">{escape(labels[name])}</text>')
        parts.append(
            f'<rect x="20" y="{top + 19}" width="{width:.1f}" height="20" rx="2" '
            f'fill="{colours[name]}"/>'
        )
        parts.append(f'<text x="{28 + width:.1f}" y="{top + 34}">{seconds:.3f} s</text>')
    parts.append(f'<text x="20" y="236" font-size="12" fill="#5f6368">{escape(caption)}</text>')
    parts.append("</svg>")
    return "\n".join(parts) + "\n"
