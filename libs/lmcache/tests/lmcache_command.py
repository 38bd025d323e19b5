"""The command `lmcache` of the environment that runs it, and the command `forks`.

Importing torch and LMCache takes several times as long as starting a server. `forks` imports them once, then reads
lines. Each line is a JSON list of a path and of arguments: a fork runs `lmcache` with these arguments and writes to
that path. The reply is a line with the pid of the fork, which leads a process group. Forks are not reaped, so that a
pid is not reused. All forks are killed at the end of the input.
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
    """Returns in the forks alone, with the arguments of each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of a module at import is no reply
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    gc.disable()  # objects of an import stay: the collector would visit them again and again
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
