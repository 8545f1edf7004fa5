"""Engine processes are started as soon as the configuration's text says that they will be needed."""

from __future__ import annotations

from collections.abc import Sequence

from lit_grpo.cli.config_files import Layer
from lit_grpo.cli.errors.fast_validation import given_value
from lit_grpo.engines.vllm_processes.reserve import begin


def start_ahead(command: str, argv: Sequence[str], layers: Sequence[Layer]) -> None:
    """Start the processes of the run's engine, if files and command line name some; a run that has none starts nothing.

    They import vLLM beside this process, which has seconds of imports before it. Where the configuration turns out to
    mean something else they are not used, and end.
    """

    def given(key: str) -> object:
        return given_value(command, argv, layers, key)

    processes = given("data.engine.processes")
    if any(word.startswith("--print_config") for word in argv) or given("model.objective.recipe") == "sft":
        return
    if given("data.engine.name") != "vllm" or given("data.engine.custom_engine"):
        return
    if processes == "auto":
        # Which number it stands for takes the model to know: on a card most likely one, which ends where it is another.
        begin(None)
    # As a number, 1 is the engine in this process.
    elif isinstance(processes, int) and 2 <= processes <= 64:
        begin(processes)
