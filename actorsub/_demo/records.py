"""What one run measures, as it crosses the pipe from the child to the parent."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from actorsub._demo.schedule import Kill


@dataclass
class Attempt:
    """One call that met a worker that was away."""

    at_s: float
    waited_s: float
    refused: bool  # raised by `.remote()` itself; otherwise Ray told it through the awaited reference


@dataclass
class Request:
    """One request, counted from its scheduled arrival, so that a late start counts as latency."""

    at_s: float
    latency_s: float = math.nan
    answered: bool = False
    lost: list[Attempt] = field(default_factory=list)


@dataclass
class ModeRun:
    """What a child measured, as it crosses the pipe."""

    mode: str
    requests: list[Request]
    planned_kills: list[Kill]
    killed: list[Kill]
    errors: dict[str, int]
    versions: dict[str, str]

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ModeRun:
        requests = [Request(**{**item, "lost": [Attempt(**a) for a in item["lost"]]}) for item in data["requests"]]
        planned = [Kill(**item) for item in data["planned_kills"]]
        killed = [Kill(**item) for item in data["killed"]]
        return cls(data["mode"], requests, planned, killed, data["errors"], data["versions"])
