"""The C core, wrapped: memory, pins, RDMA devices, page state, CUDA. Knows nothing of scenarios or records."""
