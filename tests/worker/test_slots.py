"""Slots that several workers share: none is lost, none is used twice, and each worker gets one in turn."""

from __future__ import annotations

import random

import pytest

from pgoutbox.worker.slots import Share, Slots


class Member:
    """A worker with work that waits, and work that runs: it acts as a pool does."""

    def __init__(self, slots: Slots) -> None:
        self.ready = self.running = 0
        self.is_woken = False
        self.share = Share(slots, self.wake)

    def wake(self) -> None:
        if self.ready:
            self.is_woken = True
        else:
            self.share.leave()

    def begin(self) -> None:
        self.is_woken = False
        while self.ready and self.share.take():
            self.ready -= 1
            self.running += 1

    def end_one(self) -> None:
        if self.running:
            self.running -= 1
            self.share.give_back()
            self.begin()


class Process:
    """The workers of a process, whose acts come in any order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.slots = Slots(self.random.choice([1, 2, 3, 5, 8, 20]))
        self.members = [Member(self.slots) for _ in range(self.random.choice([1, 2, 3, 7]))]
        self.hung: list[Share] = []

    def act(self) -> None:
        """Let one worker do something."""
        number = self.random.randrange(len(self.members))
        member = self.members[number]
        match self.random.randrange(60):
            case 0:  # Its database is removed. Some handlers end after it, and some hang.
                hung_count = self.random.randint(0, member.running)
                member.share.close(kept_count=hung_count)
                self.hung += [member.share] * hung_count
                self.members[number] = Member(self.slots)
                member.ready = 0
                member.running -= hung_count
                while member.running:
                    member.end_one()
            case 11 | 12 if self.hung:
                self.hung.pop(self.random.randrange(len(self.hung))).return_kept()
            case 1 | 2 | 3 | 4 | 5:  # Its messages are released.
                member.ready = 0
            case 6 | 7 | 8 | 9 | 10:
                member.ready += self.random.choice([1, 2, 10])
                member.begin()
            case choice if choice < 20:
                self.begin_woken()
            case _:
                member.end_one()

    def begin_woken(self) -> None:
        """Let the workers begin that have been woken."""
        for member in self.members:
            if member.is_woken:
                member.begin()

    def check(self) -> None:
        """Fail if a slot is lost or used twice."""
        shares = [member.share for member in self.members]
        taken_count = sum(share.used_count + share.is_granted for share in shares) + len(self.hung)
        assert len(self.hung) == self.slots.lost_count
        assert taken_count == self.slots.used_count <= self.slots.count
        assert [share.used_count for share in shares] == [member.running for member in self.members]

    def finish(self) -> None:
        """End all work. Fail if a worker never gets a slot."""
        while self.hung:
            self.hung.pop().return_kept()
        while left := [member for member in self.members if member.ready or member.running]:
            before = sum(member.ready + member.running for member in left)
            for member in left:
                member.begin()
                member.end_one()
            assert sum(member.ready + member.running for member in left) < before


@pytest.mark.parametrize("seed", range(20))
def test_no_slot_is_lost_or_used_twice_and_none_waits_for_ever(seed: int) -> None:
    process = Process(seed)
    for _ in range(3000):
        process.act()
        process.check()
    process.finish()
    for member in process.members:
        member.share.leave()
    assert process.slots.used_count == 0
