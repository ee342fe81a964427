"""Decoding: draft, verify, accept; and plain greedy decoding to compare with."""
