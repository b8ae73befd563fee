"""Where time and memory go: Nsight Systems, torch.profiler and allocations, read into one kind of summary."""
