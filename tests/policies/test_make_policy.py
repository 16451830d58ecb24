import pytest

from kvkeep.errors import ConfigError
from kvkeep.policies import DEFAULT_POLICY, POLICY_NAMES, S3FIFO, make_policy


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_name_makes_an_empty_policy(name: str):
    assert len(make_policy(name, 1)) == 0


def test_the_names_people_know_are_there():
    assert {"lru", "fifo", "lfu", "mru", "s3fifo"} <= set(POLICY_NAMES)
    assert DEFAULT_POLICY in POLICY_NAMES


def test_case_does_not_matter():
    assert isinstance(make_policy("S3FIFO", 10), S3FIFO)


def test_an_unknown_name_is_told_the_nearest():
    with pytest.raises(ConfigError, match=r"'S3-FIFO'.* mean 's3fifo'\?"):
        make_policy("S3-FIFO", 10)


def test_a_name_near_nothing_is_told_all():
    with pytest.raises(ConfigError, match=", ".join(POLICY_NAMES)):
        make_policy("", 10)


def test_a_tier_without_room_is_refused():
    with pytest.raises(ConfigError, match="at least 1"):
        make_policy("lru", 0)
