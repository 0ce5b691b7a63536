"""Continuity of frames: gaps, duplicates, restarts, with replay and without."""

import hashlib
import random

import pytest

from evenhand.worker import continuity
from evenhand.worker.continuity import (
    REPLAY_TRIES_MAX,
    Action,
    AskReplay,
    BeginLife,
    Continuity,
    Deliver,
    FramePosition,
)


def payload(seq: int, life: int = 0) -> bytes:
    return f"{life}:{seq}".encode()


def position(seq: int, life: int = 0) -> FramePosition:
    return FramePosition(seq, hashlib.sha256(payload(seq, life)).digest())


def short(actions: list[Action]) -> list[object]:
    """Actions as numbers delivered, "life", or ("replay", first)."""
    told: list[object] = []
    for action in actions:
        match action:
            case Deliver():
                told.append(action.seq)
            case BeginLife():
                told.append("life")
            case AskReplay():
                told.append(("replay", action.from_seq))
    return told


def settled(subject: Continuity) -> bool:
    return subject.settled


def following(last: int, replays: bool = True, life: int = 0) -> Continuity:
    """Settled, with frames 0 to ``last`` read."""
    subject = Continuity(replays)
    subject.start()
    subject.replay_ended()
    for seq in range(last + 1):
        assert short(subject.frame(seq, payload(seq, life))) == [seq]
    assert settled(subject)
    return subject


def test_frames_in_order_are_delivered() -> None:
    following(20)
    following(20, replays=False)


def test_the_first_number_above_zero_is_a_gap() -> None:
    subject = Continuity(replays=True)
    assert short(subject.start()) == [("replay", 0)]
    subject.replay_ended()
    assert short(subject.frame(7, payload(7))) == [("replay", 0)]
    assert not settled(subject)
    assert [short(subject.replayed(seq, payload(seq))) for seq in range(8)] == [[seq] for seq in range(8)]
    assert short(subject.replay_ended()) == []
    assert settled(subject)
    assert subject.counters.gaps == 1
    without = Continuity(replays=False)
    assert short(without.frame(7, payload(7))) == [7]
    assert without.counters.gaps_unrecovered == 1


def test_a_gap_is_closed_by_a_replay_from_the_last_frame_inclusive() -> None:
    subject = following(3)
    assert short(subject.frame(6, payload(6))) == [("replay", 3)]
    assert short(subject.frame(7, payload(7))) == []
    assert [short(subject.replayed(seq, payload(seq))) for seq in (3, 4, 5, 6)] == [[], [4], [5], [6]]
    assert short(subject.replay_ended()) == [7]
    assert settled(subject)
    assert subject.counters.lives_begun == 0


def test_a_restart_that_counts_past_the_old_number_is_seen_by_the_digest() -> None:
    subject = following(3)
    assert short(subject.frame(6, payload(6, life=1))) == [("replay", 3)]
    assert short(subject.replayed(3, payload(3, life=1))) == ["life", ("replay", 0)]
    told = [short(subject.replayed(seq, payload(seq, life=1))) for seq in range(7)]
    assert told == [[seq] for seq in range(7)]
    assert short(subject.replay_ended()) == []
    assert settled(subject)


def test_numbers_that_begin_again_are_a_restart_at_once() -> None:
    subject = following(5)
    assert short(subject.frame(0, payload(0, life=1))) == ["life", 0]
    assert short(subject.frame(1, payload(1, life=1))) == [1]
    assert short(subject.frame(0, payload(0, life=2))) == ["life", 0]
    subject = following(5)
    assert short(subject.frame(2, payload(2, life=1))) == ["life", ("replay", 0)]
    assert [short(subject.replayed(seq, payload(seq, life=1))) for seq in range(3)] == [[0], [1], [2]]
    assert short(subject.replay_ended()) == []


def test_a_repeated_frame_is_a_duplicate() -> None:
    subject = following(5)
    assert short(subject.frame(5, payload(5))) == []
    assert short(subject.frame(2, payload(2))) == []
    assert subject.counters.duplicates == 2
    assert short(subject.frame(6, payload(6))) == [6]


def test_a_reconnect_asks_and_an_engine_that_forgot_the_frame_begins_a_life() -> None:
    subject = following(5)
    assert short(subject.connected()) == [("replay", 5)]
    assert short(subject.connected()) == [("replay", 5)], "the one under way may come from before"
    assert short(subject.replay_ended()) == ["life", ("replay", 0)]
    assert short(subject.replay_ended()) == []
    assert settled(subject)
    assert short(subject.frame(0, payload(0, life=1))) == [0]


def test_a_checkpoint_of_the_same_life_goes_on() -> None:
    subject = Continuity(True, position(9), 1000)
    assert not settled(subject)
    assert short(subject.start()) == [("replay", 9)]
    assert short(subject.process_started(1000)) == []
    assert short(subject.replayed(9, payload(9))) == []
    assert short(subject.replayed(10, payload(10))) == [10]
    assert short(subject.replay_ended()) == []
    assert settled(subject)
    assert subject.counters.lives_begun == 0


@pytest.mark.parametrize("first", [9, 10, 12])
def test_a_checkpoint_that_the_engine_does_not_confirm_begins_a_life(first: int) -> None:
    subject = Continuity(True, position(9))
    subject.start()
    assert short(subject.replayed(first, payload(first, life=1))) == ["life", ("replay", 0)]


def test_another_process_start_time_begins_a_life_and_the_same_does_not() -> None:
    subject = following(5)
    assert short(subject.process_started(1000)) == []
    assert short(subject.process_started(1000)) == []
    assert short(subject.process_started(2000)) == ["life", ("replay", 0)]
    assert short(subject.replay_ended()) == []
    assert short(subject.frame(0, payload(0, life=1))) == [0]
    assert short(subject.process_started(2000)) == []
    assert short(subject.frame(0, payload(0, life=2))) == ["life", 0]
    assert short(subject.process_started(3000)) == [], "the restart was seen already"
    assert subject.counters.lives_begun == 2


def test_without_replay_a_gap_begins_a_life() -> None:
    subject = following(3, replays=False)
    assert short(subject.frame(6, payload(6))) == ["life", 6]
    assert short(subject.frame(7, payload(7))) == [7]
    assert subject.counters.gaps_unrecovered == 1


def test_without_replay_a_checkpoint_needs_the_same_process_and_the_next_number() -> None:
    same = Continuity(False, position(9), 1000)
    same.process_started(1000)
    assert short(same.frame(10, payload(10))) == [10]
    assert same.settled
    later = Continuity(False, position(9), 1000)
    later.process_started(1000)
    assert short(later.frame(11, payload(11))) == ["life", 11]
    unknown = Continuity(False, position(9))
    assert short(unknown.frame(10, payload(10))) == ["life", 10]
    other = Continuity(False, position(9), 1000)
    assert short(other.process_started(2000)) == ["life"]
    assert other.settled


def test_an_unanswered_replay_is_asked_again_and_given_up_only_when_frames_wait() -> None:
    subject = following(3)
    assert short(subject.connected()) == [("replay", 3)]
    for _ in range(3 * REPLAY_TRIES_MAX):
        assert short(subject.replay_failed()) == [("replay", 3)]
    assert short(subject.frame(4, payload(4))) == []
    assert short(subject.replay_failed()) == ["life", 4]
    assert short(subject.frame(5, payload(5))) == [5]
    assert short(subject.frame(9, payload(9))) == [("replay", 5)], "the engine may answer again"


def test_a_gap_that_replay_cannot_close_is_given_up_after_some_tries() -> None:
    subject = following(3)
    told = short(subject.frame(9, payload(9)))
    for _ in range(10 * REPLAY_TRIES_MAX):
        if told != [("replay", 3)]:
            break
        subject.replayed(3, payload(3))
        told = short(subject.replay_ended())
    assert told == ["life", 9]
    assert settled(subject)


def test_a_hole_within_a_replay_begins_a_life() -> None:
    subject = following(3)
    subject.frame(9, payload(9))
    assert short(subject.replayed(3, payload(3))) == []
    assert short(subject.replayed(6, payload(6))) == ["life", ("replay", 0)]
    assert short(subject.replayed(5, payload(5))) == [5], "the oldest the engine still has"
    assert subject.counters.gaps_unrecovered == 1


def test_frames_held_back_are_bounded_and_the_rest_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuity, "HELD_FRAMES_MAX", 3)
    subject = following(3)
    for seq in range(5, 10):
        subject.frame(seq, payload(seq))
    subject.replayed(3, payload(3))
    subject.replayed(4, payload(4))
    assert short(subject.replay_ended()) == [("replay", 4)]
    assert subject.counters.held_overflowed == 1
    assert short(subject.replayed(4, payload(4))) == []
    told = [short(subject.replayed(seq, payload(seq))) for seq in range(5, 10)]
    assert told == [[seq] for seq in range(5, 10)]
    assert short(subject.replay_ended()) == []
    assert settled(subject)


@pytest.mark.parametrize("seed", range(30))
def test_frames_of_a_life_arrive_in_order_without_a_hole(seed: int) -> None:
    """An engine that restarts and loses frames on the wire, and a replay that answers late or not at all."""
    rng = random.Random(seed)
    life, history = 0, list[bytes]()
    subject = Continuity(replays=True)
    delivered: list[bytes] = []
    asked: list[int] = []
    """Where the replay that is asked for begins, if one is."""

    def obey(actions: list[Action]) -> None:
        nonlocal delivered
        for action in actions:
            match action:
                case Deliver():
                    delivered.append(action.payload)
                case BeginLife():
                    delivered = []
                case AskReplay():
                    asked[:] = [action.from_seq]

    def check() -> None:
        lives = [int(frame.split(b":")[0]) for frame in delivered]
        assert len(set(lives)) <= 1, "frames of two lives in one"
        if delivered:
            first = int(delivered[0].split(b":")[1])
            assert delivered == [payload(first + index, lives[0]) for index in range(len(delivered))]

    obey(subject.start())
    for _ in range(400):
        chance = rng.random()
        if chance < 0.02:
            life, history = life + 1, []
            # A process that restarts binds its sockets anew; its metrics are polled now and then.
            obey(subject.connected())
        elif chance < 0.06:
            obey(subject.process_started(1_000 + life))
        elif chance < 0.75:
            history.append(payload(len(history), life))
            if rng.random() < 0.9:
                obey(subject.frame(len(history) - 1, history[-1]))
        elif asked:
            start = asked.pop()
            if rng.random() < 0.2:
                obey(subject.replay_failed())
            else:
                for seq in range(start, len(history)):
                    obey(subject.replayed(seq, history[seq]))
                    if asked:
                        break
                else:
                    obey(subject.replay_ended())
        check()
    for _ in range(5 * REPLAY_TRIES_MAX):
        history.append(payload(len(history), life))
        obey(subject.frame(len(history) - 1, history[-1]))
        while asked:
            start = asked.pop()
            for seq in range(start, len(history)):
                obey(subject.replayed(seq, history[seq]))
                if asked:
                    break
            else:
                obey(subject.replay_ended())
    check()
    gave_up = subject.counters.gaps_unrecovered > 0 or subject.counters.replays_unanswered >= REPLAY_TRIES_MAX
    assert delivered == history[-len(delivered) if gave_up else 0 :], "all of the last life is there"
