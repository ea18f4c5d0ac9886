"""fastpar on a CUDA device made of host memory: tests/rehearsal has the device, tests/rehearsed the tests.

Each file runs in a process of its own, a fork of one in which torch has met the device while it was imported.
"""

from __future__ import annotations

import importlib.util
import tempfile

import pytest

from tests.forks import Forks
from tests.markers import needs
from tests.rehearsal.build import environment

_FORKS = Forks(("torch._dynamo", "torch.distributed.tensor", "tests.rehearsal.device"), environment)


@needs("device")
def run_rehearsed(name: str) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        status = _FORKS.run(["-q", "-p", "no:cacheprovider", f"tests/rehearsed/{name}"], output.name)
        if status != 0:
            pytest.fail(f"{name} failed in the rehearsal:\n{output.read()[-24000:]}", pytrace=False)


def test_the_rehearsal_notices_waits_copies_and_work_on_the_host() -> None:
    run_rehearsed("check_watch.py")


def test_every_public_op_runs_on_cuda_tensors_and_makes_the_host_wait_nowhere_unlisted() -> None:
    run_rehearsed("check_ops.py")


def test_torchs_attention_kernels_serve_what_they_have_by_stand_ins() -> None:
    run_rehearsed("check_torch_attention.py")


def test_launches_leave_room_for_each_other_and_captures_have_tables_of_their_own() -> None:
    run_rehearsed("check_launches.py")


def test_symmetric_memory_has_the_right_addresses_and_ends_with_its_buffer() -> None:
    run_rehearsed("check_symmetric.py")


def test_layers_zero_pipelines_and_experts_train_over_a_group_with_a_cuda_backend_only() -> None:
    run_rehearsed("check_ranks.py")


def test_offloaded_states_and_parameters_serve_a_model_on_a_device() -> None:
    run_rehearsed("check_offload.py")


def test_a_calibrated_group_takes_symmetric_memory_where_it_is_faster() -> None:
    run_rehearsed("check_calibration.py")
