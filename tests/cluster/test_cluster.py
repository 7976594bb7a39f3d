"""`prepare --hosts` on two hosts in network namespaces: the quick form. `make cluster` is the long one."""

from __future__ import annotations

import pytest
from histories import quiet
from machines import why_not

pytest.importorskip("ray")
reason = why_not()


@pytest.mark.skipif(bool(reason), reason=reason)
def test_hosts_of_a_list_prepare_the_bytes_of_one_machine_and_nothing_is_left_running() -> None:
    quiet(nodes=2, with_ray=False)
