"""Memory that another process attaches to."""

import dataclasses
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvkeep.errors import PoolError
from kvkeep.memory import shared
from kvkeep.memory.shared import SharedHandle, SharedMemory

SRC = Path(__file__).parents[2] / "src"
NBYTES = 3 * 4096


@pytest.fixture
def memory():
    memory = SharedMemory.create(NBYTES)
    yield memory
    memory.close()


def run_child(program, handle):
    """Another Python process, with `handle` as four numbers in its arguments."""
    numbers = [str(number) for number in dataclasses.astuple(handle)]
    return subprocess.Popen(
        [sys.executable, "-c", program, *numbers],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


ATTACHES = """
import sys
from kvkeep.memory.shared import SharedHandle, SharedMemory
memory = SharedMemory.attach(SharedHandle(*map(int, sys.argv[1:])))
print(bytes(memory.view[4096:4100]).decode(), flush=True)
memory.view[8192:8197] = b"child"
memory.close()
"""

OWNS = """
from kvkeep.memory.shared import SharedMemory
import dataclasses
memory = SharedMemory.create(12288)
memory.view[:5] = b"owned"
print(*dataclasses.astuple(memory.handle), flush=True)
input()
"""


def test_new_memory_is_zero_writable_and_page_aligned(memory):
    assert memory.nbytes == len(memory.view) == NBYTES
    assert not any(memory.view)
    assert not memory.view.readonly
    assert memory.address % 4096 == 0


def test_a_child_sees_the_bytes_and_writes_some(memory):
    memory.view[4096:4100] = b"mine"
    child = run_child(ATTACHES, memory.handle)
    said, _ = child.communicate(timeout=30)
    assert (said.strip(), child.returncode) == ("mine", 0)
    assert bytes(memory.view[8192:8197]) == b"child"


def test_what_a_process_owned_is_gone_with_it_but_not_from_under_us():
    child = run_child(OWNS, SharedHandle(0, 0, 0, 0))
    handle = SharedHandle(*map(int, child.stdout.readline().split()))
    attached = SharedMemory.attach(handle)
    assert bytes(attached.view[:5]) == b"owned"
    child.communicate("\n", timeout=30)
    assert bytes(attached.view[:5]) == b"owned"
    with pytest.raises(PoolError, match=f"process {handle.pid}"):
        SharedMemory.attach(handle)
    attached.close()


def test_in_one_process_it_is_one_object(memory):
    assert SharedMemory.attach(memory.handle) is memory


def test_it_can_be_attached_by_number_where_the_object_is_gone(memory):
    """As a forked child does: the handle's process is not its own."""
    shared._created.pop(memory.handle)
    other = SharedMemory.attach(memory.handle)
    assert other is not memory
    other.view[:3] = b"abc"
    assert bytes(memory.view[:3]) == b"abc"
    other.close()
    assert bytes(memory.view[:3]) == b"abc"


@pytest.mark.parametrize("field", ["pid", "fd", "inode", "nbytes"])
def test_a_handle_that_is_wrong_in_anything_is_refused(memory, field):
    wrong = {"pid": 2**22 + 1, "fd": 10_000, "inode": 1, "nbytes": NBYTES + 4096}
    with pytest.raises(PoolError):
        SharedMemory.attach(dataclasses.replace(memory.handle, **{field: wrong[field]}))


@pytest.mark.parametrize("what", ["file", "directory", "pipe", "other memory"])
def test_a_descriptor_that_is_something_else_by_now_is_refused(tmp_path, what):
    memory = SharedMemory.create(NBYTES)
    handle = memory.handle
    memory.close()
    if what == "file":
        (tmp_path / "file").write_bytes(bytes(NBYTES))
        fd = os.open(tmp_path / "file", os.O_RDWR)
    elif what == "directory":
        fd = os.open(tmp_path, os.O_RDONLY)
    elif what == "pipe":
        fd, writer = os.pipe()
        os.close(writer)
    else:
        fd = os.memfd_create("other")
        os.ftruncate(fd, NBYTES)
    if fd != handle.fd:
        os.dup2(fd, handle.fd)
        os.close(fd)
    shared._created.pop(handle, None)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(PoolError):
        SharedMemory.attach(handle)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    os.close(handle.fd)


def test_closed_memory_is_not_attached_to_again():
    memory = SharedMemory.create(NBYTES)
    memory.close()
    with pytest.raises(PoolError):
        SharedMemory.attach(memory.handle)


def test_closes_twice_and_gives_back_its_descriptors():
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    memory = SharedMemory.create(NBYTES)
    memory.close()
    memory.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_view_in_use_outlives_close():
    memory = SharedMemory.create(NBYTES)
    part = memory.view[4096:8192]
    memory.close()
    part[:2] = b"ok"
    assert bytes(part[:2]) == b"ok"


def resident_pages(memory):
    """Pages that the file behind `memory` has."""
    return os.fstat(memory._fd).st_blocks * 512 // 4096


@pytest.mark.parametrize(
    ("offset", "nbytes", "pages"), [(0, NBYTES, 3), (4096, 4096, 1), (5000, 1, 1), (4000, 200, 2)]
)
def test_populate_gives_pages_to_a_range_and_changes_no_byte(memory, offset, nbytes, pages):
    assert resident_pages(memory) == 0
    if not memory.populate(offset, nbytes):
        pytest.skip("this kernel has no MADV_POPULATE_WRITE (Linux 5.14)")
    assert resident_pages(memory) == pages
    assert not any(memory.view)
    memory.view[:3] = b"abc"
    assert memory.populate(0, NBYTES)
    assert bytes(memory.view[:3]) == b"abc"


def test_populate_says_no_where_it_can_not(memory):
    assert not memory.populate(1 << 40, 4096)


def test_populate_of_memory_that_was_closed_says_no():
    """It runs in the background: closing the cache meanwhile must not end in an exception."""
    memory = SharedMemory.create(NBYTES)
    memory.close()
    assert not memory.populate(0, NBYTES)
