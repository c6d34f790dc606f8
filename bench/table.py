"""Reads pytest-benchmark's JSON and prints what it says: budgets first, then everything that was compared.

    python bench/table.py bench/out/benchmark.json                      plain text
    python bench/table.py bench/out/benchmark.json --markdown           for a document
    python bench/table.py bench/out/benchmark.json --update FILE        into FILE, between the two marker lines

Every figure comes from the JSON; only the budgets are written here.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

BEGIN = "<!-- measured: begin (python bench/table.py JSON --update FILE) -->"
END = "<!-- measured: end -->"

#: What the project promises; see docs/design.md.
REFUSAL_RAISE_NS = 250.0
TIMES_FASTER_THAN_TUNED = 200.0
TIMES_FASTER_THAN_STOCK = 1e6
REFUSAL_REF_NS = 400_000.0
STATE_RATIO = 0.4
STATE_NS = 60.0
SUBMIT_RATIO = 0.75
OTHER_RATIO = 1.05
IN_FLIGHT_P50_NS = 10e6
IN_FLIGHT_P99_NS = 50e6
FIRST_REFUSAL_NS = 10e6
NODE_NS = 50e6
SILENCE_SLACK_NS = 500e6
AWAIT_RATIO = 1.00
CALL_RATIO = 1.0
GROUP_RATIO = 1.05
CALL_RATE_RATIO = 1.0
DEADLINE_LATE_NS = 5e6
WAITING_BYTES = 1000.0
IDLE_SHARE = 0.01
IDLE_BYTES = 20e6

LATE_COLUMNS = ("answered_p50_ns", "lost_p50_ns")


@dataclass(frozen=True)
class Table:
    """Cells are text; the first column is aligned left, the others right."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def as_text(self) -> str:
        widths = [max(len(row[i]) for row in [self.header, *self.rows]) for i in range(len(self.header))]
        lines = [self.title, "-" * len(self.title)]
        for row in [self.header, *self.rows]:
            cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())
        return "\n".join([*lines, *([self.note] if self.note else [])])

    def as_markdown(self) -> str:
        rule = ["---", *["---:"] * (len(self.header) - 1)]
        lines = [f"### {self.title}", ""]
        lines += [f"| {' | '.join(row)} |" for row in [self.header, rule, *self.rows]]
        return "\n".join([*lines, *(["", self.note] if self.note else [])])


class Results:
    """The benchmarks of one JSON file, found by what they say about themselves in `extra_info`."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.machine: dict[str, Any] = document["machine_info"]
        self.commit: dict[str, Any] = document.get("commit_info") or {}
        self._benchmarks: list[dict[str, Any]] = document["benchmarks"]

    def all(self, **wanted: Any) -> Iterator[dict[str, Any]]:
        for benchmark in self._benchmarks:
            extra = benchmark["extra_info"]
            if all(extra.get(name) == value for name, value in wanted.items()):
                yield benchmark

    def one(self, **wanted: Any) -> dict[str, Any] | None:
        return next(self.all(**wanted), None)


def median_ns(benchmark: dict[str, Any]) -> float:
    return float(benchmark["stats"]["median"]) * 1e9


def duration(ns: float) -> str:
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if ns >= size:
            return f"{ns / size:.3g} {unit}" if ns / size < 1000 else f"{ns / size:.0f} {unit}"
    return f"{ns:.3g} ns" if ns < 100 else f"{ns:.0f} ns"


def times(factor: float) -> str:
    return f"{factor:,.0f} x" if factor >= 100 else f"{factor:.3g} x"


def interval(extra: dict[str, Any]) -> str:
    return f"{extra['ratio']:.3f} ({extra['ratio_low']:.3f} to {extra['ratio_high']:.3f})"


# ---------------------------------------------------------------------------------------------------------------------


def budgets(results: Results) -> Table:
    rows: list[list[str]] = []

    def add(what: str, measured: str | None, budget: str, met: bool) -> None:
        rows.append([what, measured or "not measured", budget, "" if measured is None else "yes" if met else "NO"])

    raised = {name: results.one(environment=name, key="raise") for name in ("default", "tuned")}
    ref = results.one(environment="default", key="ref-outcome")
    ours = raised["default"]
    value = median_ns(ours) if ours else 0.0
    add(
        "refusal by raise, and back",
        ours and duration(value),
        f"<= {duration(REFUSAL_RAISE_NS)}",
        value <= REFUSAL_RAISE_NS,
    )
    for name, ray, limit in (
        ("tuned", "tuned Ray", TIMES_FASTER_THAN_TUNED),
        ("default", "stock Ray", TIMES_FASTER_THAN_STOCK),
    ):
        ours = raised[name]
        value = ours["extra_info"]["times_faster_than_ray"] if ours else 0.0
        add(f"refusal by raise, faster than {ray}", ours and times(value), f">= {times(limit)}", value >= limit)
    value = median_ns(ref) if ref else 0.0
    add(
        "refusal by ref, until get raised",
        ref and duration(value),
        f"<= {duration(REFUSAL_REF_NS)}",
        value <= REFUSAL_REF_NS,
    )
    ours = results.one(key="actorsub.state(h)")
    value = ours["extra_info"]["ratio"] if ours else 0.0
    add(
        "state(h) against _get_local_state()",
        ours and interval(ours["extra_info"]),
        f"<= {STATE_RATIO}",
        value <= STATE_RATIO,
    )
    value = median_ns(ours) if ours else 0.0
    add("state(h)", ours and duration(value), f"<= {duration(STATE_NS)}", value <= STATE_NS)
    for ours in results.all(key="wrapped", way="alone"):
        extra = ours["extra_info"]
        if extra["shape"].startswith("letting go"):
            add(f"{extra['shape']} against plain", interval(extra), f"<= {OTHER_RATIO}", extra["ratio"] <= OTHER_RATIO)
        elif not extra["shape"].startswith("attribute"):
            met = extra["ratio"] <= SUBMIT_RATIO
            add(f".remote() against plain, {extra['shape']}", interval(extra), f"<= {SUBMIT_RATIO}", met)
    for ours in results.all(key="wrapped", way="other"):
        extra = ours["extra_info"]
        met = extra["ratio"] <= OTHER_RATIO
        add(f".remote() against plain, {extra['shape']}", interval(extra), f"<= {OTHER_RATIO}", met)
    for row in detection_budgets(results):
        add(*row)
    return Table(
        "Budgets",
        ["what", "measured", "budget", "met"],
        rows,
        "Medians. Ratios: the median of the ratios within one turn, and its 95% interval.",
    )


def detection_budgets(results: Results) -> Iterator[tuple[str, str | None, str, bool]]:
    """(what, measured or None, budget, met)"""
    for what, wanted, name, limit in (
        ("in flight at SIGKILL, p50", {"key": "in-flight", "variant": "actorsub"}, "p50_ns", IN_FLIGHT_P50_NS),
        ("in flight at SIGKILL, p99", {"key": "in-flight", "variant": "actorsub"}, "p99_ns", IN_FLIGHT_P99_NS),
        ("first refusal after SIGKILL, p50", {"key": "first-refusal"}, "p50_ns", FIRST_REFUSAL_NS),
    ):
        one = results.one(**wanted)
        value = one["extra_info"][name] if one else 0.0
        yield what, one and duration(value), f"<= {duration(limit)}", value <= limit
    for one in results.all(key="node"):
        most = one["extra_info"]["max_ns"]
        yield one["name"], f"{duration(most)} at most", f"<= {duration(NODE_NS)}", most <= NODE_NS
    for one in results.all(key="frozen"):
        extra = one["extra_info"]
        limit = extra["limit_s"] * 1e9 + SILENCE_SLACK_NS
        yield one["name"], f"{duration(extra['max_ns'])} at most", f"<= {duration(limit)}", extra["max_ns"] <= limit
    one = results.one(key="live", variant="wrapped")
    value = one["extra_info"]["ratio"] if one else 0.0
    yield "await of a live call", one and interval(one["extra_info"]), f"<= {AWAIT_RATIO}", value <= AWAIT_RATIO
    yield from call_budgets(results)
    one = results.one(key="idle")
    share, grown = (one["extra_info"][name] if one else 0.0 for name in ("share_added", "grown_bytes"))
    what = "10,000 idle handles of 100 actors"
    yield f"{what}, CPU", one and f"{share:.2%} of a core", f"<= {IDLE_SHARE:.0%}", share <= IDLE_SHARE
    yield f"{what}, memory", one and f"{grown / 1e6:.1f} MB", f"<= {IDLE_BYTES / 1e6:.0f} MB", grown <= IDLE_BYTES


def call_budgets(results: Results) -> Iterator[tuple[str, str | None, str, bool]]:
    one = results.one(key="call-round-trip", way="call")
    value = one["extra_info"]["ratio"] if one else 0.0
    what = "round trip of .call() against await of plain"
    yield what, one and interval(one["extra_info"]), f"<= {CALL_RATIO}", value <= CALL_RATIO
    one = results.one(key="call-group")
    value = one["extra_info"]["ratio"] if one else 0.0
    what = "round trip of .call() of a group against that of its member"
    yield what, one and interval(one["extra_info"]), f"<= {GROUP_RATIO}", value <= GROUP_RATIO
    one = results.one(key="call-rate", way="call", n=64)
    value = one["extra_info"]["ratio"] if one else 0.0
    what = "rate of .call() against await of plain, 64 in flight"
    yield what, one and interval(one["extra_info"]), f">= {CALL_RATE_RATIO}", value >= CALL_RATE_RATIO
    one = results.one(key="call-waiting")
    late, size = (one["extra_info"][name] if one else 0.0 for name in ("p99_ns", "bytes"))
    what = "deadline while 10,000 calls wait, late by (p99)"
    yield what, one and duration(late), f"<= {duration(DEADLINE_LATE_NS)}", late <= DEADLINE_LATE_NS
    yield "a waiting call, memory", one and f"{size:.0f} bytes", f"<= {WAITING_BYTES:.0f} bytes", size <= WAITING_BYTES


def requests(results: Results) -> Iterator[Table]:
    rows = []
    for one in results.all(key="call-round-trip"):
        rows.append([f"{one['extra_info']['way']}, one by one", duration(median_ns(one)), interval(one["extra_info"])])
    if rows:
        yield Table("Round trip of a request", ["way", "p50", "of plain"], rows)
    rows = []
    for one in results.all(key="call-rate"):
        extra = one["extra_info"]
        rate = f"{1e9 / median_ns(one):,.0f}"
        rows.append([f"{extra['way']}, {extra['n']} in flight", rate, interval(extra)])
    if rows:
        yield Table("Requests per second", ["way", "calls/s", "of plain's rate"], rows)


def detection(results: Results) -> Iterator[Table]:
    rows = []
    for key in ("in-flight", "exit", "first-refusal", "big", "node", "node-stock", "frozen"):
        for one in results.all(key=key):
            extra = one["extra_info"]
            cells = [duration(extra[name]) for name in ("p50_ns", "p99_ns", "max_ns")]
            rows.append([one["name"], str(len(one["stats"]["data"])), *cells])
    if rows:
        yield Table(
            "From the signal until the caller knows",
            ["what", "signals", "p50", "p99", "most"],
            rows,
            "In flight: an `await` that had begun before the signal. A row of stock Ray is measured in the same "
            "process, between the others. Process exit: when the process was gone, by a pidfd of the benchmark's own.",
        )
    rows = []
    for one in results.all(key="live"):
        rows.append([one["extra_info"]["contender"], duration(median_ns(one)), interval(one["extra_info"])])
    if rows:
        yield Table("Round trip of `await handle.ping.remote()`", ["handle", "p50", "of plain"], rows)


def refusals(results: Results) -> Iterator[Table]:
    for environment, ray in (("default", "stock Ray"), ("tuned", "tuned Ray")):
        found = {one["extra_info"]["key"]: one for one in results.all(environment=environment)}
        if "raise" not in found or "ray-outcome" not in found:
            continue
        base_ns, ray_ns = median_ns(found["raise"]), median_ns(found["ray-outcome"])
        rows = []
        for key, one in found.items():
            ns = median_ns(one)
            row = [one["extra_info"]["contender"], duration(one["stats"]["min"] * 1e9), duration(ns)]
            row += [duration(one["stats"]["q3"] * 1e9), times(ns / base_ns)]
            # To return a ref is no outcome yet, and the loop is no refusal.
            row += [
                "" if key in ("interpreter", "loop", "ray-submit", "ref-submit", "ray-outcome") else times(ray_ns / ns)
            ]
            rows.append(row)
        yield Table(
            f"Refusal while the actor restarts, in one process with {ray}",
            ["per call", "best", "p50", "p75", "of actorsub raise", f"faster than {ray}"],
            rows,
            "Outcome: from the call until the caller has the error. Raises are means over batches of "
            f"{found['raise']['extra_info']['calls_per_sample']}, with the loop around them (last row) included.",
        )


def live(results: Results) -> Iterator[Table]:
    rows = []
    for one in [*results.all(key="actorsub.state(h)"), *results.all(key="h._get_local_state()")]:
        rows.append([one["extra_info"]["contender"], duration(median_ns(one)), interval(one["extra_info"])])
    if rows:
        yield Table("State of an actor", ["per call", "p50", "of _get_local_state()"], rows)
    for way, title in (
        ("alone", "Submitting to a live actor, one call at a time"),
        ("burst", "Submitting to a live actor, 60 calls in a burst"),
        ("other", "Submitting to a live actor, other calls, one at a time"),
    ):
        rows, any_core = [], False
        for wrapped in results.all(key="wrapped", way=way):
            shape = wrapped["extra_info"]["shape"]
            plain = results.one(key="plain", way=way, shape=shape)
            core = results.one(key="core", way=way, shape=shape)
            any_core = any_core or core is not None
            if plain:
                both = [duration(median_ns(one)) for one in (plain, wrapped)]
                row = [shape, *both, interval(wrapped["extra_info"])]
                rows.append([*row, interval(core["extra_info"]) if core else ""])
        columns = ["call", "plain handle", "wrapped", "ratio", "Ray's core alone"]
        if rows and any_core:
            note = "Ray's core alone: its submission with arguments made beforehand, in the same turns; of the plain."
            yield Table(title, columns, rows, note)
        elif rows:
            yield Table(title, columns[:-1], [row[:-1] for row in rows])


def cost(results: Results) -> Iterator[Table]:
    one = results.one(key="cost")
    if one:
        rows = [["time to wrap a handle", duration(median_ns(one))], ["10,000 handles", duration(median_ns(one) * 1e4)]]
        rows += [[f"memory of a {name}", f"{size:.0f} bytes"] for name, size in one["extra_info"]["bytes"].items()]
        note = "Memory: growth of the resident set over thousands of them, Ray's own share included."
        yield Table("Handles and refs", ["what", "each"], rows, note)


def restarts(results: Results) -> Iterator[Table]:
    for what, until in (
        ("submit", "`.remote()` returned or raised"),
        ("outcome", "the caller could know the result or the error"),
    ):
        found = list(results.all(key=what))
        if not found:
            continue
        rows = []
        for one in sorted(found, key=lambda one: one["extra_info"]["threads"]):
            extra = one["extra_info"]
            percentiles = [duration(extra[name]) for name in ("p50_ns", "p99_ns", "p99_9_ns")]
            row = [extra["variant"], str(extra["threads"]), *percentiles, duration(one["stats"]["max"] * 1e9)]
            if what == "outcome":
                ends = extra["ends"]
                row += [str(sum(ends.values())), str(ends.get("answered", 0)), str(ends.get("refused", 0))]
                row += [str(sum(ends.values()) - ends.get("answered", 0) - ends.get("refused", 0))]
                row += ["" if extra[name] is None else duration(extra[name]) for name in LATE_COLUMNS]
                row += [f"{extra['lost_total_s']:.1f} s"]
            rows.append(row)
        header = ["handle", "threads", "p50", "p99", "p99.9", "worst"]
        extra = found[0]["extra_info"]
        kills = sorted({len(one["extra_info"]["kills_s"]) for one in found})
        late_ns = max(one["extra_info"]["late_p99_ns"] for one in found)
        note = (
            f"From the call until {until}; over all calls, whatever became of them. "
            f"{extra['rate']:g} calls/s for {extra['seconds']:g} s at fixed times, from all threads together; "
            f"{' or '.join(map(str, kills))} kills; in each run 99% of the calls began within {duration(late_ns)} of "
            f"their time. Of {found[0]['stats']['rounds']} calls, p99.9 is nearly the worst."
        )
        if what == "outcome":
            header += ["calls", "answered", "refused", "failed", "p50 answered", "p50 lost", "time lost"]
            note += (
                " Refused: by `.remote()` itself. Failed: by the ref. Lost: refused or failed; time lost is the sum of "
                "what those calls took."
            )
        yield Table(f"Kills and restarts: {what}", header, rows, note)


def ratios_under_restarts(results: Results) -> Iterator[Table]:
    """The title benchmark again, as how many times actorsub's figure the others have."""
    rows = []
    for what in ("submit", "outcome"):
        for ours in sorted(results.all(key=what, variant="actorsub"), key=lambda one: one["extra_info"]["threads"]):
            threads = ours["extra_info"]["threads"]
            for other in results.all(key=what, threads=threads):
                if other is not ours:
                    pair = other["extra_info"], ours["extra_info"]
                    names = ("p50_ns", "p99_ns", "p99_9_ns", "lost_p50_ns")
                    cells = [times(pair[0][name] / pair[1][name]) if pair[0][name] else "" for name in names]
                    if what == "submit":
                        cells[-1] = ""
                    rows.append([f"{other['extra_info']['variant']}, {what}", str(threads), *cells])
    if rows:
        yield Table(
            "Kills and restarts: how many times actorsub's figure",
            ["handle", "threads", "p50", "p99", "p99.9", "p50 lost"],
            rows,
        )


def machine(results: Results) -> str:
    info = results.machine
    cpu = info.get("cpu", {})
    load = ", ".join(map(str, info.get("load_average", []))) or "unknown"
    commit = results.commit.get("id", "unversioned")[:12] + (" with changes" if results.commit.get("dirty") else "")
    return (
        f"{info.get('cores', '?')} cores ({cpu.get('brand_raw') or cpu.get('arch', 'unknown processor')}), "
        f"{info.get('memory_gb', '?')} GB, {info.get('system', '')} {info.get('kernel', '')}, "
        f"{info.get('python_implementation', 'Python')} {info.get('python_version', '')}, Ray {info.get('ray', '?')}, "
        f"actorsub at {commit}; {info.get('date', 'date unknown')}; load average before the run: {load}."
    )


def tables(results: Results) -> Iterable[Table]:
    yield budgets(results)
    yield from refusals(results)
    yield from live(results)
    yield from cost(results)
    yield from detection(results)
    yield from requests(results)
    yield from restarts(results)
    yield from ratios_under_restarts(results)


def update(path: pathlib.Path, markdown: str) -> None:
    """Puts `markdown` between the markers in the file. Raises ValueError when they are not there, once each."""
    text = path.read_text()
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"{path} must hold the lines {BEGIN!r} and {END!r} once each")
    path.write_text(pattern.sub(lambda _: f"{BEGIN}\n\n{markdown}\n\n{END}", text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=pathlib.Path, help="what pytest --benchmark-json wrote")
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    parser.add_argument("--update", type=pathlib.Path, metavar="FILE", help="put the Markdown into this file")
    arguments = parser.parse_args()
    results = Results(json.loads(arguments.json.read_text()))
    if arguments.markdown or arguments.update:
        markdown = "\n\n".join([machine(results), *(table.as_markdown() for table in tables(results))])
        if arguments.update:
            update(arguments.update, markdown)
        else:
            print(markdown)
        return
    print("\n\n".join([machine(results), *(table.as_text() for table in tables(results))]))


if __name__ == "__main__":
    main()
