"""What handles and refs cost beside the time to submit: wrapping, and memory (the growth of the process, for each)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(180)


def test_cost(measure: Callable[..., dict[str, Any]], record: Callable[..., None]) -> None:
    measured = measure("cost")
    record("cost", "wrap a handle", measured["wrap_ns"], key="cost", bytes=measured["bytes"])
