"""The runtime package, the only one that imports Ray: driver, worker, preparation, resources, the run directory."""
