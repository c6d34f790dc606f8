"""Figures, and sentences made of them: pure functions of what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from actorsub._demo.records import ModeRun
from actorsub._demo.settings import MODES


@dataclass(frozen=True)
class Summary:
    """One row of the table. Percentiles are over answered requests; None where there is nothing to count."""

    mode: str
    requests: int
    answered: int
    failed: int
    p50_s: float | None
    p99_s: float | None
    p999_s: float | None
    worst_s: float | None
    lost_s: float  # sum over attempts that ended in an actor error
    refused: int  # attempts that `.remote()` itself refused
    refused_p50_s: float | None
    refused_worst_s: float | None
    told: int  # attempts that Ray accepted and failed later
    told_p50_s: float | None
    told_worst_s: float | None
    over_1_s: int  # answered requests that took longer than a second
    kills: int
    planned_kills: int


def percentile(ascending: Sequence[float], share: float) -> float | None:
    """Nearest rank: the smallest value with at least `share` of all at or below it, so one that occurred."""
    if not ascending:
        return None
    # Rounded first: 0.999 * 1000 is a hair above 999 in binary.
    rank = math.ceil(round(share * len(ascending), 6))
    return ascending[max(rank, 1) - 1]


def summarize(run: ModeRun) -> Summary:
    latencies = sorted(request.latency_s for request in run.requests if request.answered)
    lost = [attempt for request in run.requests for attempt in request.lost]
    refused = sorted(attempt.waited_s for attempt in lost if attempt.refused)
    told = sorted(attempt.waited_s for attempt in lost if not attempt.refused)
    return Summary(
        mode=run.mode,
        requests=len(run.requests),
        answered=len(latencies),
        failed=len(run.requests) - len(latencies),
        p50_s=percentile(latencies, 0.5),
        p99_s=percentile(latencies, 0.99),
        p999_s=percentile(latencies, 0.999),
        worst_s=percentile(latencies, 1.0),
        lost_s=math.fsum(attempt.waited_s for attempt in lost),
        refused=len(refused),
        refused_p50_s=percentile(refused, 0.5),
        refused_worst_s=percentile(refused, 1.0),
        told=len(told),
        told_p50_s=percentile(told, 0.5),
        told_worst_s=percentile(told, 1.0),
        over_1_s=sum(latency > 1.0 for latency in latencies),
        kills=len(run.killed),
        planned_kills=len(run.planned_kills),
    )


def format_duration(seconds: float | None) -> str:
    """Three digits and a unit: 850 ns, 12.3 us, 4.60 ms, 281 s."""
    if seconds is None:
        return "-"
    if seconds == 0:
        return "0 s"
    for unit, size in (("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3)):
        # Compared after rounding, or 999.6 us would read 1000 us.
        if float(f"{seconds / size:.3g}") < 1000:
            return f"{_three_digits(seconds / size) if unit != 'ns' else round(seconds / size)} {unit}"
    return f"{_three_digits(seconds)} s"


def _three_digits(value: float) -> str:
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f}"


def format_table(summaries: Sequence[Summary]) -> str:
    header = ["", "requests", "answered", "p50", "p99", "p99.9", "worst", "failed", "time lost waiting"]
    labels = {mode.name: mode.label for mode in MODES}
    rows = [
        [
            labels[s.mode],
            str(s.requests),
            str(s.answered),
            *(format_duration(value) for value in (s.p50_s, s.p99_s, s.p999_s, s.worst_s)),
            str(s.failed),
            format_duration(s.lost_s),
        ]
        for s in summaries
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for first, *others in [header, *rows]:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def format_refusals(summaries: Sequence[Summary]) -> str:
    """How each mode told a caller that a worker was away."""
    labels = {mode.name: mode.label for mode in MODES}
    width = max(len(labels[s.mode]) for s in summaries)
    lines = []
    for s in summaries:
        refused, told = f"{s.refused} refused at submit", f"{s.told} told later"
        if s.refused:
            refused += f" (median {format_duration(s.refused_p50_s)}, worst {format_duration(s.refused_worst_s)})"
        if s.told:
            told += f" (median {format_duration(s.told_p50_s)}, worst {format_duration(s.told_worst_s)})"
        lines.append(f"  {labels[s.mode].ljust(width)}  {refused}, {told}")
    return "\n".join(lines)


def explain(summaries: Sequence[Summary]) -> list[str]:
    """What the figures mean: a sentence on plain handles and one on actorsub, made of the figures alone."""
    by_mode = {s.mode: s for s in summaries}
    stock, tuned, ours = (by_mode.get(mode.name) for mode in MODES)
    sentences = []
    plain = [
        f"on {label} {count(s.refused + s.told, 'call')} to a worker that was away waited "
        f"{format_duration(s.lost_s)} in all to learn it, {count(s.over_1_s, 'request')} took over a second"
        for s, label in ((stock, "stock Ray"), (tuned, "tuned Ray"))
        if s is not None
    ]
    if plain:
        sentences.append("; ".join(plain) + ".")
    if ours is not None:
        met = count(ours.refused + ours.told, "call")
        text = f"on actorsub, the group passed over workers that were away, and {met} met one all the same"
        if ours.told:
            text += (
                f": {ours.told} on a worker when it was killed, over after {format_duration(ours.told_p50_s)} (median)"
            )
        text += f"; {format_duration(ours.lost_s)} in all"
        comparisons = [
            _compare(ours.lost_s, other.lost_s, label)
            for other, label in ((stock, "stock Ray"), (tuned, "tuned Ray"))
            if other is not None and other.lost_s > 0 and ours.lost_s > 0
        ]
        if comparisons:
            text += f" ({', '.join(comparisons)})"
        sentences.append(f"{text}, and {count(ours.over_1_s, 'request')} took over a second.")
    return [sentence[0].upper() + sentence[1:] for sentence in sentences]


def _compare(ours_s: float, other_s: float, label: str) -> str:
    more = ours_s > other_s
    factor = ours_s / other_s if more else other_s / ours_s
    if factor < 1.05:
        return f"about the same as {label}"
    shown = f"{factor:,.0f}" if factor >= 9.95 else f"{factor:.1f}"
    return f"{shown} times {'more' if more else 'less'} than {label}"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
