"""Logs finished rollouts to W&B or MLflow as they end: rewards, lengths, drift and staleness by policy version.

Shows how a run is continued after the last rollout that it has, after any failure: the file of follow_rollouts.py has them all.
"""

from collections.abc import Sequence

from follow_rollouts import Entry, Track, parser_of, run


def wandb_run(project: str, name: str) -> tuple[int, Track]:
    """Open or continue a run of W&B; return how many rollouts it has, and the function that logs one."""
    import wandb  # noqa: PLC0415 - one of two trackers

    run = wandb.init(project=project, id=name, resume="allow")
    run.define_metric("rollout/*", step_metric="rollout/policy_version")
    return run.step, lambda number, entry: run.log(
        {f"rollout/{name}": value for name, value in entry["values"].items()}, step=number
    )


def mlflow_run(experiment: str, name: str) -> tuple[int, Track]:
    """Open or continue a run of MLflow. The step of a metric is the policy version; equal metrics are stored once."""
    from mlflow import MlflowClient  # noqa: PLC0415
    from mlflow.entities import Metric  # noqa: PLC0415

    client = MlflowClient()
    found = client.get_experiment_by_name(experiment)
    place = client.create_experiment(experiment) if found is None else found.experiment_id
    runs = client.search_runs([place], f"attributes.run_name = '{name}'")
    run = runs[0] if runs else client.create_run(place, run_name=name)

    def track(number: int, entry: Entry) -> None:
        values, time_ms = entry["values"], entry["finished_ms"]
        step = values.get("policy_version", 0)
        metrics = [Metric(f"rollout/{name}", value, time_ms, step) for name, value in values.items()]
        client.log_batch(run.info.run_id, [*metrics, Metric("rollouts", number + 1, time_ms, number)])

    return int(run.data.metrics.get("rollouts", 0)), track


def main(arguments: Sequence[str] | None = None) -> None:
    """Log rollouts until the program is stopped."""
    parser = parser_of(__doc__)
    tracker = parser.add_mutually_exclusive_group(required=True)
    tracker.add_argument("--wandb", metavar="PROJECT", help="log to this project of W&B")
    tracker.add_argument("--mlflow", metavar="EXPERIMENT", help="log to this experiment of MLflow")
    parser.add_argument("--run", default="tokentape", help="ID of the run, its name in MLflow (default: %(default)s)")
    options = parser.parse_args(arguments)
    opened = wandb_run(options.wandb, options.run) if options.wandb else mlflow_run(options.mlflow, options.run)
    run(options, *opened)


if __name__ == "__main__":
    main()
