"""All findings in order, each as soon as it is there, and the backend that follows from them."""

import importlib
from collections.abc import Callable, Iterable, Iterator

from hisparse.doctor import software
from hisparse.doctor.finding import Finding, Status, first_line

Look = Callable[[], Iterable[Finding]]
GPU = "cuda:0"  # the one that is measured


def examine() -> Iterator[Finding]:
    """Look at everything; whatever breaks on the way is a finding too."""
    found: list[Finding] = []
    for name, look in LOOKS.items():
        for finding in safely(name, look):
            found.append(finding)
            yield finding
    yield backend(found)


def safely(name: str, look: Look) -> Iterator[Finding]:
    """The findings of `look`, the last of which says so if it fails."""
    try:
        yield from look()
    except Exception as error:  # a broken installation may raise anything, and is what the user wants to hear of
        yield Finding(name, Status.MISSING, f"could not be looked at ({first_line(error)})")


def backend(found: Iterable[Finding]) -> Finding:
    """Which backend runs, from what was found."""
    fine = {finding.name for finding in found if finding.status is Status.OK}
    if {"torch", "NVRTC", "kernel", GPU} <= fine:
        says, values = f"kernels on {GPU} (commands take --device cuda)", {"backend": "kernels", "device": GPU}
    elif "torch" in fine:
        says = "reference on the CPU: everything works, only slower"
        values = {"backend": "reference", "device": "cpu"}
    else:
        return Finding("backend", Status.MISSING, "none runs without torch", software.INSTALL_TORCH)
    return Finding("backend", Status.OK, says, values=values)


def _machine(look: str) -> Look:
    """A look of machine.py, which is imported when its turn comes: it imports torch, which may be broken."""

    def later() -> Iterable[Finding]:
        found: Iterable[Finding] = getattr(importlib.import_module("hisparse.doctor.machine"), look)()
        return found

    return later


LOOKS: dict[str, Look] = {
    "hisparse": software.hisparse,
    "Python": software.python,
    "torch": software.torch,
    "GPU": _machine("gpus"),
    "driver": _machine("driver"),
    "NVRTC": software.nvrtc,
    "kernel": software.kernel,
    "kernel cache": software.kernel_cache,
    "host memory": _machine("host_memory"),
    "link": _machine("link"),
}
