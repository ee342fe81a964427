"""The threads: plan, channels, workers and the coordinator that owns them. Threads live here and nowhere else."""
