"""The table of processes, as numbers and names; nothing is started."""

from __future__ import annotations

import pytest

import unisono
from tests.launcher.fake_processes import config
from unisono.launcher.cluster import ClusterFacts
from unisono.launcher.process_table import Wiring, process_name, process_table, threads_per_rank
from unisono.models.config import ConfigError
from unisono.runtime.config import RuntimeOrders
from unisono.workers.channel import CurveKeys
from unisono.workers.orders import WorkerOrders

WIRING = Wiring(
    session="s",
    private_dir="/p",
    flight_file="/f/x.flight",
    client_endpoint="ipc:///p/client",
    worker_endpoint="ipc:///p/worker",
    store_fd=9,
    store_port=4242,
)


def facts(**change: object) -> ClusterFacts:
    values = {
        "launcher": "torchrun",
        "rank": 0,
        "world_size": 2,
        "local_rank": 0,
        "local_world_size": 2,
        "master_addr": "node-a",
        "master_port": 29500,
    }
    return ClusterFacts(**(values | change))


def test_one_runtime_and_one_process_per_rank():
    specs = process_table(config(3), WIRING, {}, cores=8)
    assert [spec.name for spec in specs] == ["runtime", "rank 0", "rank 1", "rank 2"]
    assert [spec.entry for spec in specs] == ["unisono.runtime.entry:main"] + [
        "unisono.workers.entry:main"
    ] * 3
    assert [process_name(rank) for rank in (-1, 0, 2)] == ["runtime", "rank 0", "rank 2"]


def test_ranks_find_each_other_as_under_torchrun():
    _, first, second = process_table(config(2), WIRING, {}, cores=8)
    expected = {
        "UNISONO_SESSION": "s",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "4242",
        "OMP_NUM_THREADS": "4",
    }
    assert second.env == expected
    assert first.env == expected | {"RANK": "0", "LOCAL_RANK": "0", "UNISONO_STORE_FD": "9"}
    assert (first.pass_fds, second.pass_fds) == ((9,), ())


def test_orders_carry_the_config_and_the_wiring():
    launch = config(2, log_level="debug")
    runtime, _, second = process_table(launch, WIRING, {}, cores=8)
    assert runtime.orders == RuntimeOrders(
        config=launch.runtime,
        client_endpoint="ipc:///p/client",
        worker_endpoint="ipc:///p/worker",
        session="s",
        private_dir="/p",
        flight_file="/f/x.flight",
        version=unisono.__version__,
        log_level="debug",
    )
    assert second.orders == WorkerOrders(
        config=launch.runtime.worker,
        rank=1,
        endpoint="ipc:///p/worker",
        session="s",
        max_step_tokens=launch.runtime.max_step_tokens,
        log_level="debug",
        threads=4,
    )
    assert runtime.env == {"UNISONO_SESSION": "s"}


@pytest.mark.parametrize(
    ("environ", "cores", "ranks", "threads"),
    [
        ({}, 8, 2, 4),
        ({}, 8, 3, 2),
        ({}, 2, 3, 1),
        ({"OMP_NUM_THREADS": "6"}, 8, 2, 6),
        ({"OMP_NUM_THREADS": "0"}, 8, 2, 4),
        ({"OMP_NUM_THREADS": "many"}, 8, 2, 4),
        ({"OMP_NUM_THREADS": "²"}, 8, 2, 4),
        ({"OMP_NUM_THREADS": "1" * 4301}, 8, 2, 4),
    ],
)
def test_ranks_share_the_cores_unless_told_otherwise(environ, cores, ranks, threads):
    assert threads_per_rank(environ, cores, ranks) == threads


def test_under_a_cluster_launcher_only_rank_0_is_started():
    specs = process_table(config(2), WIRING, {}, cores=8, cluster=facts())
    assert [spec.name for spec in specs] == ["runtime", "rank 0"]
    env, orders = specs[1].env, specs[1].orders
    assert not {"MASTER_ADDR", "MASTER_PORT", "UNISONO_STORE_FD", "OMP_NUM_THREADS"} & env.keys()
    assert (env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == ("0", "2")
    assert orders.threads == 0


def test_between_hosts_only_the_runtime_holds_the_secret():
    keys = CurveKeys(public="public", secret="secret")
    wiring = Wiring(
        session="s",
        private_dir="/p",
        client_endpoint="ipc:///p/client",
        worker_endpoint="tcp://node-a:1234",
        worker_fd=5,
        curve=keys,
    )
    runtime, rank = process_table(config(2), wiring, {}, cores=8, cluster=facts(local_world_size=1))
    assert (runtime.pass_fds, rank.pass_fds) == ((5,), ())
    assert (runtime.orders.worker_fd, runtime.orders.curve) == (5, keys)
    assert (rank.orders.endpoint, rank.orders.curve) == (
        "tcp://node-a:1234",
        CurveKeys(public="public"),
    )


def test_another_rank_count_than_the_clusters_is_refused():
    with pytest.raises(ConfigError, match="tp=3: torchrun started 2 ranks"):
        process_table(config(3), WIRING, {}, cores=8, cluster=facts())
