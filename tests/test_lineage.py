"""What Ray makes anew by lineage: a result that was lost with its node, and the actor that has to make it again.

The same on plain and on wrapped handles; a file of its own, because it needs nodes that come and go.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from helpers import GET_S, connected_cluster, get, wait_until
from ray.cluster_utils import Cluster

import actorsub

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

KINDS = ("plain", "created", "wrapped")
#: Larger than what travels inside of replies, so that it lies on the actor's node alone.
SIZE = 1_000_000


class Maker:
    def __init__(self, ledger: str) -> None:
        self._ledger = pathlib.Path(ledger)
        self._note("start")

    def make(self) -> bytes:
        self._note("make")
        return bytes(SIZE)

    def ping(self) -> str:
        return "pong"

    def _note(self, what: str) -> None:
        with self._ledger.open("a") as file:
            file.write(f"{what}\n")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with connected_cluster(num_cpus=1, include_dashboard=False) as cluster:
        yield cluster


def create(kind: str, ledger: pathlib.Path) -> Any:
    options = {"num_cpus": 0, "resources": {"there": 1}, "max_restarts": 1, "max_task_retries": 1}
    remote = actorsub.remote if kind == "created" else ray.remote
    actor = remote(**options)(Maker).remote(str(ledger))
    return actorsub.wrap(actor) if kind == "wrapped" else actor


def test_a_lost_result_is_made_anew(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    """Also by an actor that went out of scope: its death is not final as long as a result of its is wanted."""
    node = cluster.add_node(num_cpus=1, resources={"there": 100})
    kept, dropped = {}, {}
    for kind in KINDS:
        actor, gone = create(kind, tmp_path / f"{kind}-kept"), create(kind, tmp_path / f"{kind}-dropped")
        kept[kind] = actor, actor.make.remote()
        dropped[kind] = gone.make.remote()
    del actor, gone
    refs = [ref for _, ref in kept.values()] + list(dropped.values())
    assert len(ray.wait(refs, num_returns=len(refs), timeout=GET_S, fetch_local=False)[0]) == len(refs)
    wait_until(lambda: len(alive()) == len(KINDS), GET_S, "the dropped actors have ended")
    cluster.remove_node(node)
    cluster.add_node(num_cpus=1, resources={"there": 100})

    def outcome(kind: str) -> Any:
        actor, ref = kept[kind]
        return {
            "kept": (len(get(ref)), get(actor.ping.remote())),
            "dropped": len(get(dropped[kind])),
            "ledgers": [(tmp_path / f"{kind}-{which}").read_text().split() for which in ("kept", "dropped")],
        }

    outcomes = {kind: outcome(kind) for kind in KINDS}
    assert outcomes["plain"] == {
        "kept": (SIZE, "pong"),
        "dropped": SIZE,
        "ledgers": [["start", "make", "start", "make"]] * 2,
    }
    assert outcomes["created"] == outcomes["wrapped"] == outcomes["plain"]


def alive() -> list[Any]:
    from ray._private.state import actors

    return [one for one in actors().values() if one["State"] == "ALIVE"]
