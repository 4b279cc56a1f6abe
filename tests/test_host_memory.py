"""Memory of the host pool: how it is pinned and let go, and what is refused. CUDA is a fake here."""

import ctypes
import gc
import math
import mmap
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hisparse import host_memory
from hisparse.errors import CapacityError, HostMemoryError
from hisparse.host_memory import MemoryReport, allocate, memory_report
from hisparse.host_pool import HostPool
from tests.caches import small_layout

PLENTY = MemoryReport(available=2**40, cgroup_left=None, lock_limit=None)
FAILS = 2


class FakeRuntime:
    """CUDA's runtime, as far as it is used: it keeps what is registered and reads it as a GPU would."""

    def __init__(self, result: int = 0) -> None:
        self.result = result
        self.registered: dict[int, int] = {}
        self.unregistered: list[int] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 0
        if not self.result:
            self.registered[address] = num_bytes
        return self.result

    def cudaHostUnregister(self, address: int) -> int:
        ctypes.string_at(address + self.registered.pop(address) - 1, 1)  # a fault here: unmapped too early
        self.unregistered.append(address)
        return self.result

    def cudaGetErrorString(self, result: int) -> str:
        return "out of memory" if result == FAILS else "no error"


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(host_memory, "memory_report", lambda: PLENTY)
    monkeypatch.setattr(host_memory, "_forget_cuda_error", lambda: None)
    return fake


@pytest.fixture
def mappings(monkeypatch: pytest.MonkeyPatch) -> list[mmap.mmap]:
    """Every mapping that is made."""
    made: list[mmap.mmap] = []
    anonymous = host_memory._anonymous

    def keep(num_bytes: int) -> mmap.mmap:
        made.append(anonymous(num_bytes))
        return made[-1]

    monkeypatch.setattr(host_memory, "_anonymous", keep)
    return made


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(host_memory, "CHUNK_BYTES", 1 << 16)
    return 1 << 16


@pytest.mark.parametrize("pinned", [False, True])
def test_shape_type_and_both_ends(pinned: bool, runtime: FakeRuntime) -> None:
    memory = allocate((3, 1000, 48), pinned=pinned)
    assert (memory.shape, memory.dtype, memory.is_contiguous()) == ((3, 1000, 48), torch.uint8, True)
    memory[0, 0, 0], memory[-1, -1, -1] = 17, 255
    assert [memory.flatten()[at].item() for at in (0, -1)] == [17, 255]
    expected = {memory.data_ptr(): 3 * 1000 * 48} if pinned else {}
    assert runtime.registered == expected


def test_pinned_memory_begins_at_a_page(runtime: FakeRuntime) -> None:
    assert allocate((5,), pinned=True).data_ptr() % mmap.PAGESIZE == 0


@pytest.mark.parametrize("extra", [-1, 0, 1, 4097])
def test_progress_is_monotone_and_ends_at_the_total(extra: int, runtime: FakeRuntime, small_chunks: int) -> None:
    calls: list[tuple[int, int]] = []
    total = 5 * small_chunks + extra
    allocate((total,), pinned=True, progress=lambda done, of: calls.append((done, of)))
    done = [count for count, _ in calls]
    assert done == sorted(set(done))
    assert len(done) == math.ceil(total / small_chunks)
    assert done[-1] == total
    assert {of for _, of in calls} == {total}


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="asks Linux how much is resident")
def test_every_page_is_touched_before_it_is_registered(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    def resident() -> int:
        line = next(line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if line[:4] == "Rss:")
        return int(line.split()[1]) * 1024

    seen: list[int] = []
    register = runtime.cudaHostRegister

    def look_first(*arguments: int) -> int:
        seen.append(resident())
        return register(*arguments)

    monkeypatch.setattr(runtime, "cudaHostRegister", look_first)
    before = resident()
    allocate((64 << 20,), pinned=True)
    assert seen[0] - before > 60 << 20


def test_unregistered_once_after_the_last_view(runtime: FakeRuntime) -> None:
    memory = allocate((4, 4096), pinned=True)
    address = memory.data_ptr()
    view = memory[3].view(torch.int32)[5:]
    del memory
    gc.collect()
    assert (list(runtime.registered), runtime.unregistered) == ([address], [])
    view[-1] = 7
    del view
    gc.collect()
    assert (list(runtime.registered), runtime.unregistered) == ([], [address])


def test_a_failing_unregister_is_a_warning(runtime: FakeRuntime) -> None:
    memory = allocate((4096,), pinned=True)
    runtime.result = FAILS
    with pytest.warns(UserWarning, match=r"could not unpin 0\.00 MiB .*out of memory"):
        del memory


def test_nothing_is_unregistered_when_the_process_ends(tmp_path: Path) -> None:
    """Neither where the memory is in a global nor where a cycle keeps it."""
    code = (
        "import torch\n"
        "from hisparse import host_memory\n"
        "class Fake:\n"
        "    def cudaHostRegister(self, *args): return 0\n"
        "    def cudaHostUnregister(self, *args): print('unregistered'); return 0\n"
        "torch.cuda.cudart = lambda fake=Fake(): fake\n"
        "memory = host_memory.allocate((1 << 20,), pinned=True)\n"
        "other = host_memory.allocate((1 << 20,), pinned=True)\n"
        "memory.itself = memory\n"
        "print('made')\n"
    )
    file = tmp_path / "program.py"
    file.write_text(code)
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "made\n", "")


def test_a_host_pool_is_made_of_it(runtime: FakeRuntime) -> None:
    calls: list[tuple[int, int]] = []
    layout = small_layout()
    pool = HostPool(layout, pinned=True, progress=lambda done, of: calls.append((done, of)))
    assert calls == [(layout.host_bytes, layout.host_bytes)]
    assert runtime.registered == {pool.records.data_ptr(): layout.host_bytes}


def refuses(num_bytes: int, *words: str, pinned: bool = True) -> None:
    with pytest.raises(HostMemoryError) as refusal:
        allocate((num_bytes,), pinned=pinned)
    assert isinstance(refusal.value, CapacityError)
    for word in (*words, "num_pages", "host_to_device_ratio", "context length", "number of requests"):
        assert word in str(refusal.value)


def test_cuda_refuses(runtime: FakeRuntime, mappings: list[mmap.mmap]) -> None:
    runtime.result = FAILS
    refuses(1 << 30, "1.00 GiB", "CUDA refused to pin it (out of memory)", "1024.00 GiB available")
    assert [mapping.closed for mapping in mappings] == [True]
    assert runtime.unregistered == []


def test_interrupted_while_it_is_touched(runtime: FakeRuntime, mappings: list[mmap.mmap], small_chunks: int) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        allocate((10 * small_chunks,), pinned=True, progress=interrupt)
    assert [mapping.closed for mapping in mappings] == [True]
    assert runtime.registered == {}


def test_the_control_group_refuses(
    runtime: FakeRuntime, mappings: list[mmap.mmap], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "memory_report", lambda: MemoryReport(2**40, 3 << 30, None))
    refuses((3 << 30) + 1, "3.00 GiB left in the control group")
    assert mappings == []


def test_too_little_available_warns_and_a_lock_limit_does_not(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(host_memory, "memory_report", lambda: MemoryReport(4096, None, 4096))
    allocate((4096,), pinned=True)
    assert not recwarn.list
    allocate((4097,), pinned=True)
    assert len(recwarn.list) == 1
    assert "available" in str(recwarn.list[0].message)


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), ValueError("length"), OverflowError("large")])
def test_the_system_refuses_to_map(error: Exception, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(host_memory, "_anonymous", fail)
    refuses(1 << 20, "1.00 MiB", "refused to map it", str(error))
    assert runtime.registered == {}


@pytest.mark.skipif(sys.platform != "linux", reason="flags of Linux")
@pytest.mark.parametrize("grows", [False, True])
def test_a_machine_whose_memory_grows_may_map_more_than_it_has(
    grows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if grows:
        (tmp_path / "virtio_balloon" / "virtio0").mkdir(parents=True)
    monkeypatch.setattr(host_memory, "VIRTIO_DRIVERS", tmp_path)
    kind, flags_seen = mmap.mmap, []

    def accounts(number: int, num_bytes: int, flags: int) -> mmap.mmap:
        flags_seen.append(flags)
        if not flags & host_memory.MAP_NORESERVE:
            raise OSError(12, "Cannot allocate memory")
        return kind(number, num_bytes, flags=flags)

    monkeypatch.setattr(mmap, "mmap", accounts)
    if grows:
        assert len(host_memory._map(4096)) == 4096
    else:
        with pytest.raises(HostMemoryError):
            host_memory._map(4096)
    assert len(flags_seen) == 1 + grows


@pytest.mark.filterwarnings("ignore:the host pool asks for")
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("num_bytes", [2**62, 2**63, 2**70])
def test_absurd_sizes(num_bytes: int, pinned: bool, runtime: FakeRuntime) -> None:
    refuses(num_bytes, "GiB", pinned=pinned)


@pytest.mark.parametrize("shape", [(), (0,), (3, -1)])
def test_a_shape_without_memory(shape: tuple[int, ...], runtime: FakeRuntime) -> None:
    with pytest.raises(ValueError, match="positive sizes"):
        allocate(shape, pinned=True)


def test_without_cuda_nothing_is_taken(mappings: list[mmap.mmap], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise RuntimeError("Found no NVIDIA driver")

    monkeypatch.setattr(torch.cuda, "cudart", missing)
    with pytest.raises(RuntimeError, match="no NVIDIA driver"):
        allocate((4096,), pinned=True)
    assert mappings == []


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Writes files of a system that has none yet."""
    monkeypatch.setattr(host_memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(host_memory, "CONTROL_GROUPS", tmp_path / "cgroup")

    def write(name: str, text: str) -> None:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    return write


def test_a_system_that_says_nothing(system: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_lock_limit", lambda: None)
    assert memory_report() == (None, None, None)
    assert str(memory_report()) == "nothing is known"
    fake = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    assert allocate((2, 3), pinned=True).shape == (2, 3)


def test_available_memory(system: Callable[[str, str], None]) -> None:
    system("proc/meminfo", "MemTotal:  24683656 kB\nMemFree: 5 kB\nMemAvailable:   24210388 kB\n")
    assert memory_report().available == 24210388 * 1024


def test_the_tightest_control_group_counts_and_cached_files_do_not(system: Callable[[str, str], None]) -> None:
    system("proc/self/cgroup", "9:name=systemd:/\n0::/outer/inner\n")
    assert memory_report().cgroup_left is None
    system("cgroup/outer/inner/memory.max", "max\n")
    system("cgroup/outer/inner/memory.current", "10\n")
    assert memory_report().cgroup_left is None
    system("cgroup/outer/memory.max", "1000\n")
    system("cgroup/outer/memory.current", "900\n")
    assert memory_report().cgroup_left == 100
    system("cgroup/outer/memory.stat", "anon 300\nfile 600\ninactive_file 400\nactive_file 150\nshmem 50\n")
    assert memory_report().cgroup_left == 650
    system("cgroup/memory.max", "50\n")  # of a container that sees its own group as the root
    system("cgroup/memory.current", "60\n")
    assert memory_report().cgroup_left == 0
