"""Targets behind one small protocol."""
