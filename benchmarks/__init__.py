"""One file for each figure the README claims; each prints one JSON object a line with --json."""
