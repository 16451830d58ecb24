import pytest
from disk_helpers import PAGE

from kvkeep.policies import LRU
from kvkeep.testing.tiers import key_of
from kvkeep.tiers.disk_index import DiskIndex, Entry, NoClaim, room_of
from kvkeep.tiers.disk_layout import Found

A, B, C, D = (key_of(number) for number in range(4))


@pytest.fixture
def index():
    """Keeps A and B, of two pages each; there is room for one more page."""
    index = DiskIndex(5 * PAGE, LRU())
    for key in (A, B):
        index.claim(key, 2 * PAGE)
        index.publish(key, entry(2 * PAGE))
    yield index
    index.check_integrity()


def entry(nbytes=PAGE):
    return Entry(nbytes, 0, 0.0)


def test_room_is_whole_blocks():
    assert [room_of(nbytes) for nbytes in (0, 1, PAGE, PAGE + 1)] == [0, PAGE, PAGE, 2 * PAGE]


def test_room_of_a_victim_is_given_out_once_it_is_removed(index):
    leaving = index.claim(C, 2 * PAGE)
    assert [key for key, _ in leaving.files] == [A]
    assert index.used_bytes == 4 * PAGE  # 2 of B, 2 claimed, in the place of A
    leaving = index.claim(D, 2 * PAGE)
    assert [key for key, _ in leaving.files] == [B]
    index.abandon(C)
    index.abandon(D)


def test_what_a_victim_leaves_over_is_held_until_it_is_removed(index):
    index.claim(D, PAGE)
    leaving = index.claim(C, PAGE)
    assert [key for key, _ in leaving.files] == [A]
    assert leaving.hold_bytes == PAGE
    assert index.used_bytes == 5 * PAGE
    index.settle(leaving)
    assert index.used_bytes == 4 * PAGE


def test_what_is_withdrawn_takes_room_until_it_is_removed(index):
    leaving = index.withdraw([A, A, C])
    assert index.contains([A, B]) == [False, True]
    assert index.used_bytes == 4 * PAGE
    index.check_integrity()
    index.settle(leaving)
    assert index.used_bytes == 2 * PAGE


def test_what_could_not_be_removed_is_kept(index):
    leaving = index.withdraw([A, B])
    index.settle(leaving, leaving.files[:1])
    assert index.contains([A, B]) == [True, False]
    assert index.used_bytes == 2 * PAGE


def test_a_key_has_one_writer(index):
    assert index.claim(A, 2 * PAGE) is NoClaim.KEPT
    index.claim(C, PAGE)
    assert index.claim(C, PAGE) is NoClaim.BUSY
    index.publish(C, entry())
    leaving = index.withdraw([C])
    assert index.claim(C, PAGE) is NoClaim.BUSY
    index.settle(leaving)


def test_a_refusal_evicts_nothing(index):
    index.claim(C, PAGE)
    for nbytes in (0, 5 * PAGE, 6 * PAGE):
        assert index.claim(D, nbytes) is NoClaim.REFUSED
    assert index.contains([A, B]) == [True, True]
    assert index.refused == 3


def test_another_length_replaces(index):
    leaving = index.claim(A, 3 * PAGE)
    assert [key for key, _ in leaving.files] == [A]
    index.settle(leaving)
    index.publish(A, entry(3 * PAGE))
    assert index.used_bytes == 5 * PAGE
    assert index.evicted == 0


def test_only_the_entry_that_was_seen_is_withdrawn(index):
    (old,) = index.use([A])
    index.settle(index.withdraw([A]))
    index.claim(A, 2 * PAGE)
    index.publish(A, entry(2 * PAGE))
    assert index.withdraw_entry(A, old).files == []
    assert index.contains([A]) == [True]


def test_a_survey_adds_what_is_new_and_drops_what_is_gone(index):
    index.begin_survey()
    index.end_survey([Found(C, 1, PAGE, 0)], [B])
    assert index.contains([A, B, C]) == [False, True, True]
    assert index.used_bytes == 3 * PAGE


def test_a_survey_that_failed_changes_nothing(index):
    index.begin_survey()
    index.end_survey([], None)
    assert index.contains([A, B]) == [True, True]


def test_what_changed_during_a_survey_is_known_better(index):
    index.claim(C, PAGE)
    leaving = index.withdraw([A])
    index.begin_survey()
    index.settle(leaving)  # the survey saw its file before
    index.publish(C, entry())  # and came by before this one was there
    index.end_survey([Found(A, 0, 2 * PAGE, 0)], [B])
    assert index.contains([A, B, C]) == [False, True, True]
    index.begin_survey()
    index.settle(index.withdraw([C]))
    index.claim(D, PAGE)
    index.end_survey([Found(C, 0, PAGE, 0), Found(D, 0, PAGE, 0)], [B])
    index.publish(D, entry())
    assert index.contains([B, C, D]) == [True, False, True]


def test_room_can_be_made_in_one_directory(index):
    index.begin_survey()
    index.end_survey([Found(C, 1, PAGE, 0)], [A, B])
    leaving = index.evict(1, root=1)
    assert [key for key, _ in leaving.files] == [C]
    index.settle(leaving)
    assert index.evict(1, root=1).files == []


def test_integrity_is_really_checked():
    index = DiskIndex(5 * PAGE, LRU())
    index.used_bytes += 1
    with pytest.raises(AssertionError, match="bytes counted in excess: 1"):
        index.check_integrity()
