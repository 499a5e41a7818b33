"""The cleanup journal's class under the name that users' scenario files import it by."""

from regrepro.kernel.journal import Journal

__all__ = ["Journal"]
