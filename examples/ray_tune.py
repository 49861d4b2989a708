"""Three learning rates of a job: `python examples/ray_tune.py [JOB.yaml] [--storage FOLDER] [--name NAME]`.

Each trial is a TorchTrainer of its own. Any value of a job file can be swept in this way.
"""

import argparse
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.integration.ray_train import TuneReportCallback

from manta.workers.integrations.ray_train import torch_trainer
from manta.workers.spec.reading import load_job_spec, read_document

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("job", nargs="?", type=Path, default=Path(__file__).with_name("single.yaml"))
parser.add_argument("--storage", type=Path, default=Path("~/ray_results").expanduser(), help="folder for all runs")
parser.add_argument("--name", default="sweep", help="of the sweep's folder in there")
options = parser.parse_args()
folder = options.storage.resolve() / options.name


def trial(job: dict[str, Any]) -> None:
    """One training; its reports are Tune's too."""
    name = tune.get_context().get_trial_id()
    torch_trainer(job, storage_path=str(folder), name=name, callbacks=[TuneReportCallback()]).fit()


job = read_document(options.job)
job["train"].setdefault("optimizer", {})["learning_rate"] = tune.grid_search([3.0e-4, 1.0e-3, 3.0e-3])
# A Ray of its own, with room for two trials at a time: the ranks of each, and what starts them.
ray.init("local", num_cpus=2 * (load_job_spec(options.job).layout.world_size + 1))
tuner = tune.Tuner(
    trial,
    param_space=job,
    tune_config=tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=2),
    run_config=tune.RunConfig(storage_path=str(options.storage.resolve()), name=options.name),
)
best = tuner.fit().get_best_result()
rate = best.config["train"]["optimizer"]["learning_rate"]
print(f"best learning rate {rate:g}: loss {best.metrics['loss']:.4f}, checkpoint {best.metrics['checkpoint_path']}")
