"""The round-trip lab: virtual time, recorded targets, benchmarks of the policies."""
