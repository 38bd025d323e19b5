"""vLLM announces every connector it makes; thousands of lines hide what a failing test says."""

import gc
import logging
import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
logging.getLogger("vllm").setLevel(logging.ERROR)

# All of vLLM is imported with the tests and stays, and each scenario makes much. Collections took a tenth of the time.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()
