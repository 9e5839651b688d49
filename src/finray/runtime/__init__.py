"""The runtime package, the only one that imports Ray: driver, cluster, trainer, worker, preparation, failures, jobs."""
