"""A job inside of Ray Train: `python examples/ray_train.py [JOB.yaml] [--storage FOLDER] [--name NAME]`.

A second run with the same name and storage continues where the first one ended.
"""

import argparse
from pathlib import Path

import ray

from manta.workers.integrations.ray_train import torch_trainer
from manta.workers.spec.reading import load_job_spec, read_document

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("job", nargs="?", type=Path, default=Path(__file__).with_name("quickstart.yaml"))
parser.add_argument("--storage", type=Path, default=Path("~/ray_results").expanduser(), help="folder for all runs")
parser.add_argument("--name", help="of this run's folder in there")
options = parser.parse_args()

# A Ray of its own, with a CPU for each rank, whatever the machine has. On your cluster: ray.init() alone.
ray.init("local", num_cpus=load_job_spec(options.job).layout.world_size)
trainer = torch_trainer(read_document(options.job), storage_path=str(options.storage.resolve()), name=options.name)
result = trainer.fit()
print(f"step {result.metrics['step']}: loss {result.metrics['loss']:.4f}, checkpoint {result.checkpoint.path}")
