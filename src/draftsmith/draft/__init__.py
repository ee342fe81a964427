"""The drafter as pure torch: model, anchors, mask and loss. No threads, files or clocks."""
