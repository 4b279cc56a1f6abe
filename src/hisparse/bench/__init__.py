"""Benches: what is measured, how, and the tables that LOG.md records."""
