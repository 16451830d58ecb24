"""Shipped conformance suites and fakes, for whoever writes a tier, a codec or a policy."""
