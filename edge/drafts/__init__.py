"""Draft models behind one small protocol."""
