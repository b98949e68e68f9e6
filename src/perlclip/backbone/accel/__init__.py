"""What makes the towers faster on CUDA: recorded graphs and fused kernels."""
