import disk_helpers
import pytest


@pytest.fixture(autouse=True)
def _close_what_was_opened():
    """An open disk tier holds locks that others look for."""
    yield
    for tier in disk_helpers.OPENED:
        tier.close()
    disk_helpers.OPENED.clear()
