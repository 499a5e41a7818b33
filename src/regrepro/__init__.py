"""regrepro reproduces, proves and reports one family of RDMA memory-registration failures."""

__version__ = "0.1.0"
