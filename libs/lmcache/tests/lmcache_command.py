"""The command `lmcache` of the environment that this runs in, and `forks`, a command of ours.

A server takes several times as long to import torch and LMCache as to start. `forks` imports them once. Then it reads
lines: each is a JSON list of a path and of arguments, for a fork that goes on as `lmcache` with these arguments and
writes to that path. The answer is a line with the fork's number, which leads a process group. No fork is waited for, so
that its number remains its own. At the end of the lines all forks are killed.
"""

import gc
import importlib
import json
import os
import signal
import sys
from typing import Final

_MODULES: Final = ("lmcache.cli.main", "lmcache.v1.multiprocess.http_server")


def in_fork() -> list[str]:
    """Returns in forks alone, with the arguments of each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a module that says something when it is imported gives no answer
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    gc.disable()  # an import makes objects that stay: the collector would look at them again and again
    for name in _MODULES:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    if others := len(os.listdir("/proc/self/task")) - 1:
        raise RuntimeError(f"importing LMCache started {others} threads, which a fork would not have")
    forks: list[int] = []
    while line := sys.stdin.readline():
        path, arguments = json.loads(line)
        fork = os.fork()
        if fork == 0:
            answers.close()
            for descriptor, target, flags in (
                (0, os.devnull, os.O_RDONLY),
                (1, path, os.O_WRONLY | os.O_APPEND | os.O_CREAT),
            ):
                opened = os.open(target, flags, 0o644)
                os.dup2(opened, descriptor)
                os.close(opened)
            os.dup2(1, 2)
            return [str(each) for each in arguments]
        os.setpgid(fork, fork)
        forks.append(fork)
        print(fork, file=answers, flush=True)
    for fork in forks:
        os.killpg(fork, signal.SIGKILL)
    sys.exit()


if __name__ == "__main__":
    if sys.argv[1:] == ["forks"]:
        sys.argv[1:] = in_fork()
    from lmcache.cli.main import main

    sys.exit(main())
