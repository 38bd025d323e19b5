"""Pins what gpu_test promises: the test sees the GPUs it asked for, and only those."""

import ctypes
import os


def test_the_driver_shows_as_many_gpus_as_the_test_asked_for() -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_int()
    assert driver.cuInit(0) == 0
    assert driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    assert count.value == int(os.environ["HYBRIDKV_TEST_GPUS"])
