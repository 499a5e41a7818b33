"""The engine of `watch`: BPF programs (csrc/bpf/), loaded by libbpf (csrc/libbpf/)."""
