"""The demo: a small target of our own, and the whole job on it."""
