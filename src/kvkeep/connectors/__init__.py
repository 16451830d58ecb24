"""Adapters, one folder an engine."""
