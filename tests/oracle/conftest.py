"""Quiets the log: vLLM logs every connector that it makes, which would hide the output of a failing test."""

import gc
import logging
import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
logging.getLogger("vllm").setLevel(logging.ERROR)

# All of vLLM is imported with the tests and stays in memory. Collections that visit it cost a tenth of the time.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
