"""Sweeps on a Ray cluster give what one machine gives, whatever happens to the machines of the cluster."""

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import dissensus as ds
from dissensus.cli.main import app
from dissensus.studies import run as runner
from dissensus.train import ClusterError, RayCluster
from dissensus.train import cluster as clusters

pytest.importorskip("ray", reason="Ray is not installed: pip install 'dissensus[ray]'")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("unchecked")]  # Ray leaves sockets open

N = 24
augmented = partial(ds.objectives.augmented, loss="squared_error", pool="score")
HEAD = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 * 2**20}
WORKER = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


@pytest.fixture(scope="module")
def cluster():
    """A head and a node with one core each; this process is connected to it."""
    import ray
    from ray.cluster_utils import Cluster

    try:
        started = Cluster(initialize_head=True, head_node_args=HEAD)
    except Exception as reason:
        pytest.skip(f"Ray cannot start here: {reason}")
    try:
        started.add_node(**WORKER)
        ray.init(address=started.address, logging_level=logging.ERROR, log_to_driver=False)
        yield started
    finally:
        ray.shutdown()
        started.shutdown()


def network(width: int = 5) -> nn.Module:
    layers = [nn.Linear(3, width, bias=False), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(width, 2)]
    return nn.Sequential(*layers).double()


def perceptron(width: int) -> nn.Module:
    return ds.nets.mlp(3, 2, (width,)).double()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    return x, torch.randn(N, 2, generator=generator, dtype=torch.float64)


def swept(objective: Any = augmented, build: Any = network, source: Any = None, **options: Any) -> ds.Sweep:
    settings = {"grid": {"beta": [0.0, 0.5, 1.0]}, "members": 2, "epochs": 3, "batch_size": 8, **options}
    return ds.sweep(build, data() if source is None else source, objective, **settings)


def assert_equal_runs(actual: ds.Sweep, expected: ds.Sweep) -> None:
    """Weights, statistics, histories and ends of every run."""
    assert actual.points == expected.points
    for run in range(len(expected)):
        mine, theirs = (dict(sweep.run(run).state_dict()) for sweep in (actual, expected))
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            torch.testing.assert_close(mine[name], tensor, rtol=1e-8, atol=1e-10, equal_nan=True)
        mine, theirs = actual.outcomes[run], expected.outcomes[run]
        assert (mine.status, mine.reason) == (theirs.status, theirs.reason)
        assert (mine.history.best_epoch, mine.history.steps) == (theirs.history.best_epoch, theirs.history.steps)
        for entry, other in zip(mine.history.epochs, theirs.history.epochs, strict=True):
            assert entry.keys() == other.keys()
            for name in entry.keys() - {"seconds"}:
                assert entry[name] == pytest.approx(other[name], rel=1e-8), (run, name)


def loader() -> Any:
    """Batches that are shuffled by torch's global generator."""
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data()), batch_size=8, shuffle=True)


def diverging(outputs: torch.Tensor, targets: torch.Tensor, *, beta: float) -> ds.LossParts:
    parts = augmented(outputs, targets, beta=beta)
    return parts._replace(total=torch.where(torch.as_tensor(beta) == 0.5, float("nan"), parts.total))


CASES: dict[str, dict[str, Any]] = {
    "blocks of one shape": {"grid": {"beta": [0.0, 0.3, 0.6], "seed": [0, 1]}, "weight_decay": 0.1},
    "several shapes": {"grid": {"beta": [0.2], "width": [3, 4], "members": [1, 3], "batch_size": [8, 5]}},
    "early stopping": {"validation": 0.25, "patience": 1, "min_delta": 0.05, "epochs": 6},
    "folds": {"source": [data(), data()], "grid": {"fold": [0, 1], "beta": [0.5]}, "optimizer": "sgd", "lr": 0.1},
    "a loader": {"source": loader, "batch_size": 8},
    "bagging": {"bootstrap": True, "objective": partial(ds.objectives.independent, loss="squared_error"), "grid": [{}]},
    "members that share": {"shared": "0.*", "shared_lr": 0.02, "backend": "loop"},
    "padded runs": {"build": perceptron, "grid": {"width": [3, 5], "beta": [0.2, 0.4]}, "padding": True},
    "a run that diverges": {"objective": diverging},
}


@pytest.mark.parametrize("name", CASES)
def test_a_cluster_gives_what_one_machine_gives(cluster, name, tmp_path):
    options = dict(CASES[name])
    source = options.pop("source", None)

    def trained(**more):
        torch.manual_seed(5)
        return swept(source=source() if callable(source) else source, **options, **more)

    assert_equal_runs(trained(cluster="ray", checkpoint=tmp_path / "a"), trained())


def test_lambdas_and_local_classes_are_sent(cluster, tmp_path):
    class Network(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.first, self.last = nn.Linear(3, width), nn.Linear(width, 2)

        def forward(self, x):
            return self.last(torch.relu(self.first(x)))

    scale = 0.5
    options: dict[str, Any] = {"grid": {"width": [4], "seed": [0, 1]}, "build": lambda width: Network(width).double()}
    options["objective"] = lambda outputs, targets: ds.LossParts(scale * (outputs - targets).square().sum(0).mean(), {})
    result = swept(**options, cluster="ray", checkpoint=tmp_path)
    assert_equal_runs(result, swept(**options))
    assert type(result.run(1).member(0)) is Network


def test_the_default_dtype_is_that_of_this_process(cluster, tmp_path):
    torch.set_default_dtype(torch.float64)
    try:
        options: dict[str, Any] = {
            "build": partial(ds.nets.mlp, 3, 2, (4,)),
            "source": tuple(tensor.numpy() for tensor in data()),
        }
        assert_equal_runs(swept(**options, cluster="ray", checkpoint=tmp_path), swept(**options))
    finally:
        torch.set_default_dtype(torch.float32)


class ClippedInPlace(torch.utils.data.Dataset):
    """Examples whose arrays are changed as they are read."""

    def __init__(self) -> None:
        self.x, self.y = (tensor.numpy() for tensor in data())

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.x[index] = self.x[index].clip(-1, 1)
        return torch.from_numpy(self.x[index].copy()), torch.from_numpy(self.y[index])


def test_a_data_set_may_change_its_arrays(cluster, tmp_path):
    def trained(**options):
        loader = torch.utils.data.DataLoader(ClippedInPlace(), batch_size=8)
        return swept(source=loader, grid={"seed": [0, 1]}, objective=partial(augmented, beta=0.5), **options)

    assert_equal_runs(trained(cluster="ray", checkpoint=tmp_path), trained())


def plainly(outputs: torch.Tensor, targets: torch.Tensor, *, beta: float) -> ds.LossParts:
    """The objective as workers know it: the tests add checks of shapes to that of the package."""
    return ds.objectives.augmented(outputs, targets, beta=beta, loss="squared_error", pool="score")


def test_the_second_call_goes_on_here_or_there(cluster, tmp_path):
    first = swept(plainly, cluster="ray", checkpoint=tmp_path)
    steps = sorted(path.name for path in tmp_path.glob("part-*/step-*"))
    with pytest.raises(ValueError, match="resume=True"):
        swept(plainly, cluster="ray", checkpoint=tmp_path)
    for where in ({"cluster": "ray"}, {}):
        assert_equal_runs(swept(plainly, **where, checkpoint=tmp_path, resume=True), first)
    assert sorted(path.name for path in tmp_path.glob("part-*/step-*")) == steps, "nothing is trained again"
    with pytest.raises(ds.StorageError, match="another sweep"):
        swept(plainly, cluster="ray", checkpoint=tmp_path, resume=True, lr=0.5)


def test_one_progress_counts_the_steps_of_all_runs(cluster, tmp_path):
    moments: list[ds.Progress] = []
    grid = {"beta": [0.0, 0.5], "width": [3, 4]}
    result = swept(grid=grid, cluster="ray", checkpoint=tmp_path, progress=moments.append)
    steps = [moment.step for moment in moments]
    assert steps == sorted(steps)
    assert {moment.steps for moment in moments} == {2 * 3 * 3}
    assert moments[-1].step == moments[-1].steps
    losses = [result.history(run).epochs[-1]["loss"] for run in range(4)]
    assert moments[-1].loss == pytest.approx(sum(losses) / 4)


def slowly(outputs: torch.Tensor, targets: torch.Tensor, *, beta: float, calls: str) -> ds.LossParts:
    """The objective, which notes every call of a process, and takes a while."""
    with open(f"{calls}/{os.getpid()}", "a") as file:
        file.write(".")
    time.sleep(0.03)
    return augmented(outputs, targets, beta=beta)


def steps_of(folder: Path) -> int:
    """The steps of the newest checkpoint of a part."""
    return max((int(path.name.split("-")[1]) for path in folder.glob("step-*")), default=0)


@contextlib.contextmanager
def once_under_way(folder: Path, parts: int, act: Any):
    """A block in which something is done as soon as some parts have come to their fifth step."""

    def wait():
        until = time.monotonic() + 60
        while time.monotonic() < until and not over.is_set():
            if sum(steps_of(part) >= 5 for part in folder.glob("part-*")) >= parts:
                act()
                return
            time.sleep(0.02)

    over, watching = threading.Event(), threading.Thread(target=wait)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()


LONG = {"grid": {"beta": [0.0, 1.0]}, "epochs": 10, "checkpoint_seconds": 0}
"""Thirty steps of each run, with a checkpoint after each."""
TRIALS = 10
"""Calls of the objective, at most, by which it is tried before training, and which choose a backend."""


@pytest.fixture
def interruptible():
    """The handler of SIGINT that a program has in a terminal; a shell lets those in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_stops_the_workers_and_a_second_call_goes_on(cluster, interruptible, tmp_path):
    (tmp_path / "calls").mkdir()
    objective = partial(slowly, calls=str(tmp_path / "calls"))
    longer = {**LONG, "epochs": 40}  # so that a slow machine does not come to the end before the interrupt arrives
    options = {**longer, "cluster": "ray", "checkpoint": tmp_path / "runs"}
    with (
        once_under_way(tmp_path / "runs", 1, lambda: os.kill(os.getpid(), signal.SIGINT)),
        pytest.raises(KeyboardInterrupt),
    ):
        swept(objective, **options)

    def calls():
        return sum(len(file.read_text()) for file in (tmp_path / "calls").iterdir())

    before = calls()
    time.sleep(0.5)
    assert calls() == before < 2 * 12 * longer["epochs"], "no worker trains any more"
    assert_equal_runs(swept(objective, **options, resume=True), swept(**longer))
    assert calls() <= 2 * 120 + TRIALS


def failing(outputs: torch.Tensor, targets: torch.Tensor, *, beta: float, how: str) -> ds.LossParts:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise {"words": ValueError("no more paper"), "memory": torch.OutOfMemoryError("tried to allocate 3 TiB")}[how]


def test_an_error_of_the_objective_arrives_as_it_is(cluster, tmp_path):
    with pytest.raises(ValueError, match="^no more paper") as told:
        swept(partial(failing, how="words"), cluster="ray", checkpoint=tmp_path)
    assert "failing" in told.value.__notes__[0], "the lines of the worker are told"


def warning(outputs: torch.Tensor, targets: torch.Tensor, *, beta: float) -> ds.LossParts:
    if not outputs.requires_grad:
        warnings.warn("this is the objective", RuntimeWarning, stacklevel=1)
    return augmented(outputs, targets, beta=beta)


def test_warnings_of_workers_are_told_once(cluster, tmp_path, caplog):
    swept(warning, grid={"beta": [0.5, 1.0]}, validation=0.25, cluster="ray", checkpoint=tmp_path)
    told = [record.message for record in caplog.records if "this is the objective" in record.message]
    assert len(told) == 1
    assert told[0].startswith("RuntimeWarning: this is the objective (")


def test_a_task_that_runs_out_of_memory_gets_the_advice_of_one_machine(cluster, tmp_path):
    with pytest.raises(ds.OutOfMemory, match="What helps: .*a smaller batch"):
        swept(partial(failing, how="memory"), cluster="ray", checkpoint=tmp_path)


def test_what_ray_stops_for_want_of_memory_gets_advice():
    task = clusters.Task(print, (), "run 3", clusters.Need(), on_lost=lambda told: ds.OutOfMemory(f"{told} Smaller."))
    attempts = clusters._Attempts(task)
    lost = clusters._Lost(RuntimeError("killed"), memory=True)
    attempts.count(lost, 2)
    with pytest.raises(ds.OutOfMemory, match="run 3 has lost its worker 2 times .*: killed. Smaller"):
        attempts.count(lost, 2)


def test_what_does_not_arrive_at_a_worker_is_a_loss(monkeypatch):
    import ray

    outcome = clusters._Outcome(None, ray.exceptions.ObjectLostError("ab", None, ""), "", [], "n")
    monkeypatch.setattr("ray.get", lambda reference: outcome)
    with pytest.raises(clusters._Lost, match="Failed to retrieve object ab"):
        clusters.Workers(ray, RayCluster())._result(clusters.Task(print, (), "run 3", clusters.Need()), None)


def test_attempts_count_from_the_last_progress(tmp_path):
    task = clusters.Task(print, (), "run 3", clusters.Need(), came_to=lambda: len(list(tmp_path.iterdir())))
    attempts = clusters._Attempts(task)
    for number in range(5):
        (tmp_path / str(number)).touch()
        attempts.count(clusters._Lost(RuntimeError("node died"), memory=False), 2)
    with pytest.raises(ClusterError, match="2 times without coming further: node died."):
        attempts.count(clusters._Lost(RuntimeError("node died"), memory=False), 2)


def test_what_cannot_be_sent_is_named(cluster, tmp_path):
    lock = threading.Lock()

    def objective(outputs, targets, *, beta):
        with lock:
            return augmented(outputs, targets, beta=beta)

    with pytest.raises(TypeError, match="^`objective` must be something that can be sent to workers; got .*lock"):
        swept(objective, cluster="ray", checkpoint=tmp_path)


def test_no_node_is_large_enough(cluster, tmp_path):
    with pytest.raises(ClusterError, match=r"a task takes 64 CPUs.*no node has that\. Nodes: .*1 CPUs"):
        swept(cluster=RayCluster(cpus=64), checkpoint=tmp_path)


def test_a_device_that_no_node_has_is_refused(cluster, tmp_path):
    with pytest.raises(ClusterError, match=r"a task takes 1 CPUs, 0\.5 GPUs, .*no node has that"):
        swept(device="cuda", cluster=RayCluster(gpus=0.5), checkpoint=tmp_path)


def test_a_node_with_another_dissensus_is_refused(cluster, tmp_path):
    other = tmp_path / "dissensus"
    other.mkdir()
    (other / "__init__.py").write_text("__version__ = '0.0'")
    node = cluster.add_node(**WORKER, env_vars={"PYTHONPATH": str(tmp_path)})
    try:
        with pytest.raises(ClusterError, match=r"cannot import dissensus \(.*\)\. Install dissensus 0"):
            swept(cluster="ray", checkpoint=tmp_path / "runs")
    finally:
        cluster.remove_node(node)


def test_other_versions_are_told():
    ours = clusters._versions()
    clusters._check_versions("n", {**ours, "error": ""})
    with pytest.raises(ClusterError, match=rf"node n has torch 1\.0, and this process has {ours['torch']}"):
        clusters._check_versions("n", {**ours, "torch": "1.0"})


def test_a_folder_that_a_node_does_not_see_is_refused(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "write_text", lambda path, text: None)
    workers = clusters.Workers(__import__("ray"), RayCluster())
    nodes = workers.fitting(clusters.Need())
    monkeypatch.setattr(clusters, "_check_versions", lambda *arguments: None)
    with pytest.raises(
        ValueError, match="^`checkpoint` must be a folder that all nodes see; got .*, which node .* does"
    ):
        workers.examine(nodes, tmp_path, "checkpoint")
    with pytest.raises(ValueError, match="^`root` must be a folder that all nodes see; got .*, which node .* does"):
        clusters.check_seen("root", tmp_path / "absent" / "spec.toml")


STUDY = {
    "search.trials": 2,
    "search.epochs": 2,
    "search.space": {"lr": [0.01, 0.003], "members": [2], "width": [4], "depth": [1]},
    "data": ["made-table"],
    "optimisation.examples": 60,
}


def test_a_study_on_a_cluster_gives_the_rows_of_one_machine(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told: list[tuple[str, float]] = []
    folders = [
        runner.run("collusion/figure-2", "smoke", changes=STUDY, root=Path(root), **options)
        for root, options in (
            ("there", {"cluster": "ray", "on_study": lambda *words: told.append(words)}),
            ("here", {}),
        )
    ]
    mine, theirs = (json.loads((folder / "report.json").read_text()) for folder in folders)
    for row, other in zip(mine["rows"], theirs["rows"], strict=True):
        assert row["hyperparameters"] == other["hyperparameters"], "the search has found the same"
        assert row["measures"] == pytest.approx(other["measures"], rel=1e-4)
    assert mine["made"]["hardware"].startswith("Ray cluster of 2 nodes, 2 CPUs")
    assert mine["made"]["searched_networks"] == theirs["made"]["searched_networks"]
    assert told[-1] == ("2 of 2 tasks are done, on a Ray cluster of 2 nodes, 2 CPUs", 1.0)
    assert not list(folders[0].rglob("search-*")), "checkpoints of trials are gone"
    assert runner.run("collusion/figure-2", "smoke", changes=STUDY, root=Path("there"), cluster="ray") == folders[0]


def test_the_runs_of_a_unit_are_tasks_where_units_would_leave_workers_idle(cluster, tmp_path, caplog):
    caplog.set_level(logging.INFO, "dissensus")
    told: list[str] = []
    folders = [
        runner.run("collusion/figure-7", "smoke", changes={"grid.seed": [0]}, root=tmp_path / root, **options)
        for root, options in (
            ("there", {"cluster": "ray", "on_study": lambda text, share: told.append(text)}),
            ("here", {}),
        )
    ]
    assert "in 2 blocks" in caplog.text
    assert any("epoch 4/4" in text for text in told), "its progress is that of a sweep"
    mine, theirs = (json.loads((folder / "report.json").read_text())["rows"] for folder in folders)
    for row, other in zip(mine, theirs, strict=True):
        assert row["hyperparameters"] == other["hyperparameters"]
        assert row["measures"] == pytest.approx(other["measures"], rel=1e-4)


def test_jobs_and_a_cluster_exclude_each_other(tmp_path):
    with pytest.raises(ValueError, match="^`jobs` must be left out with `cluster`; got 2"):
        runner.run("collusion/figure-2", "smoke", root=tmp_path, jobs=2, cluster="ray")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--cluster slurm", "--cluster must be ray; got slurm"),
        ("--address head:6379", "--address goes with --cluster ray"),
        ("--cluster ray --address head", "--address must be HOST:PORT of the head node"),
        ("--cluster ray --device cuda:1", "--device must be cpu or cuda with --cluster"),
    ],
)
def test_wrong_options_of_the_command_are_told(words, told):
    result = CliRunner().invoke(app, ["study", "run", "collusion/figure-2", "--scale", "smoke", *words.split()])
    assert result.exit_code == 2
    assert told in " ".join(result.output.split())


def test_the_command_names_a_cluster_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    words = ["study", "run", "collusion/figure-2", "--scale", "smoke", "--cluster", "ray", "--address", "127.0.0.1:1"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    assert "there is no Ray cluster at 127.0.0.1:1" in " ".join(result.output.split())


def test_another_cluster_than_the_connected_one_is_refused(cluster, tmp_path):
    with pytest.raises(ValueError, match=r"`address` must be the cluster that this process is connected to, [\d.:]+;"):
        swept(cluster=RayCluster(address="127.0.0.1:1"), checkpoint=tmp_path)


# The last two that use the cluster, since its workers take long to start


def test_a_run_whose_node_is_lost_goes_on_elsewhere(cluster, tmp_path, caplog):
    (tmp_path / "calls").mkdir()
    doomed = list(cluster.worker_nodes)[-1]
    objective = partial(slowly, calls=str(tmp_path / "calls"))
    with once_under_way(tmp_path / "runs", 2, lambda: cluster.remove_node(doomed, allow_graceful=False)):
        result = swept(objective, **LONG, cluster="ray", checkpoint=tmp_path / "runs")
    assert_equal_runs(result, swept(**LONG))
    assert "has lost its worker and begins again elsewhere" in caplog.text
    trained = sum(len(file.read_text()) for file in (tmp_path / "calls").iterdir())
    assert 2 * 30 <= trained <= 2 * 30 + TRIALS, "the run went on from its checkpoint"


@pytest.mark.slow
def test_a_task_that_loses_its_worker_too_often_is_an_error(cluster, tmp_path):
    with pytest.raises(ClusterError, match="has lost its worker once without coming further"):
        swept(partial(failing, how="killed"), cluster=RayCluster(attempts=1), checkpoint=tmp_path)


def test_a_client_in_the_environment_is_refused(monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with (
        pytest.raises(ValueError, match="^`RAY_ADDRESS` must be HOST:PORT of the head node, not of a Ray client"),
        clusters.connected(RayCluster()),
    ):
        pass


def test_the_connection_of_a_client_is_refused(monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.util.client.ray.is_connected", lambda: True)
    with (
        pytest.raises(ValueError, match="^`cluster` must be one that this process belongs to"),
        clusters.connected(RayCluster()),
    ):
        pass


def test_what_ray_changes_in_this_process_is_put_back(monkeypatch):
    def init(**options: Any) -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)
        os.environ["RAY_SOMETHING"] = "1"

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name, function in {"init": init, "is_initialized": lambda: False, "shutdown": lambda: None}.items():
        monkeypatch.setattr(f"ray.{name}", function)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with clusters.connected(RayCluster()):
            assert signal.getsignal(signal.SIGTERM) is not before
        assert signal.getsignal(signal.SIGTERM) is before
        assert "RAY_SOMETHING" not in os.environ
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("tasks", "gpus", "cores"), [(40, 1.0, 8), (40, 0.5, 4), (1, 1.0, 32), (40, 0.0, 1), (3, 0.0, 10)]
)
def test_tasks_take_the_cores_that_would_be_idle(monkeypatch, tasks, gpus, cores):
    workers = clusters.Workers(None, RayCluster())
    monkeypatch.setattr(workers, "nodes", lambda: [clusters.Node("1", "a", 32.0, 4.0, 0)])
    assert workers.cores(clusters.Need(1, gpus), tasks) == cores


@pytest.mark.parametrize("address", ["ray://head:10001", "head", "head:port", ":6379", 6379])
def test_an_address_is_host_and_port(address):
    with pytest.raises(ValueError, match="^`address` must be HOST:PORT"):
        RayCluster(address=address)


def test_a_cluster_that_does_not_answer_is_named_with_how_to_start_one(monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with (
        pytest.raises(ClusterError, match=r"no Ray cluster at 127\.0\.0\.1:1 .*`ray start --head --port=6379`"),
        clusters.connected(RayCluster(address="127.0.0.1:1")),
    ):
        pass


def test_without_ray_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'dissensus\[ray\]'"):
        swept(cluster="ray", checkpoint=tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_does_not_go_with_a_cluster_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match="^`checkpoint` must be a folder that all machines of the cluster see; got none"
    ):
        swept(cluster="ray")
    with pytest.raises(ValueError, match="^`callbacks` must be left out with `cluster`"):
        swept(cluster="ray", checkpoint=tmp_path, callbacks=[print])
    with pytest.raises(ValueError, match="^`cluster` must be"):
        swept(cluster="slurm", checkpoint=tmp_path)
    with pytest.raises(TypeError, match="^`cluster` must be 'ray', a RayCluster or None"):
        swept(cluster=3, checkpoint=tmp_path)


def test_a_node_takes_as_many_tasks_as_its_scarcest_part_allows():
    node = clusters.Node("1", "a", cpus=8.0, gpus=2.0, memory=10 * 2**30)
    need = clusters.Need
    assert [node.slots(need(*part)) for part in ((3,), (1, 0.5), (1, 1.0), (1, 0.0, 4 * 2**30), (9,))] == [
        2,
        4,
        2,
        2,
        0,
    ]
