"""What all tests share."""

from hypothesis import settings

# A busy machine is slow now and then; that is no failure. Hangs end by pytest's own timeout.
settings.register_profile("kvkeep", deadline=None)
settings.load_profile("kvkeep")
