"""Checkpoints: the public config contract, atomic save and exact resume, export to public formats."""
