"""The simulated surroundings: seeds, time, crashes, the network, and state whose right bytes are known."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from simulated_world import world as world_module
from simulated_world.job import RankPorts, SimulatedJob
from simulated_world.lanes import FakeClock, FakeLane
from simulated_world.memory import Memory
from simulated_world.model import FakeModel, version_of
from simulated_world.network import Network
from simulated_world.rank import FakeCapturer, FakeRestorer, FakeTrainerState
from simulated_world.storage import FakeStore
from simulated_world.transport import FakeTransport
from simulated_world.world import Deadlock, Killed, World

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint, UsageError
from megatron.core.dist_checkpointing.moe.ports import Facts, PeerLost, SnapshotId
from megatron.core.dist_checkpointing.moe.types import OperatorId, OperatorKind, Part, expert, full_plan

OPERATORS = (OperatorId(0, OperatorKind.ROUTER), expert(0, 0), expert(0, 1))
SHARDS = {operator: 16 for operator in OPERATORS}
SEGMENTS = (4096,) * 4


def together(world: World, *works: Callable[[], object]) -> None:
    """Each as the main thread of its own rank, to their end."""
    for rank, work in enumerate(works):
        world.spawn(rank, "main", work)
    world.run()


def counting(seed: int, **named: Any) -> World:
    world = World(seed, **named)

    def count() -> None:
        for at in range(20):
            world.event(f"step {at}")

    together(world, count, count, count)
    return world


def transports(world: World, count: int = 2, **named: Any) -> tuple[Network, list[FakeTransport]]:
    network = Network(world, count, **named)
    return network, [FakeTransport(network, rank, "control", timeout_s=2.0) for rank in range(count)]


# Worlds


def test_the_same_seed_gives_the_same_trace() -> None:
    assert counting(4).trace == counting(4).trace


def test_other_seeds_give_other_interleavings() -> None:
    assert len({tuple(event.rank for event in counting(seed).trace) for seed in range(20)}) == 20


def test_only_one_thread_runs_at_a_time() -> None:
    world, inside = World(1), []

    def work() -> None:
        for _ in range(200):
            inside.append(threading.get_ident())
            assert len(inside) == 1
            inside.pop()
            world.event("next")

    together(world, *[work] * 4)
    assert len(world.trace) == 800


def test_time_jumps_when_all_wait_and_never_goes_back() -> None:
    world, seen = World(2, event_s=0.0), []

    def sleep(seconds: float) -> None:
        FakeClock(world).sleep(seconds)
        seen.append(world.now_s())

    together(world, lambda: sleep(3600.0), lambda: sleep(5.0), lambda: sleep(60.0))
    assert seen == [5.0, 60.0, 3600.0]


def test_a_wait_ends_with_its_condition_or_with_its_time() -> None:
    world, flag, found = World(3), [], []

    def set_later() -> None:
        world.sleep(1.0)
        flag.append(True)
        world.event("set")

    def wait() -> None:
        found.append(world.wait("waits in vain", lambda: bool(flag), timeout_s=0.5))
        found.append(world.wait("waits for the flag", lambda: bool(flag), timeout_s=5.0))

    together(world, set_later, wait)
    assert found == [False, True]
    assert world.now_s() < 2.0


def test_a_deadlock_says_what_each_thread_waits_for_and_the_seed() -> None:
    world = World(5)
    works = [lambda name=name: world.wait(f"waits for {name}", lambda: False) for name in ("godot", "rain")]
    with pytest.raises(Deadlock, match=r"rank 0, main: waits for godot; rank 1, main: waits for rain") as caught:
        together(world, *works)
    assert "repeat with seed 5" in caught.value.__notes__[0]


def test_a_run_without_end_is_ended() -> None:
    world = World(6, max_events=1000)

    def forever() -> None:
        while True:
            world.event("again")

    with pytest.raises(Deadlock, match="no end after 1000 events"):
        together(world, forever)


def test_a_thread_that_blocks_in_real_time_is_shown_with_its_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_module, "_STALLED_S", 0.05)
    world, lock = World(7), threading.Lock()

    def hold() -> None:
        with lock:
            world.event("holds a real lock")

    def want_a_lock() -> None:
        world.event("begins")
        lock.acquire()

    lock.acquire()
    with pytest.raises(Deadlock, match="want_a_lock"):
        together(world, want_a_lock)
    lock.release()


def test_an_error_of_a_thread_is_raised_with_the_seed_and_ends_all_others() -> None:
    world = World(8)

    def fail() -> None:
        world.event("fails soon")
        raise ValueError("as asked")

    with pytest.raises(ValueError, match="as asked") as caught:
        together(world, fail, lambda: world.wait("waits for ever", lambda: False))
    assert "seed 8" in caught.value.__notes__[0]
    assert "fails soon" in caught.value.__notes__[0]


def test_a_killed_rank_does_nothing_more_not_even_when_it_cleans_up() -> None:
    done: list[str] = []

    def act(world: World, text: str) -> None:
        world.event(text)
        done.append(text)

    def work(world: World) -> None:
        try:
            for at in range(5):
                act(world, f"{at}")
        finally:
            act(world, "clean up")

    for crash in range(1, 7):
        world = World(crash, crash={0: crash})
        done.clear()
        together(world, lambda world=world: work(world))
        assert done == ["0", "1", "2", "3", "4", "clean up"][: crash - 1]
        assert world.events_of(0) == crash


def test_all_threads_of_a_rank_end_with_it_and_other_ranks_continue() -> None:
    world, done = World(9, crash={0: 10}), {0: 0, 1: 0}

    def work(rank: int) -> None:
        for _ in range(50):
            world.event("next")
            done[rank] += 1

    for rank in (0, 0, 1):
        world.spawn(rank, "some", lambda rank=rank: work(rank))
    world.spawn(0, "waiting", lambda: world.wait("waits for ever", lambda: False))
    world.run()
    assert done == {0: 9, 1: 50}
    with pytest.raises(Deadlock, match="revive"):
        world.spawn(0, "too early", lambda: None)
    world.revive(0)
    together(world, lambda: work(0))
    assert done[0] == 59


# Lanes


def test_a_lane_works_in_order_beside_its_caller() -> None:
    world, order = World(10), []

    def work(at: int) -> int:
        world.event(f"works on {at}")
        order.append(at)
        return 10 * at

    def main() -> None:
        lane = FakeLane(world, 0, "keeper")
        tasks = [lane.submit(lambda at=at: work(at)) for at in range(5)]
        order.append(-1)
        assert [task.result() for task in tasks] == [0, 10, 20, 30, 40]
        assert all(task.done() for task in tasks)

    together(world, main)
    assert [at for at in order if at >= 0] == [0, 1, 2, 3, 4]
    assert order[-1] == 4


def test_errors_of_work_come_out_of_its_result_and_the_lane_continues() -> None:
    world = World(11)

    def main() -> None:
        lane = FakeLane(world, 0, "keeper")
        bad, good = lane.submit(lambda: 1 // 0), lane.submit(lambda: 7)
        with pytest.raises(ZeroDivisionError):
            bad.result()
        assert good.result() == 7

    together(world, main)


def test_a_result_times_out_in_virtual_time() -> None:
    world = World(12)

    def main() -> None:
        task = FakeLane(world, 0, "slow").submit(lambda: world.sleep(100.0))
        with pytest.raises(TimeoutError):
            task.result(timeout=1.0)
        assert 1.0 < world.now_s() < 2.0
        task.result()

    together(world, main)


def test_a_lane_that_was_shut_down_drops_or_ends_its_work() -> None:
    world, done = World(13), []

    def main() -> None:
        lane = FakeLane(world, 0, "keeper")
        first = lane.submit(lambda: (world.sleep(1.0), done.append(1)))
        world.sleep(0.5)
        second = lane.submit(lambda: done.append(2))
        lane.shutdown(wait=True, cancel_futures=True)
        assert (first.done(), second.done(), done) == (True, True, [1])
        with pytest.raises(RuntimeError, match="shut down"):
            lane.submit(lambda: None)

    together(world, main)


# Transports


def test_a_message_takes_the_time_of_its_bytes() -> None:
    world = World(1, event_s=0.0)
    _, (here, there) = transports(world, latency_s=0.25, bytes_per_s=1000.0)
    into = memoryview(bytearray(500))
    together(world, lambda: here.send(1, bytes(500)).wait(), lambda: there.receive(0, into).wait())
    assert world.now_s() == pytest.approx(0.75)


def test_a_buffer_that_changes_before_its_transfer_has_ended_arrives_changed() -> None:
    world, into = World(2), bytearray(4)
    _, (here, there) = transports(world)

    def send() -> None:
        data = bytearray(b"true")
        transfer = here.send(1, data)
        data[:] = b"lies"
        transfer.wait()

    together(world, send, lambda: there.receive(0, memoryview(into)).wait())
    assert into == b"lies"


def test_bits_are_flipped_in_flight_where_that_was_asked_for() -> None:
    world, into = World(3), [bytearray(64) for _ in range(200)]
    network, (here, there) = transports(world, flip_rate=0.2)

    def each(work: Callable[[bytearray], Any]) -> None:
        for one in into:
            work(one).wait()

    together(
        world,
        lambda: each(lambda one: here.send(1, bytes(64))),
        lambda: each(lambda one: there.receive(0, memoryview(one))),
    )
    wrong_bits = [int.from_bytes(one, "little").bit_count() for one in into]
    assert set(wrong_bits) == {0, 1}
    assert sum(wrong_bits) == network.flipped > 10


def test_a_peer_that_does_not_come_is_lost_after_the_timeout() -> None:
    world = World(4)
    _, (here, there) = transports(world)

    def alone() -> None:
        with pytest.raises(PeerLost, match=r"rank 0 failed to receive 3 bytes from rank 1: no answer after 2 s"):
            here.receive(1, memoryview(bytearray(3))).wait()
        assert 2.0 <= world.now_s() < 2.1
        with pytest.raises(PeerLost, match="before connections are renewed"):
            here.total([1])

    together(world, alone, lambda: world.sleep(10.0))
    assert there.rank == 1


@pytest.mark.parametrize("resets", [True, False])
def test_a_dead_peer_is_lost_at_once_or_when_it_is_silent_after_the_timeout(resets: bool) -> None:
    world = World(5, should_crash=lambda rank, event: event.text == "dies")
    _, (here, _) = transports(world, resets=resets)

    def die() -> None:
        world.sleep(0.5)
        world.event("dies")

    def wait() -> None:
        with pytest.raises(PeerLost, match="rank 1 is dead" if resets else r"no answer from ranks \[1\]"):
            here.least([1])

    together(world, wait, die)
    assert (world.now_s() < 1.0) == resets


def test_a_partition_loses_all_who_need_its_other_side_and_heals() -> None:
    world = World(6)
    network, ends = transports(world, 3)
    network.cut(0, 2)

    def work(end: FakeTransport) -> None:
        with pytest.raises(PeerLost):
            end.total([end.rank])
        if end.rank == 0:
            network.heal()
        world.sleep(3.0)
        end.renew()
        assert end.total([end.rank]) == (3,)

    together(world, *(lambda end=end: work(end) for end in ends))


def test_ranks_that_come_to_different_collectives_are_told() -> None:
    world = World(7)
    _, (here, there) = transports(world)
    with pytest.raises(UsageError, match="collective 0: rank"):
        together(world, lambda: here.least([1]), lambda: there.total([1]))


def test_what_json_cannot_say_is_not_gathered() -> None:
    world = World(7)
    _, (here, _) = transports(world)
    with pytest.raises(UsageError, match="no JSON"):
        here.gather(float("nan"))


def test_two_threads_in_one_transport_are_told() -> None:
    world = World(8)
    _, (here, _) = transports(world)
    world.spawn(0, "one", lambda: here.least([1]))
    world.spawn(0, "two", lambda: here.least([1]))
    with pytest.raises(UsageError, match=r"rank 0, transport control: (one|two) wants to .* while (one|two) uses it"):
        world.run()


def test_after_a_failure_all_ranks_connect_again_and_old_messages_are_void() -> None:
    world, into = World(10), bytearray(3)
    _, (here, there) = transports(world)

    def one() -> None:
        old = here.send(1, b"old")
        with pytest.raises(PeerLost):
            here.receive(1, memoryview(bytearray(1))).wait()
        here.renew()
        with pytest.raises(PeerLost):
            old.wait()
        here.send(1, b"new").wait()

    def other() -> None:
        world.sleep(3.0)
        with pytest.raises(PeerLost, match="rank 0 closed the connection"):
            there.total([1])
        there.renew()
        there.receive(0, memoryview(into)).wait()

    together(world, one, other)
    assert into == b"new"


def test_after_a_failure_no_buffer_is_referred_to_and_nothing_is_taken_for_received() -> None:
    world, into = World(12), bytearray(3)
    _, (here, there) = transports(world)
    sent, received = bytearray(b"one"), bytearray(3)

    def give_up() -> None:
        transfers = here.send(1, sent), here.receive(1, memoryview(received))
        world.sleep(1.0)
        here.close()
        sent.clear(), received.clear()  # raises BufferError while a view is left
        assert len(transfers) == 2

    def late() -> None:
        transfer = there.receive(0, memoryview(into))
        world.sleep(2.0)
        with pytest.raises(PeerLost, match="rank 0 gave up"):
            transfer.wait()

    together(world, give_up, late)


def test_a_renewal_to_which_not_all_come_names_who_is_missing() -> None:
    world = World(11)
    _, ends = transports(world, 3)

    def come(end: FakeTransport) -> None:
        with pytest.raises(PeerLost, match=r"missing are \[2\]"):
            end.renew()

    together(world, lambda: come(ends[0]), lambda: come(ends[1]))


def test_closing_after_a_collective_does_not_take_its_result_from_slower_ranks() -> None:
    for seed in range(20):
        world = World(seed)
        _, ends = transports(world, 3)
        together(world, *(lambda end=end: (end.total([1]), end.close()) for end in ends))


# Live state


def rank_of(world: World) -> tuple[FakeModel, FakeCapturer, FakeStore]:
    model = FakeModel(world, 0, SHARDS)
    return model, FakeCapturer(model, world), FakeStore(Memory(), 0, SEGMENTS, world=world)


def captured(world: World, seal_before_step: bool) -> dict[str, int | None]:
    """The iteration of every record of a snapshot of iteration 1, sealed before or after the next step began."""
    model, capturer, store = rank_of(world)
    found: dict[str, int | None] = {}

    def train() -> None:
        model.forward_backward()
        model.step()
        layout = capturer.layout(full_plan(1, OPERATORS), trainer=True)
        writer = store.reserve(SnapshotId(1, 0), layout)
        capturer.begin([(layout, writer)])
        model.forward_backward()
        if not seal_before_step:
            model.step()
        capturer.end(10.0)
        writer.seal(Facts("job"))
        if seal_before_step:
            model.step()
        with store.open(SnapshotId(1, 0)) as reader:
            found.update((one.key, version_of(0, one.key, reader.read(one.key))) for one in reader.manifest.records)

    together(world, train)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_a_copy_that_ends_before_the_next_step_is_of_one_iteration(seed: int) -> None:
    found = captured(World(seed), seal_before_step=True)
    assert set(found.values()) == {1}
    assert {key for key in found if "random/" in key} == {"random/cpu", "random/cuda"}


def test_a_copy_that_is_still_running_at_the_next_step_is_found_to_be_torn() -> None:
    torn = [seed for seed in range(20) if set(captured(World(seed), seal_before_step=False).values()) != {1}]
    assert len(torn) >= 5


def test_wrong_stale_and_mixed_bytes_are_told_apart() -> None:
    world = World(1)
    model = FakeModel(world, 0, SHARDS)
    for _ in range(3):
        model.forward_backward()
        model.step()
    assert (model.wrong(), model.iteration) == ({}, 3)
    keys = sorted(model.tensors)
    before = {key: bytes(model.live[key]) for key in keys}
    model.forward_backward()
    model.step()
    model.set(keys[0], before[keys[0]])
    model.set(keys[1], before[keys[1]][:9] + bytes(model.live[keys[1]][9:]))
    model.live[keys[2]][5] ^= 1
    assert model.wrong() == {keys[0]: 3, keys[1]: None, keys[2]: None}


def test_a_restored_rank_is_as_it_was_with_compute_weights_derived() -> None:
    world = World(2)
    model, trainer = FakeModel(world, 0, SHARDS), None
    for _ in range(4):
        model.forward_backward()
        model.step()
    kept = {key: bytes(data) for key, data in model.live.items()}
    again = FakeModel(world, 0, SHARDS)
    trainer, restorer = FakeTrainerState(again, world), FakeRestorer(again, world)
    restorer.poison()
    with pytest.raises(UnreadableCheckpoint, match="were not restored"):
        restorer.complete()
    restorer.restore(lambda key: memoryview(kept[key]), {Part.MASTER_AND_MOMENTS: OPERATORS})
    assert not restorer.missing()
    restorer.complete()
    states = {key: memoryview(kept[f"random/{key}"]) for key in trainer.tensors()}
    trainer.restore(model.scalars(), states)
    assert (again.wrong(), again.iteration) == ({}, 4)


def test_a_defect_of_the_code_under_test_is_raised_with_its_seed() -> None:
    world = World(77)

    def make(rank: int, ports: RankPorts) -> Callable[[], None]:
        def main() -> None:
            ports.transport("control")
            assert rank == 0, "a defect"

        return main

    with pytest.raises(AssertionError, match="a defect") as caught:
        SimulatedJob(world, 2, lambda rank: SHARDS, SEGMENTS).run(make)
    assert "seed 77" in caught.value.__notes__[0]


def test_what_ends_ranks_is_not_an_exception_that_code_catches_by_mistake() -> None:
    assert not issubclass(Killed, Exception)
