"""Facts that have to be written in two places, because one layer may not import the other."""

from kvkeep import config, policies


def test_settings_know_every_policy() -> None:
    assert set(config.POLICY_NAMES) == set(policies.POLICY_NAMES)
    assert policies.DEFAULT_POLICY == config.DEFAULT_POLICY_NAME
