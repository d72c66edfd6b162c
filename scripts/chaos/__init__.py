"""Faults on purpose: hostile links, killed verifiers, restarted edges, and whether every answer came out as it should."""
