"""vLLM announces every connector it makes; thousands of lines hide what a failing test says."""

import logging
import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
logging.getLogger("vllm").setLevel(logging.ERROR)
