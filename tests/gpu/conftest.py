"""Skips, with the reason, what needs a GPU where there is none. A gpu_test was given one, so it fails instead."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def unavailable(reason: str) -> NoReturn:
    """End the test: there is no GPU, or nothing to run on it."""
    if "HYBRIDKV_TEST_GPUS" in os.environ:
        pytest.fail(f"this test was given a GPU, yet {reason}")
    pytest.skip(reason)
