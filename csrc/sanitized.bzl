"""Tests with a sanitizer in the whole program, including the library under test."""

load("@rules_cc//cc:defs.bzl", "cc_library", "cc_test")

_SANITIZERS = {
    "address": ["-fsanitize=address,undefined"],
    "thread": ["-fsanitize=thread"],
}

def _copts(options):
    return options + ["-O2", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]

def sanitized_library(name, **kwargs):
    """`<name>_address` and `<name>_thread`: a library for `sanitized_tests`, compiled once for all of them.

    Args:
        name: the start of the libraries' names.
        **kwargs: forwarded to cc_library.
    """
    for sanitizer, options in _SANITIZERS.items():
        cc_library(
            name = "%s_%s" % (name, sanitizer),
            testonly = True,
            copts = _copts(options),
            linkstatic = True,
            tags = ["full"],
            **kwargs
        )

def sanitized_tests(name, srcs, deps, library = None, **kwargs):
    """`<name>_address_test` and `<name>_thread_test`: part of `--config=full`.

    `--config=asan`, `ubsan` and `tsan` put a sanitizer into any C++ target; these two tests need no second build of the
    other targets.

    Args:
        name: the test's name without `_test`.
        srcs: its sources.
        deps: header-only libraries.
        library: the `sanitized_library` under test, if it is not among deps.
        **kwargs: forwarded to cc_test.
    """
    for sanitizer, options in _SANITIZERS.items():
        cc_test(
            name = "%s_%s_test" % (name, sanitizer),
            srcs = srcs,
            copts = _copts(options),
            linkopts = options + ["-lpthread"],
            tags = ["full"],
            deps = deps + (["%s_%s" % (library, sanitizer)] if library else []),
            **kwargs
        )
