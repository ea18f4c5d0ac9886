"""Messages between two ranks (fastpar.comm.PointToPoint), over shared memory and over gloo: what arrives, in which
order, whose memory it is, and what a rank gets when another one is late, gives up or dies.

Races are in tests/comm/test_transport_tsan.py.
"""

from __future__ import annotations

import gc
import os
import pickle
import queue
import random
import re
import signal
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fastpar.comm import (
    CommError,
    CommTimeoutError,
    PeerFailedError,
    PeerLostError,
    PointToPoint,
)
from fastpar.comm.message_format import DTYPE_NUMBERS
from fastpar.comm.multi_host.gloo_mailbox import GlooMailbox
from fastpar.comm.shared_memory import rendezvous
from fastpar.comm.shared_memory.mailbox import SharedMailbox
from fastpar.comm.torch.device_lanes import DeviceLanes
from tests.comm.fault_ranks import MESSAGES, FaultRanks
from tests.comm.test_comm_faults import KILLED_WITHIN_S, held
from tests.dist import run_ranks
from tests.timing import assert_within

BOTH = pytest.mark.parametrize("transport", ["shared_memory", "torch"])
MB = 1 << 20


def made(transport, timeout=20.0):
    return PointToPoint(dist.group.WORLD, timeout=timeout, transport=transport)


def same(actual, wanted):
    assert (actual.dtype, actual.shape) == (wanted.dtype, wanted.shape)
    assert actual.is_contiguous()
    assert not actual.requires_grad
    as_bytes = [x.contiguous().view(-1).view(torch.uint8) for x in (actual, wanted.detach())]
    assert torch.equal(*as_bytes)


# ---- what arrives


def messages():
    """Lists of tensors to send, and notes: the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 7, 11, generator=generator)
    yield [], b""
    yield [], b"only a note"
    yield [x], b"\0 note with \0 bytes" * 100
    yield [torch.empty(0), torch.empty(3, 0, 2, dtype=torch.int64), torch.tensor(2.5), torch.ones(1)], b""
    yield [x.transpose(0, 2), x[:, ::2], x[1:, 1:], torch.ones(1).expand(4, 5), x.mT], b""
    yield [x.requires_grad_(), torch.nn.Parameter(torch.ones(3)), (2 * x).detach()], b"grad"
    yield [torch.view_as_complex(torch.ones(4, 2)).conj(), torch.ones(3, dtype=torch.complex128).imag], b""
    yield [torch.full((numel,), float(numel)) for numel in range(100)], b""
    yield [torch.ones(1).view((1,) * 60)], b""
    for dtype in DTYPE_NUMBERS:
        yield [torch.randint(0, 2, (3, 5), generator=generator).to(dtype)], str(dtype).encode()


def check_arrives(transport):
    p2p = made(transport)
    assert isinstance(p2p._channel, SharedMailbox if transport == "shared_memory" else GlooMailbox)
    peers = [peer for peer in range(p2p.size) if peer != p2p.rank]
    for tensors, note in messages():
        for peer in peers:
            p2p.send(peer, 3, tensors, note)
        for peer in peers:
            received, its_note = p2p.recv(peer, 3)
            assert its_note == note
            assert len(received) == len(tensors)
            for actual, wanted in zip(received, tensors, strict=True):
                same(actual, wanted.resolve_conj().resolve_neg())
    p2p.close()


@BOTH
@pytest.mark.parametrize("world_size", [2, 4])
def test_tensors_of_every_shape_and_dtype_arrive_with_their_note(world_size, transport):
    run_ranks(world_size, check_arrives, transport)


def check_large(transport):
    p2p = made(transport)
    x = torch.arange(16 * MB, dtype=torch.int32)  # 64 MB
    if p2p.rank == 0:
        p2p.send(1, 0, [x, x[: MB + 1]])
        x.zero_()
    else:
        received, _ = p2p.recv(0, 0)
        assert torch.equal(received[0], x)
        assert torch.equal(received[1], x[: MB + 1])


@BOTH
def test_a_message_of_64_mb_arrives_whole(transport):
    run_ranks(2, check_large, transport)


def check_lanes(transport):
    """Tensors of float32 pass for such that lie on devices, and go by the group's backend."""
    with mock.patch("fastpar.comm.point_to_point._device_type", return_value="cpu"):
        p2p = made(transport)
    is_float = mock.patch.object(DeviceLanes, "is_on_device", lambda self, x: x.dtype == torch.float32)
    peers = [peer for peer in range(p2p.size) if peer != p2p.rank]
    with is_float:
        for number in range(20):
            for peer in peers:
                tensors = [torch.full((number, 3), float(number)), torch.tensor(number), torch.ones(2).expand(3, 2)]
                p2p.send(peer, number % 4, tensors[: number % 5], b"%d" % number)
    for tag in (3, 1, 0, 2):
        for peer in peers:
            for number in range(tag, 20, 4):
                received, note = p2p.recv(peer, tag)
                tensors = [torch.full((number, 3), float(number)), torch.tensor(number), torch.ones(2).expand(3, 2)]
                assert note == b"%d" % number
                for actual, wanted in zip(received, tensors[: number % 5], strict=True):
                    same(actual, wanted)
    dist.barrier()
    p2p.close()


@BOTH
@pytest.mark.parametrize("world_size", [2, 3])
def test_tensors_on_devices_go_by_the_groups_backend(world_size, transport):
    run_ranks(world_size, check_lanes, transport)


def check_lanes_between_ranks_with_other_groups(transport):
    """Rank 0 alone is in one group more, as a rank of a pipeline whose stages differ may be."""
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    check_lanes(transport)


def test_lanes_are_made_between_ranks_that_are_in_different_numbers_of_groups():
    run_ranks(2, check_lanes_between_ranks_with_other_groups, "shared_memory", timeout=60)


# ---- order


def check_order(transport):
    p2p = made(transport)
    peer = (p2p.rank + 1) % p2p.size
    source = (p2p.rank - 1) % p2p.size
    for number in range(30):
        p2p.send(peer, number % 3, [torch.tensor(number)], b"%d" % number)
    assert not p2p.ready(source, 3)
    while not p2p.ready(source, 2):
        time.sleep(0.001)
    for tag in (2, 0, 1):
        numbers = []
        for _ in range(10):
            (x,), note = p2p.recv(source, tag)
            assert note == b"%d" % x.item()
            numbers.append(x.item())
        assert numbers == list(range(tag, 30, 3))
        assert not p2p.ready(source, tag)
    p2p.send(peer, (1 << 62) - 1, [])
    assert p2p.recv(source, (1 << 62) - 1) == ([], b"")
    dist.barrier()


@BOTH
@pytest.mark.parametrize("world_size", [2, 4])
def test_messages_of_one_tag_come_in_order_and_tags_in_any(world_size, transport):
    run_ranks(world_size, check_order, transport)


def check_outstanding(transport):
    """How long rank 0 took to send what rank 1 does not even look at before that."""
    p2p = made(transport)
    started = time.monotonic()
    took = 0.0
    if p2p.rank == 0:
        buffer = torch.empty(1000)
        for number in range(1000):
            p2p.send(1, 0, [buffer.fill_(number)])
        p2p.send(1, 1, [])
        took = time.monotonic() - started
        dist.barrier()
    else:
        dist.barrier()
        p2p.recv(0, 1)
        for number in range(1000):
            (x,), _ = p2p.recv(0, 0)
            assert torch.equal(x, torch.full((1000,), float(number)))
    return took


@BOTH
def test_1000_sends_wait_for_nobody_and_keep_what_was_sent(transport):
    assert_within(1.0, lambda: max(run_ranks(2, check_outstanding, transport)))


def check_objects(transport):
    """Two objects of one group, and others of groups that overlap."""
    first, second = made(transport), made(transport)
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [1, 3])]
    mine = [
        PointToPoint(g, timeout=20.0, transport=transport) for g in groups if g is not dist.GroupMember.NON_GROUP_MEMBER
    ]
    peer = dist.get_rank() ^ 1
    first.send(peer, 0, [torch.tensor(1)])
    second.send(peer, 0, [torch.tensor(2)])
    for p2p in mine:
        p2p.send(1 - p2p.rank, 0, [torch.tensor(3)])
    for p2p in mine[::-1]:
        assert p2p.recv(1 - p2p.rank, 0)[0][0].item() == 3
    assert second.recv(peer, 0)[0][0].item() == 2
    assert first.recv(peer, 0)[0][0].item() == 1
    dist.barrier()


@BOTH
def test_messages_of_several_objects_do_not_mix(transport):
    run_ranks(4, check_objects, transport)


def check_threads(transport):
    """Every rank sends and receives on several threads at once."""
    p2p, problems = made(transport), []
    peer = 1 - p2p.rank

    def talk(tag):
        try:
            for number in range(100):
                p2p.send(peer, tag, [torch.full((tag * 100 + 1,), number)])
                (x,), _ = p2p.recv(peer, tag)
                assert torch.equal(x, torch.full((tag * 100 + 1,), number))
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=talk, args=(tag,)) for tag in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    dist.barrier()


@BOTH
def test_threads_share_an_object(transport):
    run_ranks(2, check_threads, transport)


def check_several_hosts():
    with mock.patch.object(rendezvous, "_host", return_value=f"host {dist.get_rank() // 2}"):
        p2p = PointToPoint(dist.group.WORLD)
        assert isinstance(p2p._channel, GlooMailbox)
        with pytest.raises(CommError, match="cannot share memory: the ranks are on several hosts"):
            made("shared_memory")
    p2p.send((p2p.rank + 1) % 3, 0, [torch.tensor(p2p.rank)])
    assert p2p.recv((p2p.rank - 1) % 3, 0)[0][0].item() == (p2p.rank - 1) % 3
    dist.barrier()
    p2p.close()


def test_ranks_of_several_hosts_talk_over_gloo():
    run_ranks(3, check_several_hosts)


# ---- whose memory it is


def check_backward(transport):
    """The shape of a pipeline of two stages: activations forth, gradients back, while autograd holds what came."""
    p2p = made(transport)
    torch.manual_seed(0)
    weights, data = torch.randn(2, 8, 8), torch.randn(4, 3, 8)
    weights.requires_grad_()
    sent = []
    if p2p.rank == 0:
        for number, x in enumerate(data):
            sent.append(x @ weights[0])
            p2p.send(1, number, [sent[-1]])
        for number in (3, 1, 0, 2):
            (grad,), _ = p2p.recv(1, number)
            sent[number].backward(grad)
        (wanted,) = torch.autograd.grad(((data @ weights[0]) @ weights[1]).pow(2).sum(), weights)
        torch.testing.assert_close(weights.grad[0], wanted[0], rtol=1e-5, atol=1e-4)  # another order of summation
    else:
        inputs, losses = [], []
        for number in range(4):
            (x,), _ = p2p.recv(0, number)
            inputs.append(x.requires_grad_())
            losses.append((inputs[-1] @ weights[1]).pow(2).sum())
        for number in (3, 1, 0, 2):
            losses[number].backward()
            p2p.send(0, number, [inputs[number].grad])
    dist.barrier()


@BOTH
def test_received_tensors_take_part_in_autograd(transport):
    run_ranks(2, check_backward, transport)


def check_reuse():
    """Tensors of random sizes that are held for random times, many of them: none changes while it is held, and no more
    memory is touched than was ever in use, by half."""
    p2p, draw = made("shared_memory"), random.Random(3)
    peer, kept, most = 1 - p2p.rank, [], 0
    for step in range(1000):
        numel = draw.choice([0, 1, 100, 1000, draw.randrange(200_000)])
        p2p.send(peer, 0, [torch.full((numel,), step, dtype=torch.int32)] * draw.randrange(1, 4), bytes(step % 300))
        tensors, note = p2p.recv(peer, 0)
        assert len(note) == step % 300
        kept += [(x, step) for x in tensors]
        draw.shuffle(kept)
        while len(kept) > 40 or (kept and draw.random() < 0.4):
            x, number = kept.pop()
            assert torch.equal(x, torch.full_like(x, number))
        most = max(most, p2p._channel.used_bytes())
    touched = p2p._channel.touched_bytes()
    assert most < touched < 1.5 * most
    kept.clear()
    del x, tensors
    dist.barrier()
    assert p2p._channel.used_bytes() < 4096  # the last letter of the lane
    for _ in range(1000):
        p2p.send(peer, 0, [torch.ones(100_000)], b"note")
        p2p.recv(peer, 0)
    assert p2p._channel.touched_bytes() == touched
    dist.barrier()


def test_memory_is_used_again_when_tensors_die_and_not_before():
    run_ranks(2, check_reuse)


def check_threads_free():
    """Tensors that die on other threads than the one that received them, while the sender sends on."""
    p2p, held_back = made("shared_memory"), queue.SimpleQueue()
    peer = 1 - p2p.rank

    def drop():
        while held_back.get() is not None:
            pass

    threads = [threading.Thread(target=drop) for _ in range(2)]
    for thread in threads:
        thread.start()
    for step in range(2000):
        p2p.send(peer, 0, [torch.full((500,), step)])
        (x,), _ = p2p.recv(peer, 0)
        assert int(x.sum()) == 500 * step
        held_back.put(x)
        del x
    for _ in threads:
        held_back.put(None)
    for thread in threads:
        thread.join()
    dist.barrier()
    assert p2p._channel.used_bytes() < 4096
    dist.barrier()


def test_tensors_may_die_on_any_thread():
    run_ranks(2, check_threads_free)


def check_outlives():
    p2p = made("shared_memory")
    if p2p.rank == 1:
        (first,), _ = p2p.recv(0, 0)
        with pytest.raises(PeerLostError, match=r"rank 0 .*closed its end"):
            p2p.recv(0, 2)
        (second,), note = p2p.recv(0, 1)  # sent before the end
        assert note == b"last"
        p2p.close()
        del p2p
        gc.collect()
        assert torch.equal(first, torch.arange(1000))
        second += 1  # and may be written
        assert torch.equal(second, torch.arange(1, 1001))
    else:
        p2p.send(1, 0, [torch.arange(1000)])
        p2p.send(1, 1, [torch.arange(1000)], b"last")
        p2p.close()
        with pytest.raises(RuntimeError, match="this end was closed"):
            p2p.send(1, 0, [])
        with pytest.raises(RuntimeError, match="this end was closed"):
            p2p.recv(1, 0)
        with pytest.raises(RuntimeError, match="this end was closed"):
            p2p.ready(1, 0)
        p2p.close()
        del p2p
        gc.collect()
    dist.barrier()


def test_messages_and_tensors_outlive_both_ends():
    run_ranks(2, check_outlives)


def check_fork():
    p2p = made("shared_memory")
    peer = 1 - p2p.rank
    p2p.send(peer, 0, [torch.full((1000,), 7.0)])
    (x,), _ = p2p.recv(peer, 0)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            del x
            try:
                p2p.send(peer, 0, [])
            except CommError as error:
                status = 0 if "forked" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    dist.barrier()
    p2p.send(peer, 0, [torch.zeros(1000)])  # would lie where x is, had the child given that back
    p2p.recv(peer, 0)
    assert torch.equal(x, torch.full((1000,), 7.0))
    dist.barrier()


def test_a_forked_child_gives_nothing_back_and_sends_nothing():
    run_ranks(2, check_fork)


def use_and_close(transport):
    p2p = made(transport)
    p2p.send(1 - p2p.rank, 0, [torch.ones(100_000)])
    (x,), _ = p2p.recv(1 - p2p.rank, 0)
    p2p.close()
    return x.sum().item()


def check_leaves_nothing(transport):
    found = []
    for _ in range(4):
        use_and_close(transport)
        gc.collect()
        dist.barrier()
        deadline = time.monotonic() + 5.0  # threads that have been joined may still be listed for a moment
        time.sleep(0.05)
        while found[1:] and held() != found[1] and time.monotonic() < deadline:
            time.sleep(0.05)
        found.append(held())
    return found


@BOTH
def test_an_object_that_is_closed_leaves_no_file_thread_or_mapping(transport):
    for found in run_ranks(2, check_leaves_nothing, transport):
        assert len(set(found[1:])) == 1, found


# ---- what goes wrong


def check_arguments(transport):
    p2p, x = made(transport), torch.ones(2)
    me, other = p2p.rank, 1 - p2p.rank
    for peer in (me, 2, -1):
        for call in (lambda p=peer: p2p.send(p, 0, [x]), lambda p=peer: p2p.recv(p, 0), lambda p=peer: p2p.ready(p, 0)):
            with pytest.raises(ValueError, match=rf"peer must be another rank .*0\.\.1.*got {peer} on rank {me}"):
                call()
    for tag in (-1, 1 << 62):
        with pytest.raises(ValueError, match=rf"tag must be in .*got {tag}"):
            p2p.send(other, tag, [x])
    with pytest.raises(ValueError, match="sparse"):
        p2p.send(other, 0, [x.to_sparse()])
    with pytest.raises(ValueError, match="float4_e2m1fn_x2"):
        p2p.send(other, 0, [torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)])
    with pytest.raises(ValueError, match="meta"):
        p2p.send(other, 0, [x.to("meta")])
    with pytest.raises(TypeError, match="sequence of Tensors, got float"):
        p2p.send(other, 0, [1.0])
    with pytest.raises(TypeError, match="tensors must be a sequence of Tensors, got Tensor"):
        p2p.send(other, 0, x)
    with pytest.raises(TypeError, match="note must be bytes, got str"):
        p2p.send(other, 0, [x], "note")
    with pytest.raises(ValueError, match="timeout must be positive"):
        PointToPoint(dist.group.WORLD, timeout=0)
    with pytest.raises(ValueError, match="transport must be one of auto, torch, shared_memory, got 'nccl'"):
        PointToPoint(dist.group.WORLD, transport="nccl")
    dist.barrier()
    assert not p2p.ready(other, 0)  # nothing of all that has left
    dist.barrier()


@BOTH
def test_wrong_arguments_are_errors_that_say_what_is_right(transport):
    run_ranks(2, check_arguments, transport)


def test_one_rank_has_no_peers():
    p2p = PointToPoint(None)
    assert (p2p.rank, p2p.size) == (0, 1)
    with pytest.raises(ValueError, match="there is no other rank"):
        p2p.send(1, 0, [])
    p2p.abort("nobody hears it")
    p2p.close()


def check_timeout(transport):
    p2p = made(transport)
    took = 0.0
    p2p.timeout = 0.3
    if p2p.rank == 0:
        p2p.send(1, 8, [])
        dist.barrier()
        p2p.send(1, 9, [torch.ones(3)])
    else:
        while not p2p.ready(0, 8):
            time.sleep(0.001)
        started = time.monotonic()
        with pytest.raises(CommTimeoutError, match=r"rank 1 waited 0.3 s for a message with tag 9 of rank 0;.* 8"):
            p2p.recv(0, 9)
        took = time.monotonic() - started
        assert took >= 0.3
        dist.barrier()
        assert p2p.recv(0, 9)[0][0].tolist() == [1.0] * 3
        assert p2p.recv(0, 8) == ([], b"")
    dist.barrier()
    return took


@BOTH
def test_a_late_message_is_named_and_can_still_be_received(transport):
    assert_within(0.6, lambda: max(run_ranks(2, check_timeout, transport)))


def check_abort(transport):
    """Rank 0 waits for rank 1, which gives up; rank 2 waits for rank 0; rank 3 waits for nobody until later. When."""
    p2p = made(transport)
    dist.barrier()
    gave_up_at = None
    if p2p.rank == 1:
        time.sleep(0.3)
        gave_up_at = time.monotonic()
        p2p.abort("the loss is not finite")
        p2p.abort("and once more")
        with pytest.raises(CommError, match="this rank has given up: the loss is not finite"):
            p2p.recv(0, 0)
        with pytest.raises(CommError, match="this rank has given up"):
            p2p.send(0, 0, [])
    if p2p.rank == 3:
        time.sleep(1.0)
    told_at = 0.0
    for _ in range(2) if p2p.rank != 1 else ():
        with pytest.raises(PeerFailedError, match="rank 1 gave up: the loss is not finite") as error:
            p2p.recv({0: 1, 2: 0, 3: 0}[p2p.rank], 0)
        assert (error.value.rank, error.value.reason) == (1, "the loss is not finite")
        told_at = told_at or time.monotonic()
    if p2p.rank == 3:
        with pytest.raises(PeerFailedError, match="rank 1 gave up"):
            p2p.send(1, 0, [])
    dist.barrier()
    return gave_up_at if p2p.rank == 1 else told_at


@BOTH
def test_the_reason_of_a_rank_that_gives_up_reaches_every_wait(transport):
    def seconds_to_tell() -> float:
        told = run_ranks(4, check_abort, transport)
        assert min(told[0], told[2]) > told[1]
        return max(told[0], told[2]) - told[1]

    assert_within(0.1, seconds_to_tell)


def test_a_failure_of_a_peer_can_be_pickled():
    error = pickle.loads(pickle.dumps(PeerFailedError(3, "out of memory")))
    assert (error.rank, error.reason, str(error)) == (3, "out of memory", "rank 3 gave up: out of memory")


class Interrupt(Exception):
    pass


def check_interrupt(transport):
    p2p = made(transport)

    def handler(*_):
        raise Interrupt

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    started = time.monotonic()
    try:
        with pytest.raises(Interrupt):
            p2p.recv(1 - p2p.rank, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    took = time.monotonic() - started
    dist.barrier()
    p2p.send(1 - p2p.rank, 0, [torch.ones(1)])  # nothing is broken
    assert p2p.recv(1 - p2p.rank, 0)[0][0].item() == 1.0
    dist.barrier()
    return took


@BOTH
def test_a_signal_ends_a_wait(transport):
    assert_within(0.8, lambda: max(run_ranks(2, check_interrupt, transport)))


def check_absent(transport):
    if dist.get_rank() == 2:
        return
    with pytest.raises(CommTimeoutError, match=r"rank\(s\) 2 of the group did not come"):
        made(transport, timeout=3.0)


@BOTH
def test_a_rank_that_does_not_come_is_named(transport):
    run_ranks(3, check_absent, transport)


@pytest.fixture(scope="module")
def fault_ranks():
    with FaultRanks() as made:
        yield made


@pytest.mark.parametrize("op", MESSAGES)
@pytest.mark.parametrize("fault", ["kill", "leave"])
def test_a_lost_rank_becomes_an_error_of_every_wait(fault_ranks, op, fault):
    outcomes = fault_ranks.run(4, op, fault=fault, victim=1, after=0.05)
    assert len(outcomes) == 3
    for outcome in outcomes:
        assert outcome.error == "PeerLostError", outcome
        assert outcome.seconds < KILLED_WITHIN_S, outcome
    # The first to notice names the victim; it ends, too, and others may notice that first.
    assert any(re.search(r"process of rank 1 .*(has ended|closed)", outcome.text) for outcome in outcomes), outcomes
