"""Queues: order, putting back, and requests that end while they wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_harness import make_request

from jaxserve.request import Request, RequestStatus
from jaxserve.scheduler.queues import FCFSQueue, PriorityQueue, RequestQueue, make_queue


def request(name: int, priority: int = 0, arrival: float = 0.0) -> Request:
    made = make_request(str(name), [1])
    made.order = (priority, arrival, name)
    return made


def drain(queue: RequestQueue) -> list[str]:
    return [queue.pop().request_id for _ in range(len(queue))]


def end(queue: RequestQueue, ended: Request) -> None:
    ended.status = RequestStatus.FINISHED
    queue.discard()


def test_policies_choose_the_queue() -> None:
    assert isinstance(make_queue("fcfs"), FCFSQueue)
    assert isinstance(make_queue("priority"), PriorityQueue)


def test_fcfs_keeps_the_order_of_arrival() -> None:
    queue = FCFSQueue()
    for i, priority in enumerate([5, 1, 3]):
        queue.add(request(i, priority))
    assert drain(queue) == ["0", "1", "2"]


def test_priority_takes_low_values_then_early_arrivals_then_earlier_calls() -> None:
    queue = PriorityQueue()
    for i, (priority, arrival) in enumerate([(1, 0.0), (0, 2.0), (0, 1.0), (-3, 9.0), (0, 1.0)]):
        queue.add(request(i, priority, arrival))
    assert drain(queue) == ["3", "2", "4", "1", "0"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_put_back_restores_the_order(policy: str) -> None:
    queue = make_queue(policy)
    for i in range(4):
        queue.add(request(i))
    first, second = queue.pop(), queue.pop()
    queue.put_back(second)
    queue.put_back(first)
    assert drain(queue) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_ended_requests_are_skipped(policy: str) -> None:
    queue = make_queue(policy)
    requests = [request(i) for i in range(4)]
    for item in requests:
        queue.add(item)
    end(queue, requests[0])
    end(queue, requests[2])
    assert len(queue) == 2
    assert queue.peek() is requests[1]
    assert drain(queue) == ["1", "3"]
    assert not queue
    with pytest.raises(IndexError):
        queue.peek()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_many_ended_requests_do_not_pile_up(policy: str) -> None:
    queue = make_queue(policy)
    keep = request(0)
    queue.add(keep)
    for i in range(1, 5000):
        queue.add(item := request(i))
        end(queue, item)
    entries = queue._deque if isinstance(queue, FCFSQueue) else queue._heap
    assert len(entries) < 200
    assert queue.pop() is keep
    assert len(queue) == 0


@given(st.sampled_from(["fcfs", "priority"]), st.lists(st.integers(0, 5), max_size=300))
def test_against_a_sorted_list(policy: str, actions: list[int]) -> None:
    """0 and 1 add, 2 pops, 3 pops and puts back, 4 and 5 end one that waits."""
    queue = make_queue(policy)
    model: list[Request] = []
    for i, action in enumerate(actions):
        if action <= 1:
            item = request(i, priority=-i % 3 if policy == "priority" else 0)
            queue.add(item)
            model.append(item)
            model.sort(key=lambda r: r.order)
        elif model and action <= 3:
            assert queue.pop() is model[0]
            if action == 2:
                del model[0]
            else:
                queue.put_back(model[0])
        elif model:
            end(queue, model.pop(len(model) // 2))
        assert len(queue) == len(model)
        assert bool(queue) == bool(model)
    assert drain(queue) == [item.request_id for item in model]
