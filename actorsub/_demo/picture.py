"""The picture: latency over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from actorsub._demo.figures import Summary, format_duration
from actorsub._demo.records import ModeRun
from actorsub._demo.settings import MODES, Settings


def draw(path: Path, settings: Settings, runs: Sequence[ModeRun], summaries: Sequence[Summary]) -> None:
    """Latency over time, one panel per mode on common axes. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure = Figure(figsize=(10, 1.0 + 2.2 * len(runs)), dpi=150, layout="constrained")
    panels = figure.subplots(len(runs), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for panel, run, summary in zip(panels, runs, summaries, strict=True):
        mode = next(mode for mode in MODES if mode.name == run.mode)
        for kill in run.killed:
            panel.axvline(kill.at_s, color="#555555", linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        for answered, marker, size in ((True, "o", 9), (False, "x", 30)):
            shown = [request for request in run.requests if request.answered is answered]
            panel.scatter(
                [request.at_s for request in shown],
                [request.latency_s for request in shown],
                s=size,
                marker=marker,
                color=mode.color if answered else "black",
                alpha=0.55 if answered else 1.0,
                linewidths=0 if answered else 1.2,
                zorder=2,
            )
        panel.set_title(mode.label, loc="left", color=mode.color, fontweight="bold", fontsize=11)
        facts = f"p99 {format_duration(summary.p99_s)}, p99.9 {format_duration(summary.p999_s)}"
        facts += f", time lost waiting {format_duration(summary.lost_s)}"
        if summary.failed:
            facts += f", {summary.failed} failed (x)"
        panel.set_title(facts, loc="right", fontsize=9, color="#333333")
        panel.grid(axis="y", color="#dddddd", linewidth=0.6)
        panel.set_axisbelow(True)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    panels[0].set_yscale("log")
    panels[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    panels[0].yaxis.set_minor_locator(NullLocator())
    panels[0].set_xlim(-0.2, settings.seconds + 0.2)
    panels[-1].set_xlabel("scheduled arrival of the request, seconds since the load began")
    figure.supylabel("latency (log scale)", fontsize=10)
    figure.suptitle(
        f"Latency of each request while workers are killed (dashed lines): "
        f"{settings.workers} workers, {settings.rate:g} requests/s",
        fontsize=11,
    )
    figure.savefig(path)


def _tick(seconds: float) -> str:
    for unit, size in (("us", 1e-6), ("ms", 1e-3)):
        if seconds < 999.5 * size:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"
