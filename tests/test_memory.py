"""What memory there is, what tensors take, and the peak of a part."""

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from hotcold.errors import OutOfMemory
from hotcold.memory import LiveBytes, PeakMemory, as_out_of_memory, free_bytes, resident_bytes

KB = 1024


def test_the_count_of_a_product_by_hand() -> None:
    """x [4, 8] and w [8, 2] float32 were there before. x @ w is 4 x 2 x 4 bytes = 32; its square 32 more. Of both
    together 64, and 32 once the first is let go."""
    x, w = torch.ones(4, 8), torch.ones(8, 2)
    with LiveBytes() as count:
        product = x @ w
        assert (count.now, count.peak) == (32, 32)
        square = product * product
        assert count.now == 64
        product = x[:2]  # a view of what was there takes nothing, and the product goes
        assert count.now == 32
        square.add_(1.0)
    assert (count.now, count.peak) == (32, 64)


def test_the_count_of_a_backward_by_hand() -> None:
    """y = w x is [3, 5], 60 bytes, and its sum 4; y is not needed for the gradient and goes. In the backward pass the
    sum (4), its gradient (4) and that of w (48), which is added to what was there. At most 64, in the end the sum's 4.
    """
    w, x = nn.Parameter(torch.ones(3, 4)), torch.ones(4, 5)
    w.grad = torch.zeros(3, 4)
    with LiveBytes() as count:
        total = (w @ x).sum()
        assert (count.now, count.peak) == (4, 64)
        total.backward()
    assert (count.now, count.peak) == (4, 64)
    assert torch.equal(w.grad, torch.full((3, 4), 5.0))


def test_what_is_kept_for_the_gradient_counts_until_the_gradient_is_there() -> None:
    """exp keeps its result: two of them in a row hold 2 x 400 bytes."""
    x = nn.Parameter(torch.zeros(100))
    with LiveBytes() as count:
        total = x.exp().exp().sum()
        assert count.now == 804
        total.backward()
    assert count.now == 4 + 400  # the sum and the gradient


def test_temporaries_as_large_as_a_parameter_can_be_left_out() -> None:
    w = nn.Parameter(torch.ones(100, 10))  # 4000 bytes
    w.grad = torch.zeros(100, 10)
    with LiveBytes(apart={4000}) as count:
        (torch.ones(2, 100) @ w).sum().backward()
    assert count.peak >= 4000 > count.peak_of_rows > 0


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:115] DefaultCPUAllocator: can't allocate memory: you tried ..."),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
    ],
)
def test_a_failed_allocation_has_one_name(error: Exception) -> None:
    with pytest.raises(OutOfMemory, match="a forward does not fit"), as_out_of_memory("a forward"):
        raise error


def test_an_allocation_that_cannot_be_made_is_recognised() -> None:
    with pytest.raises(OutOfMemory), as_out_of_memory("so much"):
        torch.empty(2**60, dtype=torch.uint8)


def test_other_errors_keep_theirs() -> None:
    with pytest.raises(RuntimeError, match="shapes"), as_out_of_memory("a forward"):
        raise RuntimeError("shapes cannot be multiplied")


def machine(root: Path, groups: str, files: dict[str, str]) -> Path:
    """8000 KB available; control groups and their files as given."""
    files = {"proc/meminfo": "MemTotal: 16000 kB\nMemAvailable:    8000 kB\n", "proc/self/cgroup": groups, **files}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_without_a_limit_what_is_available_is_free(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/a/memory.max": "max\n", "sys/fs/cgroup/a/memory.current": "4096\n"}
    assert free_bytes("cpu", machine(tmp_path, "0::/a\n", files)) == 8000 * KB


def test_the_limit_of_a_group_above_counts_and_cache_that_can_go_is_free(tmp_path: Path) -> None:
    """v2: of 5000 in the outer group 3000 are used, 1000 of them cache: 3000 are left."""
    outer = "sys/fs/cgroup/outer"
    files = {
        f"{outer}/memory.max": "5000\n",
        f"{outer}/memory.current": "3000\n",
        f"{outer}/memory.stat": "anon 2000\nactive_file 7\ninactive_file 1000\n",
        f"{outer}/inner/memory.max": "max\n",
        f"{outer}/inner/memory.current": "100\n",
    }
    assert free_bytes("cpu", machine(tmp_path, "0::/outer/inner\n", files)) == 3000


def test_the_limit_of_a_first_version_group(tmp_path: Path) -> None:
    """v1: 9000 - 2000 + 500 = 7500 are left; the root's number is no limit."""
    base = "sys/fs/cgroup/memory"
    files = {
        f"{base}/memory.limit_in_bytes": f"{2**63 - 4096}\n",
        f"{base}/memory.usage_in_bytes": "1\n",
        f"{base}/job/memory.limit_in_bytes": "9000\n",
        f"{base}/job/memory.usage_in_bytes": "2000\n",
        f"{base}/job/memory.stat": "inactive_file 1\ntotal_inactive_file 500\n",
    }
    assert free_bytes("cpu", machine(tmp_path, "4:memory:/job\n1:cpu:/job\n0::/\n", files)) == 7500


def test_where_nothing_is_known_nothing_is_said(tmp_path: Path) -> None:
    assert free_bytes("cpu", tmp_path) is None


@pytest.mark.skipif(resident_bytes() is None, reason="no /proc here")
def test_the_peak_of_a_part_is_of_that_part() -> None:
    """100 MB more in one part than in the other, gone before it ends; long enough there to be looked at many times."""
    peak = PeakMemory(every=0.002)
    with peak.part("small"):
        torch.ones(10)
    with peak.part("large"):
        held = torch.ones(25 * 10**6)
        torch.ones(10)
        kept = resident_bytes()
        time.sleep(0.5)
        del held
    found = peak.take()
    assert kept is not None and found["large"] >= kept - 2**20
    assert found["large"] > found["small"] + 90e6
    assert peak.take() == {}
