"""Text to packed tokens: records, chat template and loss mask, packing."""
