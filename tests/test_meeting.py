"""Processes that wait for each other: none waits for one that has ended, or that does something else.

A store in memory stands for that of several processes; `test_parallel` has real ones.
"""

import pytest
import torch.distributed as dist

from dissensus.execution import meeting
from dissensus.train import RankFailed

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")
FIT, SAVE = "`fit` of 5 members", "`save` of 5 members"


@pytest.fixture
def block():
    return meeting.Meeting(dist.HashStore(), "block")  # pyright: ignore[reportPrivateImportUsage]


def test_all_are_in_the_same_call(block):
    for rank in (1, 2):
        block.store.set(f"block/{rank}", FIT)
    meeting._await(block, FIT, 0, 3)


def test_other_calls_are_told(block):
    block.store.set("block/0", FIT)
    block.store.set("block/1", FIT)
    with pytest.raises(RuntimeError, match="got `fit` of 5 members on rank 0, and `save` of 5 members on rank 2"):
        meeting._await(block, SAVE, 2, 3)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", r"rank 1 has ended\. Call it in every process, not in one alone\."),
        (" with ValueError: no data", r"rank 1 has ended with ValueError: no data\.$"),
    ],
)
def test_one_that_has_ended_is_not_waited_for(words, told, block, monkeypatch):
    monkeypatch.setattr(meeting, "_places", [(1, block.store)])
    monkeypatch.setattr(meeting.sys, "last_value", ValueError("no data") if words else None, raising=False)
    meeting._leave(meeting.os.getpid())
    with pytest.raises(RankFailed, match=told):
        meeting._await(block, FIT, 0, 2)


def test_a_copy_of_a_process_does_not_tell_of_its_end(block, monkeypatch):
    monkeypatch.setattr(meeting, "_places", [(1, block.store)])
    meeting._leave(meeting.os.getpid() + 1)
    assert not block.store.check([f"{meeting._ended()}/1"])


def test_one_that_has_ended_after_it_came_is_no_failure(block, monkeypatch):
    block.store.set("block/1", FIT)
    monkeypatch.setattr(meeting, "_places", [(1, block.store)])
    meeting._leave(meeting.os.getpid())
    meeting._await(block, FIT, 0, 2)


def test_the_wait_has_an_end(block, monkeypatch):
    monkeypatch.setattr(meeting, "TIMEOUT", 0 * meeting.TIMEOUT)
    with pytest.raises(RankFailed, match="rank 1 did not call it in 0:00:00"):
        meeting._await(block, FIT, 0, 2)


def test_a_store_that_is_gone_is_told():
    class Gone:
        def set(self, key, value):
            raise RuntimeError("Broken pipe")

    with pytest.raises(RankFailed, match="the one that knows of all has ended"):
        meeting._await(meeting.Meeting(Gone(), "block"), FIT, 0, 2)


def test_the_words_of_the_first_failure_stay(block):
    assert not block.told()
    block.tell("rank 1: ValueError: no more paper")
    block.tell("rank 0: RuntimeError: a connection was closed")
    assert block.told() == "rank 1: ValueError: no more paper"


def test_what_each_process_does_alone_is_told_once(caplog, monkeypatch):
    meeting.tell_of_copies.cache_clear()
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "here", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        meeting.tell_of_copies("a sweep")
    assert caplog.text.count("a sweep runs whole in each of 4 processes") == 1
    meeting.tell_of_copies.cache_clear()
    monkeypatch.setenv("RANK", "1")
    meeting.tell_of_copies("a sweep")
    assert len(caplog.records) == 1
    meeting.tell_of_copies.cache_clear()
