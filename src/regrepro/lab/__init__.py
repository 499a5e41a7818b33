"""The lab: scenarios on a real kernel in a virtual machine, with no GPU and no RDMA card."""
