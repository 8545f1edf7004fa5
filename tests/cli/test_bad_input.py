"""Bad input: exit code 2, no traceback, no usage, one screen with key, place, value and the nearest valid name."""

import io
import os
import subprocess
import sys

import pytest

from lit_grpo.cli.main import main
from tests.paths import ROOT

MODEL = "model:\n  policy: {tiny: {}}\n"
DATA = """\
data:
  prompts: {class_path: lit_grpo.data.AdditionPrompts}
  rewards:
    - {class_path: lit_grpo.rewards.ExactMatch}
"""
GOOD = MODEL + DATA


@pytest.fixture(autouse=True)
def no_model(monkeypatch, tmp_path):
    """Nothing here may get as far as a model, a run folder or MLflow."""
    from lit_grpo.learner import models

    def loaded(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(models, "load_model", loaded)
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def screen(tmp_path, capsys):
    def screen(*arguments, **files):
        for name, text in files.items():
            (tmp_path / f"{name}.yaml").write_text(text)
        assert main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "Traceback" not in captured.err
        assert "usage:" not in captured.err
        lines = captured.err.splitlines()
        assert len(lines) < 20
        return " ".join(" ".join(lines).split())

    return screen


# (the file, what must be on the screen)
IN_A_FILE = {
    "key of a dataclass": (
        "model:\n  policy:\n    pth: x\n" + DATA,
        ["`model.policy` has no key `pth`", "a.yaml:3", "pth: x", "did you mean `model.policy.path`?"],
    ),
    "key of an optional dataclass": (
        "model:\n  policy:\n    tiny:\n      widht: 3\n" + DATA,
        ["no argument `widht`", "a.yaml:4", "did you mean `width`?"],
    ),
    "top-level key": ("modle:\n  policy: {tiny: {}}\n" + DATA, ["no key `modle`", "a.yaml:1", "did you mean `model`?"]),
    "key of the trainer": (
        "trainer:\n  max_epoch: 3\n" + GOOD,
        ["`trainer` has no key `max_epoch`", "a.yaml:2", "`trainer.max_epochs`"],
    ),
    "key in the wrong place": ("trainer:\n  lr: 1\n" + GOOD, ["a.yaml:2", "did you mean `model.optimizer.lr`?"]),
    "recipe": (
        "model:\n  policy: {tiny: {}}\n  objective:\n    recipe: dappo\n" + DATA,
        ["`model.objective.recipe` cannot be 'dappo'", "a.yaml:4", "did you mean 'dapo'", "dr_grpo"],
    ),
    "recipe with two letters swapped": (
        "model:\n  policy: {tiny: {}}\n  objective: {recipe: gpro}\n" + DATA,
        ["`model.objective.recipe` cannot be 'gpro'", "did you mean 'grpo'? Choose"],
    ),
    "two models": (
        "model:\n  policy: {tiny: {}, path: somewhere}\n" + DATA,
        ["has both `path`", "a.yaml:2", "--model.policy.tiny null"],
    ),
    "logger by its nickname": (
        "trainer: {logger: tensorboard}\n" + GOOD,
        ["'tensorboard' is no import path", "a.yaml:1", "did you mean lightning.pytorch.loggers.TensorBoardLogger?"],
    ),
    "optional choice": (
        "model:\n  policy: {tiny: {}}\n  objective: {advantage: gruop_std}\n" + DATA,
        ["`model.objective.advantage` cannot be 'gruop_std'", "a.yaml:3", "'group_std'"],
    ),
    "number": (
        "model:\n  policy: {tiny: {}}\n  optimizer:\n    lr: fast\n" + DATA,
        ["`model.optimizer.lr` cannot be 'fast'", "a.yaml:4", "give a number"],
    ),
    "whole number": (
        MODEL + DATA + "  group_size: 2.5\n",
        ["`data.group_size` cannot be '2.5'", "a.yaml:7", "give a whole number"],
    ),
    "number of a list": (
        GOOD + "  engine: {cards: many}\n",
        ["a.yaml:7", "give a list or null, for example cards: [0, 1]"],
    ),
    "recipe in the place of the objective": (
        MODEL + "  objective: dapo\n" + DATA,
        ["`model.objective` takes keys below it, not 'dapo'", "a.yaml:3", "did you mean objective: {recipe: dapo}?"],
    ),
    "engine in the place of its settings": (
        GOOD + "  engine: vllm\n",
        ["`data.engine` takes keys below it, not 'vllm'", "a.yaml:7", "did you mean engine: {name: vllm}?"],
    ),
    "folder in the place of the policy": (
        "model:\n  policy: models/mine\n" + DATA,
        ["`model.policy` takes keys below it, not 'models/mine'", "did you mean policy: {path: models/mine}?"],
    ),
    "number in the place of an optional part": (
        MODEL + "  critic: 3\n" + DATA,
        ["`model.critic` takes keys below it, not '3'", "a.yaml:3", "for example critic: {backbone: separate}"],
    ),
    "source in the place of the held-out sets": (
        GOOD + "  val: {class_path: lit_grpo.data.JsonlPrompts, init_args: {path: x.jsonl}}\n",
        [
            "`data.val` takes sets by name",
            "a.yaml:7",
            "write val_prompts: {class_path: lit_grpo.data.JsonlPrompts, ...}",
        ],
    ),
    "engine": (GOOD + "  engine: {name: vlm}\n", ["`data.engine.name` cannot be 'vlm'", "a.yaml:7", "'vllm'"]),
    "class": (
        MODEL + DATA.replace("AdditionPrompts", "AdditionPromts"),
        ["AdditionPromts", "a.yaml:4", "did you mean lit_grpo.data.AdditionPrompts?"],
    ),
    "class in a list": (
        MODEL + DATA.replace("ExactMatch", "ExactMtch"),
        ["ExactMtch", "a.yaml:6", "did you mean lit_grpo.rewards.ExactMatch?"],
    ),
    "class without module": (
        MODEL + DATA.replace("lit_grpo.rewards.ExactMatch", "ExactMtch"),
        ["'ExactMtch' is no import path", "a.yaml:6", "lit_grpo.rewards.ExactMatch"],
    ),
    "module": (
        MODEL + DATA.replace("lit_grpo.rewards.", "lit_grpo.rewrads."),
        ["lit_grpo.rewrads", "a.yaml:6", "did you mean lit_grpo.rewards.ExactMatch?"],
    ),
    "module of somebody": (
        MODEL + DATA.replace("lit_grpo.rewards.ExactMatch", "my_rewards.Mine"),
        ["my_rewards", "a.yaml:6", "is it installed, or in the folder you are in?"],
    ),
    "class of another kind": (
        MODEL + DATA.replace("lit_grpo.rewards.ExactMatch", "lit_grpo.data.AdditionPrompts"),
        ["is no Reward", "a.yaml:6"],
    ),
    "argument of a class": (
        MODEL + DATA.replace("ExactMatch}", "ExactMatch, init_args: {wieght: 2}}"),
        ["no argument `wieght`", "a.yaml:6", "did you mean `weight`?"],
    ),
    "value of a class's argument": (
        MODEL + DATA.replace("ExactMatch}", "ExactMatch, init_args: {weight: heavy}}"),
        ["ExactMatch.weight` cannot be 'heavy'", "a.yaml:6", "give a number"],
    ),
    "missing argument of a class": (
        MODEL + DATA.replace("AdditionPrompts", "JsonlPrompts"),
        ["JsonlPrompts needs `path`", "a.yaml:4"],
    ),
    "callback": (
        "trainer:\n  callbacks:\n    - class_path: lit_grpo.callbacks.RolloutChekpoint\n" + GOOD,
        ["RolloutChekpoint", "a.yaml:3", "did you mean lit_grpo.callbacks.RolloutCheckpoint?"],
    ),
    "value a callback refuses": (
        "trainer:\n  callbacks:\n    - class_path: lit_grpo.callbacks.RolloutCheckpoint\n"
        "      init_args:\n        keep_last: 0\n" + GOOD,
        ["keep_last is 0", "a.yaml:5"],
    ),
    "value a module refuses": (
        GOOD + "  group_size: 0\n",
        ["group_size is 0, must be at least 1", "a.yaml:7"],
    ),
    "missing model folder": (
        "model:\n  policy: {path: ./no/such/model}\n" + DATA,
        ["there is no model folder no/such/model", "a.yaml:2"],
    ),
    "what manual optimization cannot do": (
        "trainer: {gradient_clip_val: 1.0}\n" + GOOD,
        ["trainer.gradient_clip_val is 1.0", "a.yaml:1", "set model.max_grad_norm"],
    ),
    "strategy": ("trainer: {strategy: ddpp}\n" + GOOD, ["invalid strategy name", "ddpp", "a.yaml:1"]),
    "YAML": ("model: [\n" + DATA, ["not valid YAML", "a.yaml:3"]),
    "tab": ("model:\n\tpolicy: 1\n", ["not valid YAML", "a.yaml:2", "indent with spaces"]),
    "double key": (GOOD + "model:\n  policy: 1\n", ["`model` is there twice, first in line 1", "a.yaml:7"]),
    "no mapping": ("- a\n", ["holds keys and values", "a.yaml:1"]),
}


@pytest.mark.parametrize(("text", "expected"), IN_A_FILE.values(), ids=IN_A_FILE.keys())
def test_in_a_file(screen, text, expected):
    shown = screen("fit", "--config", "a.yaml", a=text)
    for part in expected:
        assert part in shown


# (arguments behind a good configuration, what must be on the screen)
ON_THE_COMMAND_LINE = {
    "option": (["--model.policy.pth", "x"], ["no option --model.policy.pth", "did you mean --model.policy.path?"]),
    "option misspelt at its top": (["--modle.policy.path", "x"], ["did you mean --model.policy.path?"]),
    "choice": (
        ["--model.objective.recipe", "dappo"],
        ["cannot be 'dappo'", "where: command line, --model.objective.recipe dappo", "did you mean 'dapo'"],
    ),
    "argument of a class": (
        ["--trainer.logger.rot=x"],
        ["RunLogger has no argument `rot`", "command line, --trainer.logger.rot x", "did you mean `root`?"],
    ),
    "value a class refuses": (["--data.prompts.digits=0"], ["0 is no range of digits", "--data.prompts.digits 0"]),
    "argument of a class, shortened": (["--trainer.logger.roo=x"], ["no argument `roo`", "did you mean `root`?"]),
    "its init_args misspelt": (["--trainer.logger.init_arg.root=x"], ["no argument `init_arg`", "mean `init_args`?"]),
    "all arguments of a class, one misspelt": (
        ["--data.prompts.init_args", "{dgits: 2}"],
        ["AdditionPrompts has no argument `dgits`", "command line, --data.prompts.init_args {dgits: 2}", "`digits`?"],
    ),
    "all arguments of a class, one wrong": (
        ["--data.prompts.init_args", "{digits: x}"],
        ["AdditionPrompts.digits` cannot be 'x'", "--data.prompts.init_args {digits: x}", "for example digits: 1"],
    ),
    "no arguments of a class": (
        ["--data.prompts.init_args", "5"],
        ["takes the arguments of a class as keys and values, not '5'", "command line, --data.prompts.init_args 5"],
    ),
    "argument of the last reward": (
        ["--data.rewards.weight", "heavy"],
        ["ExactMatch.weight` cannot be 'heavy'", "remedy: give a number, for example --data.rewards.weight 1.0"],
    ),
    "argument inside of what is typed": (
        ["--data.rewards", "[{class_path: ExactMatch, init_args: {weight: heavy}}]"],
        ["ExactMatch.weight` cannot be 'heavy'", "give a number, for example weight: 1.0"],
    ),
    "key in a value": (
        ["--model.policy", "{tiny: {}, compil: true}"],
        ["`model.policy` has no key `compil`", "command line, --model.policy {tiny: {}, compil: true}"],
    ),
    "below a number": (["--data.rollouts.x=3"], ["no option --data.rollouts.x", "`data.rollouts` has no keys below"]),
    "what to print": (["--print_config=skip_defaul"], ["`--print_config` cannot be 'skip_defaul'", "'skip_default'"]),
    "seed": (["--seed_everything", "-1"], ["no seed", "--seed_everything -1"]),
    "value missing": (
        ["--data.rollouts"],
        ["--data.rollouts has no value behind it", "for example --data.rollouts 100"],
    ),
    "word": (["stray"], ["'stray' is not expected here"]),
    "file": (["--config", "aa.yaml"], ["no configuration file aa.yaml", "did you mean a.yaml?"]),
    # All that it has in common with a.yaml is the ending.
    "another file": (["--config", "none.yaml"], ["no configuration file none.yaml", "you are in "]),
    "checkpoint": (["--ckpt_path", "best"], ["there is no best checkpoint", "--ckpt_path best"]),
    "sharding": (
        ["--trainer.strategy", "fsdp_cpu_offload"],
        ["FSDP1", "command line, --trainer.strategy fsdp_cpu_offload", "model.sharding.cpu_offload: true"],
    ),
    "function in the place of rewards": (
        ["--data.rewards", "reward.right_sum"],
        ["`data.rewards` cannot be 'reward.right_sum'", "FunctionReward, init_args: {function: reward.right_sum}}]"],
    ),
    "class in the place of rewards": (
        ["--data.rewards", "ExactMatch"],
        ["give a list, for example --data.rewards '[ExactMatch]'"],
    ),
    "function among rewards": (
        ["--data.rewards", "[os.path.join]"],
        ["'os.path.join' is no Reward", "FunctionReward, init_args: {function: os.path.join}}]"],
    ),
    "text in the place of sets": (
        ["--data.val", "rows.jsonl"],
        ["remedy: give a mapping or null, for example --data.val '{gsm8k: {limit: 100}}'"],
    ),
    "text in the place of a list": (
        ["--data.engine.cards", "many"],
        ["`data.engine.cards` cannot be 'many'", "give a list or null, for example --data.engine.cards '[0, 1]'"],
    ),
    "a word in the place of a list of words": (["--data.sampling.stop", "done"], ["--data.sampling.stop '["]),
    "text in the place of a mapping": (
        ["--data.engine.args", "fast"],
        ["give a mapping, for example --data.engine.args '{enforce_eager: true}'"],
    ),
    "text in the place of a number": (["--model.objective.clip_low", "x"], ["example --model.objective.clip_low 0.2"]),
    "text or a word": (["--trainer.deterministic", "x"], ["Choose one of warn, true or false"]),
    "number in the place of a group": (
        ["--model.optimizer", "1e-5"],
        ["`model.optimizer` takes keys below it, not '1e-5'", "did you mean --model.optimizer.lr 1e-5?"],
    ),
    "choice in the place of a group": (["--data.engine", "vllm"], ["did you mean --data.engine.name vllm?"]),
    "number in the place of an optional group": (
        ["--model.policy.lora", "16"],
        ["`model.policy.lora` takes keys below it, not '16'", "did you mean --model.policy.lora.rank 16?"],
    ),
    "list in the place of an optional group": (
        ["--model.critic", "[shared]"],
        ["give its keys, for example --model.critic.backbone separate"],
    ),
    "a file that is near nothing": (["--config", "gsm8.yaml"], ["no configuration file gsm8.yaml", "which has a.yaml"]),
    "key of a set that no file has": (
        ["--data.val.mine.limt", "20"],
        ["EvaluationSet has no argument `limt`", "--data.val.mine.limt 20", "did you mean `limit`?"],
    ),
    "store": (["--trainer.logger.tracking_uri", "file:x"], ["plain files", "--trainer.logger.tracking_uri file:x"]),
}


@pytest.mark.parametrize(("words", "expected"), ON_THE_COMMAND_LINE.values(), ids=ON_THE_COMMAND_LINE.keys())
def test_on_the_command_line(screen, words, expected):
    shown = screen("fit", "--config", "a.yaml", *words, a=GOOD)
    for part in expected:
        assert part in shown


def test_the_layer_that_is_wrong_is_named(screen):
    shown = screen(
        "fit", "--config", "a.yaml", "--config=b.yaml", a=GOOD + "  group_size: 4\n", b="\ndata:\n  group_size: many\n"
    )
    assert "b.yaml:3" in shown
    assert "a.yaml" not in shown


def test_the_environment_is_named(screen, monkeypatch):
    monkeypatch.setenv("LIT_GRPO_FIT__DATA__GROUP_SIZE", "many")
    assert "environment variable LIT_GRPO_FIT__DATA__GROUP_SIZE" in screen("fit", "--config", "a.yaml", a=GOOD)


def test_missing_keys(screen):
    assert "is given no configuration" in screen("fit")
    assert "lit-grpo fit --config a.yaml;" in screen("fit", "a.yaml", a=GOOD)
    assert "the policy needs either `path`" in screen("fit", "--model.max_grad_norm", "1")
    assert "no reward is given" in screen("fit", "--model.policy.tiny", "{}")
    without = DATA.replace("prompts: {class_path: lit_grpo.data.AdditionPrompts}", "group_size: 2")
    assert without != DATA
    assert "`fit` needs questions to train on" in screen("fit", "--config", "a.yaml", a=MODEL + without)
    assert "data.test names no set" in screen("test", "--config", "a.yaml", a=MODEL + DATA)


def test_commands(screen):
    assert "did you mean 'fit'?" in screen("fti")
    assert "the command comes first" in screen("--config", "a.yaml", "fit")
    assert "did you mean --checkpoint?" in screen("export", "--output", "x", "--checkpoint", "y", "--checkpiont", "z")


def test_a_file_named_as_a_section_is_its_own_place(screen, tmp_path):
    (tmp_path / "data.jsonl").write_text("")
    data = DATA.replace("AdditionPrompts}", "JsonlPrompts, init_args: {path: data.jsonl}}")
    shown = screen("fit", "--config", "a.yaml", a=MODEL + data)
    assert "there are no rows where: data.jsonl remedy" in shown


def test_options_of_the_logger_and_of_other_programs_are_told_their_places(screen):
    assert "--trainer.logger.run_name" in screen("fit", "--config", "a.yaml", "--run_name", "x", a=GOOD)
    assert "--trainer.default_root_dir" in screen("fit", "--config", "a.yaml", "--output_dir", "x", a=GOOD)
    assert "--seed_everything" in screen("fit", "--config", "a.yaml", "--seed", "3", a=GOOD)


def test_screens_fit_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["fit", "--run_name", "x"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) <= 40


@pytest.mark.parametrize("command", ["check", "filter", "score", "export", "report", "init", "schema", "completion"])
def test_help_is_as_wide_as_the_terminal_but_for_commands(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "70")
    assert main([command, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 70 and not line.startswith(" ")] == []
    assert any(line.lstrip().startswith("lit-grpo ") for line in lines), "what can be copied stands on lines of its own"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["export"], ["--checkpoint and --output are missing", "as in lit-grpo export --checkpoint "]),
        (["report"], ["RUN is missing", "as in lit-grpo report runs/NAME"]),
        (["check", "--prompts", "two"], ["--prompts takes a whole number, not 'two'", "for example --prompts 8"]),
        (["completion", "zhs"], ["shell cannot be 'zhs'", "did you mean zsh?"]),
        (["completion", "fish"], ["shell cannot be 'fish'", "choose one of bash, zsh"]),
        (["schema", "--output"], ["--output has no value behind it", "as in lit-grpo schema --output schema.json"]),
    ],
)
def test_what_is_wrong_with_options_is_told_with_an_example(screen, words, expected):
    shown = screen(*words)
    for part in expected:
        assert part in shown


def test_a_stream_of_few_letters_ends_nothing(monkeypatch, tmp_path):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict", write_through=True)
    monkeypatch.setattr("sys.stdout", stream)
    assert main(["init", "süße Summen"]) == 0
    assert b"s\\xfc\\xdfe Summen" in stream.buffer.getvalue()


def test_bad_data_is_found_before_a_model_is_loaded(screen, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": \n')
    data = DATA.replace("AdditionPrompts}", "JsonlPrompts, init_args: {path: bad.jsonl}}")
    assert "bad.jsonl:2" in screen("fit", "--config", "a.yaml", a=MODEL + data)


def test_a_file_of_rows_is_its_own_place(screen, tmp_path):
    """Its name looks like a key, `rows.jsonl`, which stands in no configuration."""
    (tmp_path / "rows.jsonl").touch()
    data = DATA.replace("AdditionPrompts}", "JsonlPrompts, init_args: {path: other.jsonl}}")
    shown = screen("fit", "--config", "a.yaml", "--data.prompts.path", "rows.jsonl", a=MODEL + data)
    assert "there are no rows where: rows.jsonl remedy:" in shown


def test_debug_shows_the_traceback_too(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("LIT_GRPO_DEBUG", "1")
    assert main(["fit", "--config", "none.yaml"]) == 2
    captured = capsys.readouterr()
    assert "Traceback" in captured.err
    assert "there is no configuration file none.yaml" in captured.err


def test_help_and_early_errors_import_nothing_heavy(tmp_path):
    """This is why `lit-grpo --help` answers in less than two seconds, most of which is Python's own start."""
    code = (
        "import sys\n"
        "from lit_grpo.cli.main import main\n"
        "assert main(['--help']) == 0 and main(['--version']) == 0\n"
        "assert main(['fit', '--config', 'none.yaml']) == 2\n"
        "heavy = {'torch', 'lightning', 'transformers', 'mlflow', 'jsonargparse', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for word in ("fit", "validate", "test", "predict", "export", "--config", "examples:", "exit codes"):
        assert word in done.stdout
    assert "lit-grpo " in done.stdout.splitlines()[-1]


def test_an_unknown_key_with_nothing_in_it_is_found(screen):
    assert "no key `sumary`" in screen("fit", "--config", "a.yaml", a="sumary: {}\n" + GOOD)


JSONL = "data:\n  prompts:\n    class_path: lit_grpo.data.JsonlPrompts\n    init_args:\n      path: x.jsonl\n"
HUB = "data:\n  prompts:\n    class_path: lit_grpo.data.ParquetPrompts\n"


def test_arguments_of_one_class_do_not_become_anothers(screen):
    """The parser would read x.jsonl as Parquet, and say nothing."""
    shown = screen("fit", "--config", "a.yaml", "--config", "b.yaml", "--config", "c.yaml", a=GOOD, b=JSONL, c=HUB)
    assert "would take over `path`, set for the other class in b.yaml:5" in shown
    assert "c.yaml:3" in shown
    shown = screen("fit", "--config", "a.yaml", "--config", "b.yaml", "--data.prompts=lit_grpo.data.ParquetPrompts")
    assert "would take over `path`" in shown
    # Set again, it is nobody else's: then only the file itself is missing.
    own = ["--data.prompts=lit_grpo.data.ParquetPrompts", "--data.prompts.path=y.parquet"]
    assert "y.parquet" in screen("fit", "--config", "a.yaml", "--config", "b.yaml", *own)
