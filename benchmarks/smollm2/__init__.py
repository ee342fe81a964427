"""The whole way on a real target that others trained, on a CPU."""
