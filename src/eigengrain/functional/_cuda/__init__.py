"""CUDA code of the functional package: the batched cuSOLVER eigensolver and CUDA graphs."""
