"""The frozen target: loading replicas and capturing hidden states."""
