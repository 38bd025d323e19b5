"""README.md runs as printed, as far as it needs no torch."""

from documents import programs, run


def test_the_example_of_a_chunk_runs() -> None:
    [program] = programs(with_torch=False)
    run(program)
