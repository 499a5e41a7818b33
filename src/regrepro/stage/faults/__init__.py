"""Planted faults: what makes a registration fail, or look as if it should, for a cause that is not this bug.

`stage.faults` has them. Each is planted for the length of a `with` block, or of the pass, and recorded as a
`step` that says what was planted. In the control `change(fault="none")` none is: the same steps, without it.
Those that could hurt a node refuse to work outside of a guest of the lab; their scenarios declare the need
`lab`, too.
"""

from regrepro.stage.faults.devices import Devices
from regrepro.stage.faults.limits import Limits
from regrepro.stage.faults.mappings import Mappings
from regrepro.stage.faults.references import References
from regrepro.stage.faults.targets import Targets

__all__ = ["Faults"]


class Faults(Limits, Mappings, References, Targets, Devices):
    """The faults of one pass, of every kind. Made by the stage."""
