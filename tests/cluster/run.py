"""The long form of the tests of `prepare --hosts`: three hosts in network namespaces, and what may happen to them.

python tests/cluster/run.py [--only NAME ...] [--lanes N] [--list]

It needs root, a kernel that allows network namespaces, and OpenSSH and iproute2 (`make cluster` installs both). No
packet leaves the namespaces, and everything that is started ends with its history.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from machines import why_not

from lab_runner import run_lab

if __name__ == "__main__":
    if reason := why_not():
        sys.exit(f"not run: {reason}")
    run_lab(__doc__.partition("\n")[0], ["histories"], {"histories": (8, ("",))}, first_column="history")
