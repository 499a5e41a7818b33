"""Watch: the failing registrations of every process on a node, caught when they happen."""
