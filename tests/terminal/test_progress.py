"""The progress of runs as it is drawn and printed."""

import io
import os
import sys
import time
import warnings

import lightning.pytorch as pl
import pytest
from rich.console import Console

from lit_grpo.terminal import progress as progress_module
from lit_grpo.terminal.console import make_console
from lit_grpo.terminal.figures import chosen
from lit_grpo.terminal.progress import RunProgress
from tests import tiny
from tests.tracking.stand_in import StandIn, StandInLoader, make_trainer


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def terminal(width=80, term="xterm"):
    return make_console(Terminal(), width=width, _environ={"TERM": term}, legacy_windows=False)


def fit(callbacks, rollouts=3, module=None, **settings):
    trainer = make_trainer(False, callbacks, enable_progress_bar=True, **settings)
    trainer.fit(module or StandIn(), StandInLoader(rollouts))
    return trainer


def test_a_pipe_gets_one_line_a_rollout(tmp_path, capsys):
    fit([RunProgress()], default_root_dir=tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("  ")[0] for line in lines] == ["rollout 1/3", "rollout 2/3", "rollout 3/3"]
    assert "rollout 2/3  reward 0.100  entropy 0.500  length 2.000" in lines[1]
    assert lines[1].endswith("0 s left")
    assert "left" not in lines[2]


def test_rollouts_are_counted_over_all_epochs(tmp_path, capsys):
    trainer = make_trainer(False, [RunProgress()], enable_progress_bar=True, default_root_dir=tmp_path, max_epochs=2)

    class Again(StandInLoader):
        def __iter__(self):
            self.next = 0
            return super().__iter__()

    trainer.fit(StandIn(), Again(2))
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["1/4", "2/4", "3/4", "4/4"]


def test_a_terminal_is_drawn_on_in_place_and_given_back(tmp_path, capsys):
    console, streams = terminal(), (sys.stdout, sys.stderr)

    class Speaks(pl.Callback):
        def on_train_batch_end(self, *_):
            print("a line between")

    progress = RunProgress(console)
    fit([progress, Speaks()], default_root_dir=tmp_path)
    text = console.file.getvalue()
    assert (sys.stdout, sys.stderr) == streams
    assert text.count("a line between") == 3
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is back
    last = text[text.rindex("rollout 3/3") :]
    assert "100%" in last
    assert "reward 0.200" in last
    # The phases end with the run.
    assert "generate" not in last
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()])
def test_a_run_that_breaks_off_gives_the_terminal_back(tmp_path, error):
    console, streams = terminal(), (sys.stdout, sys.stderr)

    class Breaks(StandIn):
        def during_step(self, batch_idx):
            if batch_idx == 1:
                raise error

    with pytest.raises((RuntimeError, SystemExit, KeyboardInterrupt)):
        fit([RunProgress(console)], module=Breaks(), default_root_dir=tmp_path)
    text = console.file.getvalue()
    assert (sys.stdout, sys.stderr) == streams
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert not progress_module._drawing


def test_a_dumb_terminal_gets_lines(tmp_path, capsys):
    console = terminal(term="dumb")
    fit([RunProgress(console)], default_root_dir=tmp_path)
    assert console.file.getvalue() == ""
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_an_error_log_is_not_drawn_into_the_terminal(tmp_path, capsys):
    """Standard error that goes to a file stays there, whatever is drawn on standard output."""
    console = terminal()

    class Speaks(pl.Callback):
        def on_train_batch_end(self, *_):
            print("for the log", file=sys.stderr)

    fit([RunProgress(console), Speaks()], default_root_dir=tmp_path)
    assert "for the log" not in console.file.getvalue()
    assert capsys.readouterr().err.count("for the log") == 3


def test_disabled_it_shows_nothing(tmp_path, capsys):
    console = terminal()
    progress = RunProgress(console)
    progress.disable()
    fit([progress], default_root_dir=tmp_path)
    assert console.file.getvalue() + capsys.readouterr().out == ""


def test_a_child_process_writes_to_the_real_streams(tmp_path):
    """A thread of the parent may hold the lock of what is drawn, for ever in a child."""
    console, found = terminal(), []

    class Forks(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            read, write = os.pipe()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                child = os.fork()
            if child == 0:
                os.write(write, str(sys.stdout is sys.__stdout__).encode())
                os._exit(0)
            os.waitpid(child, 0)
            found.append(os.read(read, 10))

    fit([RunProgress(console), Forks()], rollouts=1, default_root_dir=tmp_path)
    assert found == [b"True"]


def test_phases_of_a_real_run(tmp_path):
    seen = []

    class Told(RunProgress):
        def _begin(self, phase):
            seen.append(phase)
            super()._begin(phase)

    trainer = make_trainer(False, [Told(terminal())], enable_progress_bar=True, default_root_dir=tmp_path)
    trainer.fit(tiny.module(), datamodule=tiny.data(rollouts=2))
    begin = seen.index("sync")
    assert seen[0] == "start"
    # The check of the first sync samples a little.
    assert list(dict.fromkeys(seen[begin:])) == ["sync", "generate", "rewards", "learn", "end"]
    assert seen.count("rewards") == seen.count("learn") == 2


def test_phases_of_another_thread_do_not_hide_the_learner(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    progress = RunProgress()
    with ThreadPoolExecutor(1) as pool:
        progress._begin("learn")
        pool.submit(progress.on_phase, "generate").result()
        assert progress._phase == "learn"
        progress._begin("sync")
        pool.submit(progress.on_phase, "generate").result()
        assert progress._phase == "generate"


def test_time_left_leaves_the_first_rollout_out(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    progress = RunProgress()
    progress._total, progress._rollout_began = 10, 0.0
    for done, now in ((1, 100.0), (2, 102.0), (3, 104.0)):
        clock[0], progress._done = now, done
        progress._estimate()
    assert progress._left == pytest.approx(2.0 * 7)
    clock[0] += 3
    assert progress._state().left == pytest.approx(11.0)


def test_figures_that_were_not_measured_are_left_out():
    logged = {"reward": 0.5, "loss": 1.0, "policy/entropy": float("nan")}
    assert chosen(logged, {"reward": 0.5, "mine": 2.0}) == {"reward": 0.5, "mine": 2.0}
    assert chosen({"loss": 1.0}, {}) == {"loss": 1.0}


def test_an_evaluation_shows_its_batches(tmp_path):
    progress, shown = RunProgress(terminal()), []

    class Evaluated(StandIn):
        def validation_step(self, batch, batch_idx):
            shown.append(str(progress._drawn()).splitlines()[0])

    trainer = make_trainer(False, [progress], enable_progress_bar=True, default_root_dir=tmp_path)
    trainer.validate(Evaluated(), StandInLoader(3), verbose=False)
    assert shown == ["evaluate 0/3 0 s", "evaluate 1/3 0 s", "evaluate 2/3 0 s"]
    assert "start" in progress._console.file.getvalue()  # type: ignore[union-attr]


def test_panels_stand_above_the_drawing_of_another_bar(monkeypatch):
    from rich.live import Live

    from lit_grpo.terminal.panels import show

    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    with Live("the bar of another", console=Console(width=80, _environ={"TERM": "xterm"}), auto_refresh=False) as live:
        live.refresh()
        show("Run exp1", [("recipe", "grpo")])
    text = stream.getvalue()
    # The bar is erased before the panel, and drawn again below it.
    assert text.index("the bar of another") < text.index("\x1b[2K") < text.index("Run exp1")
    assert text.rindex("the bar of another") > text.index("grpo")


def test_any_other_bar_is_left_alone(tmp_path):
    """A plain Trainer keeps its own bar, and refuses ours where bars are switched off, as with any other."""
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException):
        make_trainer(False, [RunProgress()], default_root_dir=tmp_path)
    trainer = make_trainer(False, [RunProgress()], enable_progress_bar=True, default_root_dir=tmp_path)
    assert isinstance(trainer.progress_bar_callback, RunProgress)
