"""The CUDA driver by ctypes: memory, modules, launches, events. libcuda comes with the driver.

Thin on purpose: what can be decided without a device is decided elsewhere.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

OUT_OF_MEMORY, NO_DEVICE = "CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_NO_DEVICE"
MAJOR, MINOR, L2_BYTES, BUS_BITS, MEMORY_KHZ, SMS = 75, 76, 38, 37, 36, 16
"""Numbers of cuda.h's CUdevice_attribute."""
DYNAMIC_SHARED = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""
SMALL_SHARED = 48 << 10
"""Dynamic shared memory that needs no leave."""


class CudaError(Exception):
    """A call of the driver failed; `name` such as CUDA_ERROR_ILLEGAL_ADDRESS."""

    def __init__(self, call: str, name: str) -> None:
        super().__init__(f"{call}: {name}")
        self.call, self.name = call, name


class Driver:
    """A device's context. Errors: CudaError, also without a driver or a device."""

    def __init__(self, number: int = 0) -> None:
        try:
            self._lib = ctypes.CDLL("libcuda.so.1")
        except OSError:
            raise CudaError("libcuda.so.1", "no NVIDIA driver is installed") from None
        self._call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), number)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._device = device

    def facts(self) -> dict[str, Any]:
        """Name, architecture, memory, cache and bus of the device."""
        name, total = ctypes.create_string_buffer(256), ctypes.c_size_t()
        self._call("cuDeviceGetName", name, 256, self._device)
        self._call("cuDeviceTotalMem_v2", ctypes.byref(total), self._device)
        return {
            "name": name.value.decode("utf-8", "replace"),
            "architecture": f"sm_{self._attribute(MAJOR)}{self._attribute(MINOR)}",
            "memory": total.value,
            "l2": self._attribute(L2_BYTES),
            "bus_bits": self._attribute(BUS_BITS),
            "memory_khz": self._attribute(MEMORY_KHZ),
            "multiprocessors": self._attribute(SMS),
        }

    def allocate(self, size: int) -> int:
        """The address of `size` bytes."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def free(self, address: int) -> None:
        """Release an address."""
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def fill(self, address: int, byte: int, size: int) -> None:
        """Set bytes of the device; it may return before they are set."""
        given = ctypes.c_uint64(address), ctypes.c_ubyte(byte), ctypes.c_size_t(size)
        self._call("cuMemsetD8_v2", *given)

    def upload(self, address: int, data: bytes) -> None:
        """Copy bytes to the device."""
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)))

    def download(self, address: int, size: int) -> bytes:
        """Copy bytes from the device."""
        data = ctypes.create_string_buffer(size)
        self._call("cuMemcpyDtoH_v2", data, ctypes.c_uint64(address), ctypes.c_size_t(size))
        return data.raw

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy bytes on the device."""
        given = ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(size)
        self._call("cuMemcpyDtoD_v2", *given)

    def load(self, cubin: bytes) -> ctypes.c_void_p:
        """Load a cubin."""
        module = ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), cubin)
        return module

    def unload(self, module: ctypes.c_void_p) -> None:
        """Release a module."""
        self._call("cuModuleUnload", module)

    def function(self, module: ctypes.c_void_p, symbol: str, shared: int) -> ctypes.c_void_p:
        """A kernel of a module, with leave for `shared` bytes of dynamic shared memory."""
        function = ctypes.c_void_p()
        self._call("cuModuleGetFunction", ctypes.byref(function), module, symbol.encode())
        if shared > SMALL_SHARED:
            self._call("cuFuncSetAttribute", function, DYNAMIC_SHARED, shared)
        return function

    def launch(
        self,
        function: ctypes.c_void_p,
        grid: Sequence[int],
        block: Sequence[int],
        shared: int,
        arguments: ctypes.Array[ctypes.c_void_p],
    ) -> None:
        """Launch a kernel in the default stream."""
        sizes = [ctypes.c_uint(size) for size in (*grid, *block, shared)]
        self._call("cuLaunchKernel", function, *sizes, None, arguments, None)

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        self._call("cuCtxSynchronize")

    def event(self) -> ctypes.c_void_p:
        """An event."""
        event = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), 0)
        return event

    def record(self, event: ctypes.c_void_p) -> None:
        """Record an event in the default stream."""
        self._call("cuEventRecord", event, None)

    def milliseconds(self, begin: ctypes.c_void_p, end: ctypes.c_void_p) -> float:
        """Time between two events that are over."""
        found = ctypes.c_float()
        self._call("cuEventElapsedTime", ctypes.byref(found), begin, end)
        return found.value

    def _attribute(self, number: int) -> int:
        found = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(found), number, self._device)
        return found.value

    def _call(self, name: str, *arguments: Any) -> None:
        code = self._lib[name](*arguments)
        if code:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorName(code, ctypes.byref(text))
            raise CudaError(name, (text.value or b"error %d" % code).decode())
