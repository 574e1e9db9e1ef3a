"""How much optional work a large model gets."""

import math
from typing import Literal, TypeAlias

Effort: TypeAlias = Literal["quick", "normal", "thorough"]
# The seconds after which less useful inputs are left out, and the number of runs to find masks.
EFFORTS: dict[Effort, tuple[float, int]] = {"quick": (0.0, 2), "normal": (10.0, 8), "thorough": (math.inf, 20)}
