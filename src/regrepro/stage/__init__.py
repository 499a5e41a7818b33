"""The stage: what a scenario's body calls. Memory, pins and registrations, each step recorded when it
happens.
"""

from regrepro.stage.buffers import Buffer
from regrepro.stage.pins import Pin
from regrepro.stage.registrations import Registration
from regrepro.stage.series import Series
from regrepro.stage.stage import Stage

__all__ = ["Buffer", "Pin", "Registration", "Series", "Stage"]
