"""What to do about errors of people's jobs, by the error's own words.

A job was mostly written for another loop, which began a process group, moved batches and called
backward. The errors that remain of it are Python's and torch's, and lead nowhere in this one.
"""

from __future__ import annotations

from orchestrator.errors import words_of

MEMORY = "more accumulation.steps make the micro-batches smaller"
_BY_WORDS = (
    ("out of memory", MEMORY),  # CUDA's
    ("t allocate memory", MEMORY),  # torch's own on a CPU, and the kernel's
    (
        "Default process group has not been initialized",
        (
            "there is no default process group here, since each run has a group of its own: a job "
            "needs neither torch.distributed nor DistributedDataParallel, as the boundary reduces"
        ),
    ),
    (
        "env:// rendezvous",
        "ranks have met already when a job begins: leave init_process_group() out",
    ),
    (
        "backward through the graph a second time",
        "loss() only returns the loss, and the engine calls backward(): leave loss.backward() out",
    ),
    (
        "Torch not compiled with CUDA enabled",
        "the engine moves model and batches to where a rank computes: leave .cuda() out",
    ),
    ("Cannot copy out of meta tensor", "model() must give a model with numbers (to_empty)"),
    ("EOF when reading a line", "ranks have no terminal to read from"),
)
_BY_KIND = {
    "MemoryError": MEMORY,
    "BdbQuit": "ranks have no terminal for a debugger: leave breakpoint() out, or call the job's "
    "methods in a script of your own",
    "SystemExit": "something in the job ended the process: sys.exit() or exit()",
}


def remedy(error: BaseException) -> str | None:
    """A sentence for who wrote the job; None for an error that tells nothing of this place.

    >>> remedy(ValueError("Default process group has not been initialized, please …"))[:33]
    'there is no default process group'
    """
    text = words_of(error)
    by_words = (sentence for words, sentence in _BY_WORDS if words in text)
    by_kind = (_BY_KIND.get(kind.__name__) for kind in type(error).__mro__)
    return next(by_words, None) or next(filter(None, by_kind), None)
