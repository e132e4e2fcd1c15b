"""The CUDA backend: LIR kernels as CUDA C, compiled by NVRTC, run as CUDA graphs on NVIDIA GPUs."""
