"""What is typed for classes, their arguments, groups and sets: the screen names it, and its example is accepted."""

import re
import shlex

import pytest
import yaml

from lit_grpo.cli.main import main

CONFIG = """\
model:
  policy: {tiny: {}}
data:
  prompts: {class_path: lit_grpo.data.AdditionPrompts, init_args: {digits: 1}}
  rewards:
    - {class_path: lit_grpo.rewards.ExactMatch}
    - {class_path: lit_grpo.rewards.MathReward, init_args: {weight: 2.0}}
  val: {mine: {path: v.jsonl}}
trainer:
  callbacks:
    - class_path: lit_grpo.callbacks.HealthMonitor
"""
INTERNAL = re.compile(
    r"_Typed|NestedArg|Namespace|<class|object has no|Traceback|Expected a|Union|Subclasses are|'None'"
)


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "110")
    (tmp_path / "c.yaml").write_text(CONFIG)
    # As a file that is there, it would be read for a mapping.
    (tmp_path / "x.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')


@pytest.fixture
def fit(capsys):
    def fit(*words):
        code = main(["fit", "--config", "c.yaml", *words, "--print_config"])
        captured = capsys.readouterr()
        return code, captured.out, " ".join(captured.err.split())

    return fit


def part(screen, name):
    found = re.search(rf"{name}: (.*?)(?= where: | remedy: |$)", screen)
    return found[1].strip() if found else ""


def example(remedy):
    """The options that a remedy names, as the shell would read them; empty if it names none."""
    found = re.search(r"(?:for example|did you mean) (--[^?]*)", remedy)
    return shlex.split(found[1]) if found else []


HEALTH = "trainer.callbacks: HealthMonitor"

# (words, what is wrong, remedy); the place is the option that holds it, unless a third text names another.
WRONG = {
    "no arguments": (
        ["--data.prompts.init_args", ""],
        "`data.prompts.init_args` takes the arguments of a class as keys and values, not ''",
        "for example --data.prompts.init_args '{digits: 1}'",
    ),
    "null for the arguments": (["--data.prompts.init_args=null"], "not 'null'", "'{digits: 1}'"),
    "a number for the arguments of the last reward": (
        ["--data.rewards.init_args", "3"], "`data.rewards.init_args` takes", "--data.rewards.init_args '{limit: 5.0}'",
    ),
    "arguments of what is no class": (
        ["--data.group_size.init_args", "8"], "there is no option --data.group_size.init_args", "has no keys below it",
        "command line",
    ),
    "an open brace": (
        ["--data.prompts.init_args", "{digits: 2"], "is not closed", "mean --data.prompts.init_args '{digits: 2}'?",
    ),
    "an open bracket": (
        ["--data.rewards", "[ExactMatch"], "is not closed", "did you mean --data.rewards '[ExactMatch]'?",
    ),
    "a number for text in a mapping": (
        ["--data.prompts=JsonlPrompts", "--data.prompts.init_args", "{path: 007}"],
        "JsonlPrompts.path` cannot be '7'", "quotes make it text: path: '007'",
    ),
    "arguments beside class_path": (
        ["--data.prompts", "{class_path: JsonlPrompts, path: x.jsonl}"],
        "`path` stands beside `class_path`", "write {class_path: JsonlPrompts, init_args: {path: x.jsonl}}",
    ),
    "arguments beside class_path in a list": (
        ["--data.rewards", "[{class_path: ExactMatch, weight: 3}]"],
        "`weight` stands beside `class_path`", "write {class_path: ExactMatch, init_args: {weight: 3}}",
    ),
    "a class as a key": (
        ["--data.rewards", "[{ExactMatch: {weight: 3}}]"],
        "the class `ExactMatch` stands in the place of a key", "write {class_path: ExactMatch, init_args: {weight: 3}}",
    ),
    "a class as a key, and no list": (
        ["--data.rewards", "{ExactMatch: {weight: 3}}"],
        "`data.rewards` cannot be", "--data.rewards '[{class_path: ExactMatch, init_args: {weight: 3}}]'",
    ),
    "class for class_path": (["--data.rewards", "[{class: ExactMatch}]"], "no argument `class`", "mean `class_path`?"),
    "no list of classes": (
        ["--data.rewards", "{class_path: ExactMatch}"], "cannot be", "--data.rewards '[{class_path: ExactMatch}]'",
    ),
    "a number in a list of classes": (
        ["--data.rewards", "[5]"], "'5' is no Reward", "name a class, for example lit_grpo.rewards.ExactMatch",
    ),
    "null in a list of classes": (["--data.rewards", "[null]"], "'null' is no Reward", "name a class, for example"),
    "a class of another kind": (
        ["--trainer.callbacks+", "lit_grpo.rewards.ExactMatch"],
        "'lit_grpo.rewards.ExactMatch' is no Callback", "for example lit_grpo.callbacks.HealthMonitor",
    ),
    "arguments of a class that are none": (
        ["--data.rewards", "[{class_path: ExactMatch, init_args: 3}]"],
        "`init_args` of lit_grpo.rewards.ExactMatch takes the arguments as keys and values", "write init_args: {NAME",
    ),
    "no class": (["--data.prompts.class_path", ""], "'' is no import path", "lit_grpo.data.JsonlPrompts"),
    "a number as a class": (["--data.prompts.class_path", "5"], "'5' is no import path", "lit_grpo.data.JsonlPrompts"),
    "a mapping as a class": (
        ["--data.prompts.class_path", "{a: 1}"], "'{a: 1}' is no import path", "give the import path",
    ),
    "a class misspelt with an argument behind it": (
        ["--data.prompts", "JsonlPrompt", "--data.prompts.path", "x.jsonl"],
        "'JsonlPrompt' is no import path", "did you mean lit_grpo.data.JsonlPrompts?",
        "command line, --data.prompts JsonlPrompt",
    ),
    "a logger of Lightning, misspelt": (
        ["--trainer.logger", "[RunLogger, CSVLoger]"], "'CSVLoger' is no import path", "loggers.CSVLogger?",
    ),
    "below a number of a class": (
        ["--data.prompts.digits.x", "1"], "`digits` of lit_grpo.data.AdditionPrompts has no keys below it", "its value",
    ),
    "null for a number of a class": (
        ["--data.prompts.digits", "null"], "digits` cannot be 'null'", "for example --data.prompts.digits 1",
    ),
    "an argument of no class": (
        ["--data.val_prompts.path", "x.jsonl"], "no argument `path`",
        "name its class before it, for example --data.val_prompts lit_grpo.data.JsonlPrompts --data.val_prompts.path",
    ),
    "all arguments of no class": (
        ["--data.val_prompts.init_args", "{path: x.jsonl}"], "no argument `path`",
        "--data.val_prompts lit_grpo.data.JsonlPrompts --data.val_prompts.init_args '{path: x.jsonl}'",
    ),
    "an argument of no class in a list": (
        ["--data.clean.decontaminate.benchmark", "gsm8k"], "no argument `benchmark`",
        "--data.clean.decontaminate+ lit_grpo.data.BenchmarkPrompts --data.clean.decontaminate.benchmark gsm8k",
    ),
    "an argument of a word": (
        ["--trainer.strategy.timeout", "0:30:00"], "is an argument of a class, and `trainer.strategy` is 'auto'",
        "for example --trainer.strategy lightning.pytorch.strategies.DDPStrategy",
    ),
    "an argument of nothing": (
        ["--trainer.profiler.dirpath", "x"], "there is no option --trainer.profiler.dirpath",
        "--trainer.profiler lightning.pytorch.profilers.SimpleProfiler --trainer.profiler.dirpath x", "command line",
    ),
    "path of another class": (["--data.prompts.path", "x.jsonl"], "no argument `path`", "it takes digits, operands"),
    "a reward by its number": (
        ["--data.rewards.0.weight", "3"], "no argument `0`", "--data.rewards.NAME is an argument of the last class",
    ),
    "the wrong one of several that append": (
        ["--data.rewards+", "ExactMtch", "--data.rewards+", "MathReward"],
        "'ExactMtch' is no import path", "did you mean", "command line, --data.rewards+ ExactMtch",
    ),
    "the wrong one of several arguments": (
        ["--data.rewards.weight", "heavy", "--data.rewards+", "ExactMatch", "--data.rewards.weight", "3"],
        "MathReward.weight` cannot be 'heavy'", "give a number", "command line, --data.rewards.weight heavy",
    ),
    "a monitor that is none": (
        ["--trainer.callbacks.monitors", "[EntropyCollapse]"],
        "'EntropyCollapse' is no import path", "for example lit_grpo.callbacks.EntropyMonitor",
    ),
    "no list of monitors": (
        ["--trainer.callbacks.monitors", "5"], f"{HEALTH}.monitors` cannot be '5'",
        "--trainer.callbacks.monitors '[lit_grpo.callbacks.EntropyMonitor]'",
    ),
    "an argument of no monitor": (
        ["--trainer.callbacks.monitors.window", "3"], "no argument `window`",
        "for example --trainer.callbacks.monitors+ lit_grpo.callbacks.EntropyMonitor",
    ),
    "a word for actions": (
        ["--trainer.callbacks.actions", "stop"], f"{HEALTH}.actions` cannot be 'stop'",
        "--trainer.callbacks.actions '{critical: stop}'",
    ),
    "a wrong value in a group": (
        ["--model.optimizer", "{lr: fast}"], "`model.optimizer.lr` cannot be 'fast'", "lr: 1e-6",
    ),
    "a wrong value in a group of groups": (
        ["--model", "{optimizer: {lr: fast}}"], "`model.optimizer.lr` cannot be 'fast'", "give a number",
    ),
    "a wrong choice in a group": (
        ["--model.objective", "{recipe: dappo}"], "`model.objective.recipe` cannot be 'dappo'", "did you mean 'dapo'?",
    ),
    "no list in a group": (
        ["--data", "{rewards: ExactMatch}"], "`data.rewards` cannot be 'ExactMatch'",
        "give a list, for example rewards: [E",
    ),
    "a file for a set in a group": (
        ["--data", "{val: {mine: x.jsonl}}"], "`data.val.mine` takes keys below it",
        "mean --data.val.mine.path x.jsonl?",
    ),
    "a number for a group in a group": (
        ["--data.engine", "{server: 5}"], "`data.engine.server` holds keys and values, not 5",
        "write its keys below it",
    ),
    "arguments of the logger that nobody has named": (
        ["--trainer.logger.init_args", "7"], "keys and values, not '7'", "--trainer.logger.init_args '{root: text}'",
    ),
    "a number for a group in a set": (
        ["--data.val", "{mine: {sampling: 5}}"], "EvaluationSet.sampling` cannot be '5'",
        "give keys and values or null",
    ),
    "a misspelt key in a group": (
        ["--model.optimizer", "{lrr: 1}"], "`model.optimizer` has no key `lrr`", "did you mean `model.optimizer.lr`?",
    ),
    "a misspelt key of a group at the top": (
        ["--checkpoint", "{every: 1}"], "`checkpoint` has no key `every`", "mean `checkpoint.every_n_rollouts`?",
    ),
    "a number for text in a group": (
        ["--model.policy", "{path: 007}"], "cannot be '7'", "quotes make it text: path: '007'",
    ),
    "a class for a group": (
        ["--model.optimizer", "torch.optim.SGD"], "takes keys below it, not 'torch.optim.SGD'",
        "did you mean --model.optimizer.type torch.optim.SGD?",
    ),
    "null for a group": (
        ["--model.optimizer", "null"], "takes keys below it, not 'null'", "give its keys, for example",
    ),
    "a wrong value in an optional group": (
        ["--model.policy.lora.target_modules", "q_proj"], "LoraConfig.target_modules` cannot be 'q_proj'", "a list",
    ),
    "a file for a set": (
        ["--data.val.mine", "x.jsonl"], "`data.val.mine` takes keys below it, not 'x.jsonl'",
        "did you mean --data.val.mine.path x.jsonl?",
    ),
    "a file for a set in a mapping": (
        ["--data.val", "{mine: x.jsonl}"], "`data.val.mine` takes keys below it, not 'x.jsonl'",
        "did you mean --data.val.mine.path x.jsonl?",
    ),
    "a number for a set": (
        ["--data.val.mine", "5"], "takes keys below it, not '5'", "did you mean --data.val.mine.limit 5?",
    ),
    "null for a set": (["--data.val.mine", "null"], "not 'null'", "for example --data.val.mine.path rows.jsonl"),
    "a number for a group of a set": (
        ["--data.val.mine.sampling", "5"], "`data.val.mine.sampling` takes keys",
        "--data.val.mine.sampling.temperature",
    ),
    "a wrong value in a set": (
        ["--data.val.mine.limit", "many"], "EvaluationSet.limit` cannot be 'many'", "--data.val.mine.limit 8",
    ),
    "a wrong value in a group of a set": (
        ["--data.val.mine.sampling", "{temperature: hot}"], "Sampling.temperature` cannot be 'hot'", "temperature: 1.0",
    ),
    "an option with its value in quotes": (
        ["--model.optimizer.lr 1"], "is one word, not an option and its value", "--model.optimizer.lr 1",
        "command line",
    ),
    "no value of an argument": (
        ["--data.prompts.class_path"], "--data.prompts.class_path has no value behind it",
        "for example --data.prompts.class_path lit_grpo.data.JsonlPrompts", "command line",
    ),
    "no value of a list's argument": (
        ["--data.rewards.weight"], "--data.rewards.weight has no value behind it", "give one", "command line",
    ),
    "no value": (
        ["--monitors"], "--monitors has no value behind it", "for example --monitors true", "command line",
    ),
    "no configuration": (["--config", ""], "--config has no file behind it", "--config FILE", "command line"),
    "a folder": (["--config", "."], ". is a folder", "it has c.yaml", "--config"),
    "a list of another length": (
        ["--model.optimizer.betas", "[0.9]"], "cannot be '[0.9]'",
        "give a list of 2, for example --model.optimizer.betas",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG.keys())
def test_what_where_and_what_to_do(case, fit):
    words, what, remedy, *where = case
    code, out, screen = fit(*words)
    assert (code, out) == (2, "")
    assert what in screen
    assert remedy in part(screen, "remedy")
    typed = (
        f"command line, {words[-2]} {words[-1]}" if len(words) > 1 else f"command line, {words[0].replace('=', ' ')}"
    )
    assert part(screen, "where") == (where[0] if where else typed).strip()
    assert not INTERNAL.search(screen)
    if typed_instead := example(part(screen, "remedy")):
        # In the place of all that it is about.
        group = min(word.rstrip("+") for word in typed_instead if word.startswith("--"))
        wrong = next(
            i for i, word in enumerate(words) if word.startswith(group) or group.startswith(word.split("=")[0])
        )
        code, out, screen = fit(*words[:wrong], *typed_instead)
        assert code == 0, screen


ENVIRONMENT = {
    "DATA__REWARDS": ("[ExactMtch]", "did you mean lit_grpo.rewards.ExactMatch?"),
    "DATA__VAL": ("{a: {limit: many}}", "for example limit: 8"),
    "DATA": ("{group_size: many}", "for example group_size: 8"),
    "MODEL__OPTIMIZER": ("{lrr: 1}", "did you mean `model.optimizer.lr`?"),
    "TRAINER__CALLBACKS": ("[HealthMonitr]", "did you mean lit_grpo.callbacks.HealthMonitor?"),
}


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_the_environment_is_named_where_a_file_has_the_key_too(name, fit, monkeypatch):
    value, remedy = ENVIRONMENT[name]
    monkeypatch.setenv(f"LIT_GRPO_FIT__{name}", value)
    code, _, screen = fit()
    assert code == 2
    assert part(screen, "where") == f"environment variable LIT_GRPO_FIT__{name}"
    assert remedy in part(screen, "remedy")


IN_A_FILE = {
    "a file for a set": (
        "data: {val: {mine: x.jsonl}}", "`data.val.mine` takes keys", "did you mean mine: {path: x.jsonl}?",
    ),
    "arguments beside class_path": (
        "data: {rewards: [{class_path: ExactMatch, weight: 3}]}", "`weight` stands beside", "init_args: {weight: 3}}",
    ),
    "a number for text": (
        "data: {prompts: {class_path: JsonlPrompts, init_args: {path: 007}}}", "cannot be '7'", "path: '007'",
    ),
    "a number for a group": (
        "data: {engine: {server: 5}}", "`data.engine.server` holds keys and values, not 5", "write its keys below it",
    ),
    "null in a list of classes": ("trainer: {callbacks: [null]}", "'null' is no Callback", "name a class"),
}  # fmt: skip


@pytest.mark.parametrize("case", IN_A_FILE.values(), ids=IN_A_FILE.keys())
def test_the_same_in_a_file(case, fit, tmp_path):
    text, what, remedy = case
    (tmp_path / "d.yaml").write_text(text)
    code, _, screen = fit("--config", "d.yaml")
    assert code == 2
    assert what in screen
    assert part(screen, "where").startswith("d.yaml:1")
    assert remedy in part(screen, "remedy")
    assert not INTERNAL.search(screen)


RIGHT = {
    "all at once": (["--data.prompts.init_args", "{digits: 2, n: 7}"], "prompts.init_args.digits", 2),
    "without init_args": (["--data.prompts", "{digits: 2}"], "prompts.init_args.digits", 2),
    "another class": (
        ["--data.prompts", "JsonlPrompts", "--data.prompts.path", "a dir/x y.jsonl"], "prompts.init_args.path",
        "a dir/x y.jsonl",
    ),
    "text like a number": (["--data.prompts=JsonlPrompts", "--data.prompts.path=007"], "prompts.init_args.path", "007"),
    "a file for its class": (["--data.prompts", "x.jsonl"], "prompts", "x.jsonl"),
    "the last of a list": (["--data.rewards.init_args", "{weight: 3}"], "rewards.1.init_args.weight", 3.0),
    "one more": (["--data.rewards+=ExactMatch", "--data.rewards.weight", "1e1"], "rewards.2.init_args.weight", 10.0),
    "a set": (["--data.val.more", "{path: x.jsonl, limit: 3}"], "val.more.limit", 3),
    "a set by its arguments": (["--data.val.mine.init_args", "{limit: 3}"], "val.mine.limit", 3),
    "no set": (["--data.val", "null"], "val", None),
}  # fmt: skip


@pytest.mark.parametrize("case", RIGHT.values(), ids=RIGHT.keys())
def test_what_is_right_is_taken(case, fit):
    words, key, value = case
    code, out, screen = fit(*words)
    assert code == 0, screen
    found = yaml.safe_load(out)["data"]
    for name in key.split("."):
        found = found[int(name)] if isinstance(found, list) else found[name]
    assert found == value


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--data.prompts.help", "Jsonl"], "remedy: did you mean lit_grpo.data.JsonlPrompts?"),
        (
            ["--data.rewards.help", "lit_grpo.data.AdditionPrompts"],
            "is no Reward where: command line, --data.rewards.help",
        ),
        (["--data.group_size.help"], "remedy: lit-grpo fit --help data.group_size describes it"),
    ],
)
def test_help_of_a_class_that_is_none(words, expected, fit):
    code, _, screen = fit(*words)
    assert code == 2
    assert expected in screen


def test_help_of_a_class_leaves_out_what_stands_beside_it(capsys):
    words = ["--data.rewards.help", "ExactMatch", "--data.group_size", "4"]
    assert main(["fit", "--config", "c.yaml", *words]) == 0
    assert "--data.rewards.ignore_case" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["--data.prompts", ""],
        ["--data.prompts="],
        ["--data.val_prompts", ""],
        ["--data.val.mine.path", ""],
        ["--data.prompts.init_args.path="],
        ["--ckpt_path", ""],
        ["--checkpoint.dirpath", ""],
        ["--model.policy.path", ""],
    ],
    ids=" ".join,
)
def test_an_empty_path_is_not_the_current_folder(words, fit):
    code, _, screen = fit(*words)
    assert code == 2
    assert f"`{words[0].strip('-=')}` is empty".replace(".init_args", "") in screen.replace(".init_args", "")
    assert part(screen, "where") == f"command line, {words[0].rstrip('=')}"
    assert "is a variable of the shell not set?" in part(screen, "remedy")


def test_an_empty_path_of_a_file_and_of_the_environment(fit, tmp_path, monkeypatch):
    (tmp_path / "d.yaml").write_text("data: {prompts: ''}")
    code, _, screen = fit("--config", "d.yaml")
    assert code == 2
    assert "`data.prompts` is empty where: d.yaml:1" in screen
    monkeypatch.setenv("LIT_GRPO_FIT__CKPT_PATH", "")
    code, _, screen = fit()
    assert code == 2
    assert "`ckpt_path` is empty where: environment variable LIT_GRPO_FIT__CKPT_PATH" in screen


# What only the class or the Trainer itself refuses, while they are built.
REFUSED = {
    "no argument that is needed": (
        ["--data.prompts", "JsonlPrompts"], "needs `path`", "--data.prompts JsonlPrompts",
        "for example --data.prompts.path rows.jsonl",
    ),
    "no function": (
        ["--data.rewards+", "FunctionReward"], "needs `function`", "--data.rewards+ FunctionReward",
        "for example --data.rewards.function my_module.my_function",
    ),
    "a time": (
        ["--trainer.max_time", "8h"], "not a valid duration", "--trainer.max_time 8h", "--trainer.max_time 00:08:00:00",
    ),
    "a strategy": (
        ["--trainer.strategy", "null"], "strategy name", "--trainer.strategy null", "--trainer.strategy ddp",
    ),
    "an action below an argument": (
        ["--trainer.callbacks.actions", "{critical: stopp}"], "'stopp' is no action",
        "--trainer.callbacks.actions {critical: stopp}", "choose one of log,",
    ),
    "an argument of a class of Lightning": (
        ["--trainer.callbacks+", "EarlyStopping", "--trainer.callbacks.monitor=r", "--trainer.callbacks.mode", "high"],
        "`mode` can be", "--trainer.callbacks.mode high", "change its arguments",
    ),
    "a scheduler": (
        ["--model.optimizer.scheduler", "StepLR"], "'StepLR' is no import path", "--model.optimizer.scheduler StepLR",
        "for example torch.optim.lr_scheduler.StepLR",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_refused_while_it_is_built(case, capsys, monkeypatch):
    from lit_grpo.learner import models

    def loaded(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(models, "load_model", loaded)
    words, what, place, remedy = case
    assert main(["fit", "--config", "c.yaml", *words]) == 2
    screen = " ".join(capsys.readouterr().err.split())
    assert what in screen
    assert f"command line, {place}" in part(screen, "where")
    assert remedy in part(screen, "remedy")
