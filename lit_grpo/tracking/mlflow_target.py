"""The MLflow side of the sender: one run of one experiment, created or resumed."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_grpo.tracking.sender import Refused
from lit_grpo.utils.secrets import masked_text
from lit_grpo.utils.text import shorten

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

log = logging.getLogger(__name__)

PARAM_LENGTH = 250
"""Characters of the longest parameter value that every MLflow server takes."""
CUT_MARK = " ... (cut; whole in params.json)"
MAIN_CURVES = {
    "reward": "1 main/1 reward",
    "val/reward": "1 main/2 reward held out",
    "completions/length": "1 main/3 length",
    "policy/entropy": "1 main/4 entropy",
}
"""Second names of the curves to look at first: MLflow's page sorts groups and charts by name, and has
what is in no group at its end."""
IDENTITY_TAG = "lit_grpo.identity"
"""Tag that finds a run whose id was never written down, because the process died just after the run was made."""

# Answers to a request that is wrong for good. Everything else (no answer, 5xx, a locked database) passes by itself.
_FINAL_ERRORS = {
    "BAD_REQUEST",
    "CUSTOMER_UNAUTHORIZED",
    "ENDPOINT_NOT_FOUND",
    "INVALID_PARAMETER_VALUE",
    "INVALID_STATE",
    "NOT_FOUND",
    "NOT_IMPLEMENTED",
    "PERMISSION_DENIED",
    "RESOURCE_ALREADY_EXISTS",
    "RESOURCE_DOES_NOT_EXIST",
    "UNAUTHENTICATED",
}


class MlflowTarget:
    """Target of the sender that writes to MLflow and waits for it; only the sender's thread calls it.

    Args:
        tracking_uri: the store or server.
        experiment: name of the experiment, which is created if missing.
        run_name: name of a new run.
        run_id: run to continue; a new one is created if it is gone.
        identity: name of the run that is unique in the world and known before the run is made; None: it has none.
        search: look for a run of this identity before one is made: an earlier process may have made it.
        artifact_location: place where a new experiment keeps its artifacts; None leaves it to the server.
        tags: tags of a new run.
        on_start: called with (run id, experiment id) when the run exists.
    """

    def __init__(
        self,
        tracking_uri: str,
        experiment: str,
        run_name: str,
        run_id: str | None,
        artifact_location: str | None,
        tags: Mapping[str, str],
        on_start: Callable[[str, str], None],
        identity: str | None = None,
        search: bool = False,
    ) -> None:
        self.tracking_uri = tracking_uri
        self.identity, self._search = identity, search
        self.run_id = run_id
        self._experiment = experiment
        self._run_name = run_name
        self._artifact_location = artifact_location
        self._tags = dict(tags)
        self._on_start = on_start
        self._client: MlflowClient | None = None
        self._params: dict[str, str] = {}
        self._started = False
        self._ended = False

    @property
    def client(self) -> MlflowClient:
        """MLflow's client, made at the first use; creating the tables of a new SQLite store takes seconds."""
        if self._client is None:
            from mlflow.tracking import MlflowClient

            if self.tracking_uri.startswith("sqlite:///"):
                Path(self.tracking_uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
            self._client = MlflowClient(self.tracking_uri)
        return self._client

    def start(self) -> bool:
        """Open the run: the one that is to be continued, else a new one; True if it is new."""
        if self._started and not self._ended:
            return False
        log.debug("opening the MLflow run at %s", masked_text(self.tracking_uri))
        if self.run_id is None and self._search and self.identity is not None:
            self.run_id = self.find(self.identity)
        is_new = self.run_id is None or not self._resume(self.run_id)
        if is_new:
            experiment_id = self._experiment_id()
            tags = {"mlflow.source.name": "lit-grpo", **self._tags}
            if self.identity is not None:
                tags[IDENTITY_TAG] = self.identity
            run = self.client.create_run(experiment_id, tags=tags, run_name=self._run_name)
            self.run_id = run.info.run_id
            self._on_start(run.info.run_id, experiment_id)
        self._started, self._ended = True, False
        log.debug("the MLflow run %s is open", self.run_id)
        return is_new

    def find(self, identity: str) -> str | None:
        """Return the id of the experiment's run that was made for ``identity``; None if there is none."""
        experiment = self.client.get_experiment_by_name(self._experiment)
        if experiment is None:
            return None
        found = self.client.search_runs(
            [experiment.experiment_id], f"tags.`{IDENTITY_TAG}` = '{identity}'", max_results=1
        )
        return found[0].info.run_id if found else None

    def close_dead(self, run_id: str, status: str, reason: str | None) -> None:
        """End the run of a process that died without ending it; a run that has an end keeps it."""
        with _final_errors():
            run = self.client.get_run(run_id)
            if run.info.lifecycle_stage != "deleted" and run.info.status == "RUNNING":
                if reason is not None:
                    self.client.set_tag(run_id, "stop.reason", reason)
                self.client.set_terminated(run_id, status)

    def forget(self, step: int) -> None:
        """Remove the metrics of all steps from ``step`` on, where the store can: an SQL database, without a server.

        MLflow's servers cannot remove a metric. There the tag ``replaced_from_step`` says where a curve has two values.
        """
        store: Any = getattr(self.client._tracking_client, "store", None)
        if not hasattr(store, "ManagedSessionMaker"):
            log.warning(
                "Tracking: this run goes on otherwise than it did before it broke off. MLflow's server cannot remove a "
                "metric, so the curves at %s have two values from step %d on; %s has the later alone.",
                self.tracking_uri,
                step,
                "metrics.jsonl",
            )
            self.tags({"replaced_from_step": str(step)})
            return
        from mlflow.store.tracking.dbmodels.models import SqlLatestMetric, SqlMetric

        try:
            maker = store.ManagedSessionMaker(read_only=False)
        except TypeError:
            # MLflow before 3.17 has no sessions that only read.
            maker = store.ManagedSessionMaker()
        with maker as session:

            def later(table: Any) -> Any:
                return session.query(table).filter(table.run_uuid == self._id, table.step >= step)

            keys = [row.key for row in later(SqlLatestMetric).all()]
            later(SqlMetric).delete(synchronize_session=False)
            later(SqlLatestMetric).delete(synchronize_session=False)
            for key in keys:
                rest = session.query(SqlMetric).filter(SqlMetric.run_uuid == self._id, SqlMetric.key == key)
                # In the order in which MLflow itself decides which value is the latest.
                last = rest.order_by(SqlMetric.step.desc(), SqlMetric.timestamp.desc(), SqlMetric.value.desc()).first()
                if last is not None:
                    names = ("key", "value", "timestamp", "step", "is_nan", "run_uuid")
                    session.add(SqlLatestMetric(**{name: getattr(last, name) for name in names}))

    def _resume(self, run_id: str) -> bool:
        try:
            with _final_errors():
                run = self.client.get_run(run_id)
        except Refused:
            return False
        # Somebody has deleted the run on purpose, so a new one is made instead of bringing it back.
        if run.info.lifecycle_stage == "deleted":
            return False
        self._params = dict(run.data.params)
        self.client.update_run(run_id, status="RUNNING")
        self._on_start(run_id, run.info.experiment_id)
        return True

    def _experiment_id(self) -> str:
        found = self.client.get_experiment_by_name(self._experiment)
        if found is None:
            try:
                with _final_errors():
                    # Otherwise its page opens with traces of language models, of which there are none.
                    tags = {"mlflow.experimentKind": "custom_model_development"}
                    return self.client.create_experiment(self._experiment, self._artifact_location, tags)
            except Refused:
                # Another run created it in the meantime.
                found = self.client.get_experiment_by_name(self._experiment)
                if found is None:
                    raise
        # The name of a deleted experiment is taken until it is restored.
        if found.lifecycle_stage == "deleted":
            with _final_errors():
                self.client.restore_experiment(found.experiment_id)
        return found.experiment_id

    def metrics(self, records: list[dict[str, Any]]) -> None:
        """Send metric records with their steps and times, 1000 values a request, which is MLflow's limit."""
        from mlflow.entities import Metric

        metrics = []
        for record in records:
            # MLflow takes no times from before 1970, which a clock that is wrong may tell.
            step, timestamp = int(record.get("step") or 0), max(0, int(record["wall_time"] * 1000))
            for key, value in record.items():
                if key not in ("step", "wall_time") and isinstance(value, int | float):
                    names = [mlflow_name(key), *([MAIN_CURVES[key]] if key in MAIN_CURVES else [])]
                    metrics += [Metric(name, float(value), timestamp, step) for name in names]
        for start in range(0, len(metrics), 1000):
            with _final_errors():
                self.client.log_batch(self._id, metrics=metrics[start : start + 1000])

    def params(self, params: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        # MLflow refuses to change a parameter. After a resume with other settings the first value stays, and a tag
        # names what changed.
        shown = {mlflow_name(key): shorten(value, PARAM_LENGTH, CUT_MARK) for key, value in params.items()}
        new = {key: value for key, value in shown.items() if key not in self._params}
        changed = sorted(key for key, value in shown.items() if self._params.get(key, value) != value)
        items = [Param(key, value) for key, value in new.items()]
        for start in range(0, len(items), 100):
            with _final_errors():
                self.client.log_batch(self._id, params=items[start : start + 100])
        self._params.update(new)
        if changed:
            self.tags({"params.changed_on_resume": ", ".join(changed)})

    def inputs(self, datasets: Mapping[str, Mapping[str, Any]], model: Mapping[str, Any]) -> None:
        """Note data sets and model as inputs of the run; what the store cannot keep is left out."""
        from mlflow.entities import Dataset, DatasetInput, InputTag, LoggedModelInput

        found = []
        for name, one in datasets.items():
            context = "training" if name == "train" else name.partition("/")[0].replace("val", "validation")
            profile = json.dumps({"num_rows": one.get("count"), "weights": one.get("weights") or {}})
            entity = Dataset(name, str(one.get("digest"))[:36], "local", json.dumps({"set": name}), None, profile)
            found.append(DatasetInput(entity, [InputTag("mlflow.data.context", context)]))
        with _final_errors():
            self.client.log_inputs(self._id, datasets=found, models=[LoggedModelInput(self._model_id(model))])

    def _model_id(self, model: Mapping[str, Any]) -> str:
        """Return the id of the model that runs begin with, which the experiment has once."""
        experiment_id = self.client.get_run(self._id).info.experiment_id
        settings = {key: str(value) for key, value in (model.get("settings") or {}).items() if value is not None}
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
        # Dots and slashes mean something in the name of a model.
        name = re.sub(r"[^\w-]+", "-", str(model.get("name") or "policy")) + f"-{digest[:6]}"
        there = self.client.search_logged_models([experiment_id], f"name = '{name}'", max_results=1)
        if there:
            return str(there[0].model_id)
        params = {key: shorten(value, PARAM_LENGTH, CUT_MARK) for key, value in settings.items()}
        tags = {"path": str(model.get("path")), "digest": digest, "mlflow.model.isExternal": "true"}
        made = self.client.create_logged_model(experiment_id, name=name, params=params, tags=tags, model_type="policy")
        self.client.finalize_logged_model(made.model_id, "READY")
        return str(made.model_id)

    def tags(self, tags: Mapping[str, str]) -> None:
        for key, value in tags.items():
            with _final_errors():
                self.client.set_tag(self._id, key, value[:5000])

    def remove_tags(self, names: Sequence[str]) -> None:
        with _final_errors():
            # One that never arrived cannot be removed.
            there = self.client.get_run(self._id).data.tags
            for name in names:
                if name in there:
                    self.client.delete_tag(self._id, name)

    def artifact(self, path: Path, folder: str | None) -> None:
        if not path.exists():
            raise Refused(f"{path} is gone")
        try:
            with _final_errors():
                if path.is_dir():
                    self.client.log_artifacts(self._id, str(path), folder)
                else:
                    self.client.log_artifact(self._id, str(path), folder)
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            # The trouble is with the file or the artifact folder on this machine, not with the server.
            raise Refused(str(error)) from error

    def end(self, status: str) -> None:
        with _final_errors():
            self.client.set_terminated(self._id, status)
        self._ended = True

    @property
    def _id(self) -> str:
        assert self.run_id is not None
        return self.run_id


@contextmanager
def _final_errors() -> Iterator[None]:
    """Turn the answers that no second try will change into :class:`Refused`."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code in _FINAL_ERRORS:
            raise Refused(error.message) from error
        raise


_LENGTH = 250
"""Characters of the longest name that every MLflow server takes."""


def mlflow_name(key: str) -> str:
    """Return the name under which MLflow keeps a metric or parameter; different keys have different names.

    ``pass@8`` becomes ``pass_at_8``. Letters and digits of every script stay, as MLflow takes them. Where another sign
    has to be replaced, the name ends in a hash of the key, so that two keys that differ in such signs alone stay two.
    """
    # A key that is written like a replaced one must not become the same name.
    unclear = "_at_" in key
    name = key.replace("@", "_at_")
    # MLflow refuses what would be another path, such as a//b, and names that end in space are cut by some stores.
    parts = [part.strip() if part.strip(" .") else "_" for part in re.sub(r"[^\w/. -]+", "_", name).split("/")]
    readable = "/".join(parts)
    if readable == name and not unclear and len(readable) <= _LENGTH:
        return readable
    mark = "-" + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return readable[: _LENGTH - len(mark)] + mark
