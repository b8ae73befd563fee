import contextlib
import io
import itertools
import os
import re
import sys
from typing import NamedTuple

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class StandInModule(int):
    """What "loading" a kernel gives; one number for each compiled variant."""


class StandInGpu:
    """What Triton asks of a driver, for one H200 that is not there.

    Kernels are compiled up to PTX, loading one gives a number, launches are written down.
    """

    def __init__(self, target, launcher, minor):
        self.launches = []
        self._minor = minor
        self.launcher_cls = launcher
        self.utils = self
        self.target = target
        self._numbers = itertools.count(1)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 7

    def get_device_properties(self, device):
        return {"max_shared_mem": 227 * 1024}

    def load_binary(self, name, binary, shared, device):
        number = StandInModule(next(self._numbers))
        return number, (name, number), 128, 0, 1024

    def fill_tma_descriptor(self, pointer, *fields):
        fields = [tuple(x) if isinstance(x, (list, torch.Size)) else x for x in fields]
        return ("descriptor", pointer, *fields)

    fill_tma_descriptor_tiled = fill_tma_descriptor  # its name from Triton 3.7 on

    def build_signature_metadata(self, signature):
        return signature

    def launch(self, *everything):
        """The C launcher. All is written down but the profiler's hooks, which prepared launches do without.

        A tensor counts as its pointer.
        """
        grid, (stream, function, *flags), rest = everything[:3], everything[3:7], everything[7:]
        if self._minor == (3, 6):
            scratch, metadata, arguments = rest[:2], rest[2], rest[6:]
        else:
            metadata, scratch, arguments = rest[0], rest[4:6], rest[8]
        arguments = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]
        self.launches.append((grid, stream, function, flags, scratch, metadata, arguments))


def _unload_real_kernels_only():
    """From 3.8 on, Triton unloads a kernel when it is collected: that may be after the stand-in has gone."""
    from triton.compiler import CompiledKernel

    unload = getattr(CompiledKernel, "__del__", None)
    if unload is None or unload.__name__ == "unload_unless_stand_in":
        return

    def unload_unless_stand_in(kernel):
        if not isinstance(kernel.module, StandInModule):
            unload(kernel)

    CompiledKernel.__del__ = unload_unless_stand_in


def _forget_kernels():
    """Forget what was prepared and compiled: it is of use to one GPU alone."""
    from triton.runtime.jit import JITFunction

    from lmkit.kernels.launch import LaunchCache

    modules = [module for name, module in sys.modules.items() if name.startswith("lmkit.kernels.")]
    for value in [value for module in modules for value in vars(module).values()]:
        if isinstance(value, LaunchCache):
            value.prepared = {}
        elif isinstance(value, JITFunction):
            value.device_caches.clear()


@pytest.fixture
def stand_in_gpu(monkeypatch, tmp_path_factory):
    """Triton believes that there is an H200; nothing runs. `launches` lists what the C launcher was given. No kernel
    and no call is known at the start, and none stays known."""
    pytest.importorskip("triton", reason="Triton is not installed")
    if INTERPRETED:
        pytest.skip("the interpreter is on: nothing is compiled")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import compiler, driver

    from lmkit.kernels.versions import INSTALLED_MINOR

    _unload_real_kernels_only()
    gpu = StandInGpu(GPUTarget("cuda", 90, 32), driver.CudaLauncher, INSTALLED_MINOR)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path_factory.getbasetemp() / "kernels"))
    gpu.assemble = compiler.CUDABackend.make_cubin  # the real one
    monkeypatch.setattr(compiler.CUDABackend, "make_cubin", lambda *arguments: b"")  # nobody runs it
    if INSTALLED_MINOR == (3, 6):  # compiles a C launcher for each kernel
        monkeypatch.setattr(driver, "compile_module_from_src", lambda **source: gpu)
        monkeypatch.setattr(driver, "library_dirs", list)
    else:  # has one C launcher, with types of its own
        monkeypatch.setattr(driver, "PyKernelArg", lambda **fields: fields)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(triton.runtime.driver, "_active", gpu)
    _forget_kernels()
    yield gpu
    _forget_kernels()


class Report(NamedTuple):
    """What became of a kernel."""

    spills: int  # bytes a thread
    serialised: list[str]  # ptxas's notes of it
    products: int  # wgmma instructions


@pytest.fixture
def assembled(stand_in_gpu, monkeypatch, tmp_path):
    """Has kernels compiled down to the cubin, as Triton does it, and keeps a Report of each by name."""
    import triton
    from triton.backends.nvidia import compiler

    reports = {}

    def make_cubin(backend, ptx, metadata, *options):
        log = io.StringIO()
        with contextlib.redirect_stdout(log):  # Triton prints what ptxas says
            cubin = stand_in_gpu.assemble(backend, ptx, metadata, *options)
        spills = [int(stored) for stored in re.findall(r"(\d+) bytes spill stores", log.getvalue())]
        notes = re.findall(r"C751\d", log.getvalue())
        products = len(re.findall(r"^\s*wgmma.mma_async", ptx, re.MULTILINE))
        # A kernel in two variants: the worse of both.
        before = reports.get(metadata["name"], Report(0, [], 0))
        report = Report(max(*spills, before.spills), notes + before.serialised, products)
        reports[metadata["name"]] = report
        return cubin

    monkeypatch.setattr(compiler.CUDABackend, "make_cubin", make_cubin)
    monkeypatch.setattr(triton.knobs.nvidia, "dump_ptxas_log", True)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))  # what was compiled before says nothing
    return reports
