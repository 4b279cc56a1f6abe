"""Pinned host memory and the doctor on a real GPU."""

import gc
import json

import pytest
import torch

from hisparse import host_memory
from hisparse.commands.main import main
from hisparse.errors import HostMemoryError
from hisparse.host_memory import allocate

pytestmark = pytest.mark.gpu


def test_cuda_knows_the_memory_until_the_last_view_is_gone() -> None:
    memory = allocate((2, (256 << 20) + 4096), pinned=True)
    assert memory.is_pinned()
    memory[0, 0], memory[-1, -1] = 17, 255
    device = memory.cuda(non_blocking=True)
    torch.cuda.synchronize()
    assert (device[0, 0].item(), device[-1, -1].item(), device.count_nonzero().item()) == (17, 255, 2)
    view = memory[1]
    del memory
    gc.collect()
    assert view.is_pinned()
    view.copy_(device[0], non_blocking=True)
    torch.cuda.synchronize()
    assert view[0].item() == 17


def test_let_go_and_made_again() -> None:
    for _ in range(3):
        memory = allocate((64 << 20,), pinned=True)
        address = memory.data_ptr()
        del memory
        assert int(torch.cuda.cudart().cudaHostUnregister(address)) != 0  # it was unregistered already
        host_memory._forget_cuda_error()


def test_a_refusal_leaves_no_error_behind() -> None:
    runtime = torch.cuda.cudart()
    mapping = host_memory._map(1 << 20)
    address = host_memory._register(runtime, mapping)
    with pytest.raises(HostMemoryError, match="already"):
        host_memory._register(runtime, mapping)
    assert torch.ones(8, device="cuda").sum().item() == 8  # torch raises an error that is left here
    assert int(runtime.cudaHostUnregister(address)) == 0
    mapping.close()


def test_the_doctor_measures_the_link(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["doctor", "--json"])
    findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert not left.value.code
    assert findings["backend"]["values"] == {"backend": "kernels", "device": "cuda:0"}
    assert findings["cuda:0"]["values"]["total_bytes"] > 0
    for rate in ("to_device_gb_s", "to_host_gb_s", "pinning_gb_s"):
        assert findings["link"]["values"][rate] > 0.1
