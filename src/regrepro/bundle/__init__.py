"""The attachment of a bug report: one archive, the same bytes each time, without private details."""
