"""What the operation costs, against PyTorch's own causal attention: ``python -m benchmarks.attention``."""
