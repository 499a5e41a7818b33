"""The C core, wrapped: memory, pins, RDMA devices, page state, CUDA. Knows no scenarios and no records."""
