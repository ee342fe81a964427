"""What a run tells: metrics, TensorBoard and progress."""
