"""Engine processes are started as soon as the configuration's text says that they will be needed."""

from __future__ import annotations

from collections.abc import Sequence

from lit_grpo.cli.config_files import Layer
from lit_grpo.cli.errors.fast_validation import given_value


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
        # Which number it stands for takes the model to know: most likely one, and where it is another this one ends.
        import torch

        processes = 1 if torch.cuda.is_available() else None
    elif processes == 1:
        # As a number it is the engine in this process.
        return
    if isinstance(processes, int) and 1 <= processes <= 64:
        # It takes the import of torch, which the run needs in any case.
        from lit_grpo.engines.vllm_processes.reserve import begin

        begin(processes)
