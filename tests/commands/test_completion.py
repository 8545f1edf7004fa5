"""`lit-grpo completion`: real shells read the script and are asked for completions."""

from __future__ import annotations

import shlex
import shutil
import subprocess

import pytest

from lit_grpo.cli.main import BAD_INPUT, COMMANDS, main
from lit_grpo.commands.completion import ZSH, completion_script
from tests.waiting import PATIENCE


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "lit-grpo.sh"
    path.write_text(completion_script())
    return path


def completed(script, *words: str) -> set[str]:
    """What bash offers for the last of these words."""
    line = (
        f"set -u; . {script}; COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; _lit_grpo; "
        'printf "%s\\n" ${COMPREPLY[@]+"${COMPREPLY[@]}"}; complete -p lit-grpo >&2'
    )
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stderr == "complete -o default -F _lit_grpo lit-grpo\n"
    return set(done.stdout.split())


@pytest.mark.slow
def test_bash_completes_commands_options_keys_and_choices(script):
    assert completed(script, "lit-grpo", "") == {command.name for command in COMMANDS}
    assert completed(script, "lit-grpo", "f") == {"fit", "filter"}
    assert completed(script, "lit-grpo", "score", "--o") == {"--output", "--on-error"}
    assert completed(script, "lit-grpo", "fit", "--model.optimizer.l") >= {"--model.optimizer.lr"}
    assert completed(script, "lit-grpo", "fit", "--conf") == {"--config"}
    assert completed(script, "lit-grpo", "check", "--data.group") == {"--data.group_size"}
    assert completed(script, "lit-grpo", "validate", "--ckpt") == {"--ckpt_path"}
    for written in (["--model.objective.recipe", "dr"], ["--model.objective.recipe", "=", "dr"]):
        assert "dr_grpo" in completed(script, "lit-grpo", "fit", *written)
    # Nothing of its own where a file stands: bash goes on with files.
    assert completed(script, "lit-grpo", "fit", "--config", "conf") == set()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
def test_zsh_reads_it(script, tmp_path):
    both = tmp_path / "both"
    both.write_text(ZSH + script.read_text())
    line = f". {both} && print $_comps[lit-grpo]"
    done = subprocess.run(
        ["zsh", "-f", "-c", line], capture_output=True, text=True, timeout=PATIENCE, env={"HOME": str(tmp_path)}
    )
    assert done.stderr == ""
    assert "_lit_grpo" in done.stdout


def test_another_shell_is_refused(capsys):
    assert main(["completion", "tcsh"]) == BAD_INPUT
    assert "bash" in capsys.readouterr().err
