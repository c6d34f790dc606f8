"""What the tests share: a real local Ray, and actors that can be killed (helpers.py)."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

# Ray reads these when it starts: no usage report, no token file in the home directory, no hint about accelerators.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# Worker processes import the actor classes of helpers.py by name.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(pathlib.Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
)

import ray
from helpers import RAY_ARGS, Restartable, Worker, ensure_ray, wait_for_state, wait_until

# Its assertions say what they compared, as those of a test module do.
pytest.register_assert_rewrite("equivalence")

__all__ = ["RAY_ARGS", "Restartable", "Worker", "wait_for_state", "wait_until"]


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """At once, too: a test that hangs later ends the process, and pytest tells about failures at its end."""
    if report.failed:
        print(f"\n{report.nodeid} ({report.when}) failed:\n{report.longreprtext}", file=sys.__stderr__, flush=True)


@pytest.fixture
def ray_local() -> None:
    """A local Ray, shared by the tests that only need one; started anew after a test that shut it down."""
    ensure_ray()


@pytest.fixture(scope="module")
def ray_of_module() -> None:
    """The same for fixtures of a module, and for modules all of whose tests need it."""
    ensure_ray()


@pytest.fixture(scope="session", autouse=True)
def _ray_shut_down_at_the_end() -> Iterator[None]:
    yield
    ray.shutdown()


@pytest.fixture
def restartable(ray_local: None, tmp_path: pathlib.Path) -> Iterator[Callable[..., Restartable]]:
    """Makes Restartables, and ends their actors after the test."""
    made: list[Restartable] = []

    def make(restart_s: float | None = None, **options: Any) -> Restartable:
        directory = tmp_path / str(len(made))
        directory.mkdir()
        made.append(Restartable(directory, restart_s, **options))
        return made[-1]

    yield make
    for one in made:
        one.let_restart()
        ray.kill(one.handle)
