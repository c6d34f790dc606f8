"""Scenarios from public reports, each with real processes and signals; the number of the report is in the name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import ray
from helpers import Restartable, connected_cluster, wait_for_state, wait_until
from ray.cluster_utils import Cluster

import actorsub
from actorsub import ActorState

Maker = Callable[..., Restartable]


def test_a1_a_killed_replica_refuses_each_of_1000_calls(restartable: Maker) -> None:
    """ray-project/ray 13594: two replicas, one killed; it is used again by itself when it is back."""
    replicas = [restartable(on_unavailable="raise") for _ in range(2)]
    replicas[0].kill()
    refused = answered = 0
    refs = []
    for number in range(1000):
        for replica in replicas:
            try:
                refs.append(replica.handle.echo.remote(number))
            except actorsub.ActorUnavailableError as error:
                assert not error.sent
                refused += 1
            else:
                break
    answered = len(ray.get(refs, timeout=60))
    assert (refused, answered) == (1000, 1000)
    replicas[0].let_restart()
    wait_for_state(replicas[0].handle, ActorState.ALIVE)
    assert ray.get(replicas[0].handle.echo.remote("back"), timeout=30) == "back"


def test_c1_sys_exit_is_final_whatever_max_restarts_says(restartable: Maker) -> None:
    """ray-project/ray 62746."""
    one = restartable(on_unavailable="raise")
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(one.handle.leave.remote(), timeout=60)
    wait_for_state(one.handle, ActorState.DEAD)
    for _ in range(3):
        with pytest.raises(actorsub.ActorDiedError) as caught:
            one.handle.echo.remote()
        assert not caught.value.sent
        assert "exit" in str(caught.value)


def test_kill_without_no_restart_leaves_it_restartable(restartable: Maker) -> None:
    """`ray.kill(h, no_restart=False)` is a restart, not a death."""
    one = restartable(on_unavailable="raise")
    ray.kill(one.handle, no_restart=False)
    wait_for_state(one.handle, ActorState.RESTARTING)
    one.restart()
    assert ray.get(one.handle.echo.remote(1), timeout=30) == 1


@pytest.fixture
def two_nodes() -> Iterator[Cluster]:
    with connected_cluster(num_cpus=2, include_dashboard=False) as cluster:
        yield cluster


@pytest.mark.cluster
@pytest.mark.slow
def test_a2_an_actor_whose_node_is_gone(two_nodes: Cluster) -> None:
    """ray-project/ray 15045: refused for as long as the node is away, no thread parked, the same handle works again."""
    import threading

    node = two_nodes.add_node(num_cpus=1, resources={"special": 1})

    @actorsub.remote(max_restarts=-1, num_cpus=0, resources={"special": 1}, on_unavailable="raise")
    class Pinned:
        def ping(self) -> int:
            return 1

    handle = Pinned.remote()
    assert ray.get(handle.ping.remote(), timeout=60) == 1
    threads = threading.active_count()
    two_nodes.remove_node(node, allow_graceful=True)
    wait_for_state(handle, ActorState.RESTARTING, timeout_s=60)
    end = time.monotonic() + 3
    refused = 0
    while time.monotonic() < end:
        begin = time.perf_counter()
        with pytest.raises(actorsub.ActorUnavailableError):
            handle.ping.remote()
        refused += time.perf_counter() - begin < 1
    assert refused > 1000
    assert threading.active_count() <= threads
    two_nodes.add_node(num_cpus=1, resources={"special": 1})
    wait_for_state(handle, ActorState.ALIVE, timeout_s=60)
    assert ray.get(handle.ping.remote(), timeout=60) == 1


def test_d4_part_a_named_actor_made_anew(restartable: Maker) -> None:
    """openrag 841: the old handle says dead, a new look-up finds the new actor."""
    old = restartable(on_unavailable="raise", name="again", namespace="scenarios")
    ray.kill(old.handle)
    wait_for_state(old.handle, ActorState.DEAD)
    wait_until(lambda: "again" not in [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)])
    new = restartable(on_unavailable="raise", name="again", namespace="scenarios")
    with pytest.raises(actorsub.ActorDiedError):
        old.handle.echo.remote()
    found = actorsub.get_actor("again", "scenarios", on_unavailable="raise")
    assert found == new.handle
    assert ray.get(found.echo.remote(1), timeout=30) == 1
