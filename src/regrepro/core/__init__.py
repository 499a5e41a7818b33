"""The C core, wrapped: memory, pins, registrars, page state, CUDA. Knows nothing of scenarios or records."""
