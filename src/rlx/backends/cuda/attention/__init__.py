"""Attention on NVIDIA GPUs: generators of CUDA C for `AttentionKernel` and `AttentionGradKernel`."""
