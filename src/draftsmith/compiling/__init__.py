"""All knowledge of `torch.compile`'s hazards between threads, and its only caller."""
