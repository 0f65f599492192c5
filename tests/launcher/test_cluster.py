"""Which launcher of clusters is in charge, and what it says, from the environment alone."""

from __future__ import annotations

import pytest

from unisono.launcher.cluster import ClusterFacts, check_cluster_tp, detect_cluster
from unisono.models.config import ConfigError

PLAIN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node-a", "MASTER_PORT": "29500"}
TORCHRUN = PLAIN | {
    "TORCHELASTIC_RUN_ID": "none",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
}
SRUN = PLAIN | {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1,3"}


def test_torchrun_on_one_host():
    facts = detect_cluster(TORCHRUN)
    assert facts == ClusterFacts(
        launcher="torchrun",
        rank=1,
        world_size=4,
        local_rank=1,
        local_world_size=4,
        master_addr="node-a",
        master_port=29500,
    )
    assert facts.single_host


def test_torchrun_on_two_hosts():
    facts = detect_cluster(TORCHRUN | {"RANK": "3", "LOCAL_WORLD_SIZE": "2"})
    assert (facts.rank, facts.local_rank, facts.single_host) == (3, 1, False)


@pytest.mark.parametrize(
    ("node", "tasks", "local_world_size"),
    [("0", "1,3", 1), ("1", "1,3", 3), ("0", "4", 4), ("1", "2(x2)", 2), ("2", "1(x2),2", 2)],
)
def test_srun_counts_the_tasks_of_this_node(node, tasks, local_world_size):
    facts = detect_cluster(
        SRUN | {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node, "SLURM_LOCALID": "0"}
    )
    assert (facts.launcher, facts.local_world_size) == ("srun", local_world_size)
    assert facts.single_host == (local_world_size == 4)


def test_torchrun_inside_a_slurm_job_is_torchrun():
    facts = detect_cluster(SRUN | TORCHRUN)
    assert (facts.launcher, facts.local_rank, facts.local_world_size) == ("torchrun", 1, 4)


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "::1"])
def test_a_loopback_master_means_one_host(address):
    facts = detect_cluster(PLAIN | {"MASTER_ADDR": address})
    assert (facts.launcher, facts.local_rank, facts.local_world_size) == ("environment", 1, 4)


@pytest.mark.parametrize("name", list(PLAIN))
@pytest.mark.parametrize("gone", ["unset", "empty"])
def test_no_cluster_unless_all_is_said(name, gone):
    environ = PLAIN | {"MASTER_ADDR": "localhost"}
    assert detect_cluster(environ) is not None
    environ[name] = ""
    if gone == "unset":
        del environ[name]
    assert detect_cluster(environ) is None


def test_our_own_children_see_no_cluster():
    assert detect_cluster(TORCHRUN | {"UNISONO_SESSION": "x"}) is None


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0: legal: 1 or more"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two': not a whole number; legal: 1 or more"),
        ({"RANK": "4"}, "RANK=4: legal: 0 to 3"),
        ({"RANK": "-1"}, "RANK='-1': not a whole number; legal: 0 to 3"),
        ({"RANK": "\u0663"}, "RANK='\u0663': not a whole number; legal: 0 to 3"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000: legal: 1 to 65535"),
        ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE=5: legal: 1 to 4"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4: legal: 0 to 3"),
        ({"LOCAL_WORLD_SIZE": ""}, "LOCAL_WORLD_SIZE is not set: .* 1 to 4"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK is not set: .* 0 to 3"),
    ],
)
def test_bad_values_are_named(change, fault):
    with pytest.raises(ConfigError, match=fault) as error:
        detect_cluster(TORCHRUN | change)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "x"}, "SLURM_STEP_TASKS_PER_NODE=x: wants counts"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, "WORLD_SIZE=4: srun started 6 tasks"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID=2: legal: 0 to 1"),
    ],
)
def test_bad_values_of_slurm_are_named(change, fault):
    with pytest.raises(ConfigError, match=fault.replace("(", r"\(").replace(")", r"\)")):
        detect_cluster(SRUN | {"SLURM_NODEID": "0"} | change)


def test_the_model_must_have_as_many_ranks_as_the_cluster():
    facts = detect_cluster(TORCHRUN)
    check_cluster_tp(4, facts)
    with pytest.raises(ConfigError, match=r"tp=2: torchrun started 4 ranks.*legal value is 4"):
        check_cluster_tp(2, facts)
