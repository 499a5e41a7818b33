"""What the kernel lets us see of its memory, and the few things on a node that we change and give back."""
