"""The runtime room: the only one that imports Ray. Driver, worker, preparation, resources, the run directory."""
