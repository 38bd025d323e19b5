"""vLLM announces every connector it makes; thousands of lines hide what a failing test says."""

import gc
import logging
import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
logging.getLogger("vllm").setLevel(logging.ERROR)

# All of vLLM is imported with the tests and stays. Collections that go through it cost a tenth of the time.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
